"""Command lines: every form of a subcommand with every bad file, and numbers outside any option's range.

Counted as wrong: an exit code other than 0 and 2, a refusal that is more than one line or does not name the
file, a malformed file that is accepted, a result with a number that is not finite, or one left by a refusal.
Each runs in a process of its own, a fork of this one, which has imported what they need.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from graft.commands import cli

from .bad_files import BAD, MALFORMED, UNUSABLE, file_name, lora, put, witness
from .report import Case, Problem
from .target import BLOCK

STARTER = Path(__file__).resolve().parents[2] / "starter"
BASE = STARTER / "base" / "graft_tiny_sd3.safetensors"
SECONDS = 20.0
"""What a command may take; none has more to do than read a small checkpoint."""

FORMS = {
    "inspect": ("inspect", "BAD"),
    "convert": ("convert", "BAD", "-o", "OUT"),
    "convert --base": ("convert", "LORA", "--base", "BAD", "--layout", "native", "-o", "OUT"),
    "resize": ("resize", "BAD", "--rank", "2", "-o", "OUT"),
    "merge LORA": ("merge", "BASE", "BAD", "-o", "OUT"),
    "merge BASE": ("merge", "BAD", "LORA", "-o", "OUT"),
    "extract BASE": ("extract", "BAD", "BASE", "--rank", "2", "-o", "OUT"),
    "extract TUNED": ("extract", "BASE", "BAD", "--rank", "2", "-o", "OUT"),
    "plan": ("plan", "BAD"),
    "export-workflow": ("export-workflow", "BAD"),
    "train": ("train", "BAD", "--cpu"),
}
"""BAD stands for the bad file, LORA and BASE for sound ones, OUT for what is written."""
ODD_FILES_ACCEPTED = ("inspect", "convert", "convert --base", "resize")
"""Forms that may make something of a file that must not be merged."""

RAW = re.compile(r"\[Errno|codec can't encode|object has no attribute|unsupported operand|not subscriptable")
"""What is in messages that were not written for people."""
NUMBERS = ("nan", "inf", "-inf", "1e400", "-1", "0", "9" * 30, "x", "")
OPTIONS = {
    "merge --strength": ("merge", "BASE", "LORA", "-o", "OUT", "--strength"),
    "resize --rank": ("resize", "LORA", "-o", "OUT", "--rank"),
    "resize --energy": ("resize", "LORA", "-o", "OUT", "--energy"),
    "extract --rank": ("extract", "BASE", "BASE", "-o", "OUT", "--rank"),
    "extract --energy": ("extract", "BASE", "BASE", "-o", "OUT", "--energy"),
    "plan --card": ("plan", "BASE", "--card"),
    "plan --resolution": ("plan", "BASE", "--resolution"),
    "plan --batch": ("plan", "BASE", "--batch"),
    "plan --rank": ("plan", "BASE", "--rank"),
    "clean --unused-days": ("clean", "FOLDER", "--unused-days"),
}
"""Commands that lack the value of their last option."""
NEVER = {"nan", "inf", "-inf", "1e400", "x"}
"""Values that no option of OPTIONS may take."""


@dataclass(frozen=True)
class Ended:
    """What came of a command."""

    code: int | None
    """None: it had to be killed."""
    out: str
    err: str


@contextmanager
def cases(place: Path, comfyui: Path, seed: int) -> Iterator[list[Case]]:
    """Give every form with every bad file, and the options."""
    os.environ["COMFYUI_PATH"] = str(comfyui)
    warm_up()
    yield list(_cases(place))


def _cases(place: Path) -> Iterator[Case]:
    for form, argv in FORMS.items():
        for name in BAD:
            yield Case(form, f"{form}: {name}", partial(with_file, form, argv, name, place))
    for option, argv in OPTIONS.items():
        for value in NUMBERS:
            yield Case("options", f"{option} {value[:12]!r}", partial(with_value, argv, value, place))


def warm_up() -> None:
    """Import what the commands do, so that forks need not, and ComfyUI for `graft plan`."""
    import_commands()
    importlib.import_module("graft.commands.headless.import_comfyui").start_comfyui()
    importlib.import_module("graft.training.comfy.model.outline")


def import_commands() -> None:
    for name in cli.COMMANDS:
        importlib.import_module(f"graft.commands.{name.replace('-', '_')}")


def with_file(form: str, argv: Sequence[str], bad: str, place: Path) -> list[Problem]:
    """Run a form with a bad file and return what it did wrong."""
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        suffix = ".yaml" if argv[0] in ("train", "export-workflow") else ".safetensors"
        path = Path(scratch, file_name(bad) + suffix)
        put(BAD[bad], path)
        ended, out = run_in(Path(scratch), argv, bad=path)
        job = suffix == ".yaml"  # a refused job is a line for each key
        problems = judge(ended, out, named=path.name if bad in MALFORMED else "", one_line=not job)
        refused = bad in MALFORMED or (bad in UNUSABLE and form not in ODD_FILES_ACCEPTED)
        if refused and ended.code == 0:
            problems.append(Problem("wrong", f"accepted: {ended.out.strip()[:200]}"))
        if witness(path).exists():
            problems.append(Problem("wrong", "the code in the file was run"))
        return problems


def with_value(argv: Sequence[str], value: str, place: Path) -> list[Problem]:
    """Run a command with a value for its last option and return what it did wrong."""
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        option = argv[-1]
        ended, out = run_in(Path(scratch), [*argv[:-1], f"{option}={value}"])
        word = option.lstrip("-").partition("-")[0] if value in NEVER else ""
        problems = judge(ended, out, named=word, one_line=False)
        if ended.code == 0 and value in NEVER:
            problems.append(Problem("wrong", f"accepted: {ended.out.strip()[:200]}"))
        return problems


def run_in(scratch: Path, argv: Sequence[str], bad: Path | None = None) -> tuple[Ended, Path]:
    """Run a command whose words name files of a folder; return what came of it and what it was to write."""
    sound, folder, out = scratch / "sound.safetensors", scratch / "folder", scratch / "out.safetensors"
    sound.write_bytes(lora())
    folder.mkdir()
    files = {"BAD": bad, "LORA": sound, "BASE": BASE, "OUT": out, "FOLDER": folder}
    return attempt([str(files.get(word, word)) for word in argv], scratch), out


def attempt(argv: Sequence[str], scratch: Path, *, main: Callable[[Sequence[str]], int] = cli.main) -> Ended:
    """Run the command line in a fork of this process; kill it after SECONDS."""
    streams = [scratch / "stdout", scratch / "stderr"]
    sys.stdout.flush()
    process = os.fork()
    if not process:
        _be_command(argv, streams, main)
    until, ended = time.monotonic() + SECONDS, (0, 0)
    while not ended[0] and time.monotonic() < until:
        time.sleep(0.02)
        ended = os.waitpid(process, os.WNOHANG)
    code = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # with whatever it started
    if code is None:
        os.waitpid(process, 0)
    return Ended(code, *(path.read_text(encoding="utf-8", errors="replace") for path in streams))


def _be_command(argv: Sequence[str], streams: Sequence[Path], main: Callable[[Sequence[str]], int]) -> None:
    """End this process as the command line does."""
    code = 1
    try:
        os.setsid()
        for descriptor, path in enumerate(streams, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.stdout, sys.stderr = (
            os.fdopen(descriptor, "w", errors="backslashreplace") for descriptor in (1, 2)
        )
        code = main(argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def judge(ended: Ended, out: Path, *, named: str, one_line: bool = True) -> list[Problem]:
    """Return what a command did wrong that should have worked, or refused what is `named`, if anything."""
    lines = [line for line in ended.err.replace(named or "\0", "").splitlines() if line.strip()]
    if ended.code is None:
        return [Problem("hang", f"not ended after {SECONDS:g} s")]
    if errors := [block["error"] for block in BLOCK.finditer(ended.err)]:
        return [Problem("traceback", errors[-1])]
    problems = []
    if ended.code not in (0, 2):
        problems.append(Problem("wrong", f"exit code {ended.code}: {ended.err.strip()[-200:]}"))
    if ended.code == 2:
        if one_line and len(lines) != 1:
            problems.append(Problem("wrong", f"{len(lines)} lines: {ended.err.strip()[:300]}"))
        if not any(spelled in ended.err.lower() for spelled in spellings(named.lower())):
            problems.append(Problem("wrong", f"does not name {ascii(named)}: {ended.err.strip()[:300]}"))
        if raw := RAW.search(ended.err):
            problems.append(Problem("wrong", f"not meant for people ({raw[0]}): {ended.err.strip()[:300]}"))
    if ended.code and out.exists():
        problems.append(Problem("wrong", f"left {out.stat().st_size} bytes of a result"))
    if ended.code == 0 and out.exists() and (names := not_finite(out)):
        problems.append(Problem("wrong", f"{len(names)} tensors of the result are not finite, as {names[0]}"))
    return problems


def spellings(name: str) -> set[str]:
    """Return a name as messages may spell it: as it is, escaped, or with a mark for what is no UTF-8."""
    escaped = name.encode("utf-8", "backslashreplace").decode()
    return {name, escaped, ascii(name)[1:-1], name.encode("utf-8", "replace").decode(), repr(name)[1:-1]}


def not_finite(path: Path) -> list[str]:
    """Return the tensors of a file that hold NaN or infinity."""
    from safetensors.torch import load_file

    return [
        name
        for name, tensor in load_file(path).items()
        if tensor.is_floating_point() and not tensor.float().isfinite().all()
    ]
