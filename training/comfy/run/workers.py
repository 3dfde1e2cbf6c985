"""Train Steps on several graphics cards of this machine: torchrun starts a process for each.

They execute the queued graph up to Train Steps (`graft worker`), and keep the run where this process finds
it. What can be seen of it here is its log. Earlier Train Steps were trained here and are only read there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import comfy.model_management
import folder_paths
import psutil  # type: ignore[import-untyped]  # comes with ComfyUI

from ...files.leftovers import FOR_WORKERS, scratch_folder
from ...loop import STOP
from ...run.checkpoints import Checkpoints
from ...run.folder import Run
from ...run.run_log import progress_of, read_entries
from ...user_error import UserError
from ..model.unload import unload
from .session import Show

LAUNCH = Path(__file__).resolve().parents[3] / "__main__.py"
POLL_SECONDS = 0.2
GRACE = 60.0
"""Seconds that the processes get to finish their step and save, and then once more."""
TORCHRUN = re.compile(r"^Traceback .*\n.*_run_module_as_main", re.MULTILINE)
"""How the traceback of a module starts that was started with -m; the processes are files."""

_last: str | None = None
"""In one of the processes, the Train Steps that they were started for."""
_run: str | None = None
"""In one of the processes, the name of the folder in which the server that started them keeps its run."""


def train(
    run: Run, prompt: Mapping[str, Any], node: str | None, count: int, first: int, last: int, show: Show
) -> int:
    """Train `run` from step `first` to `last` in `count` processes; return how many steps were done.

    They are fewer after Finish, and when a run is ended by its settings. Raises UserError on Windows, and
    with their own words when the processes fail; the run is then saved, as it is on Cancel.
    """
    checkpoints = Checkpoints(run)
    saved = checkpoints.latest(after=first, up_to=last)
    if saved is not None and checkpoints.is_end(saved.step, last):
        return saved.step - first
    if sys.platform == "win32":
        raise UserError(
            "gpus: PyTorch for Windows has no NCCL, by which graphics cards work together. Set gpus to 1 and "
            "raise gradient accumulation in Optimizer Settings instead, or run ComfyUI in WSL 2 or on Linux."
        )
    device = comfy.model_management.get_torch_device().type
    if device not in ("cuda", "cpu"):
        raise UserError(f"gpus: devices of type {device!r} cannot train together; set gpus to 1.")
    if node is None or not isinstance(prompt, Mapping) or node not in prompt:
        raise UserError(
            "gpus: only a Train Steps that stands in the queued graph itself can use several; set gpus to 1."
        )
    unload()
    with scratch_folder(FOR_WORKERS) as scratch:
        graph, words = scratch / "graph.json", scratch / "words.log"
        graph.write_text(json.dumps(prompt), encoding="utf-8")
        with words.open("wb") as output, _started(graph, node, run, count, output) as process:
            finished = _follow(run, process, show, saved.step if saved else first, last)
        if process.returncode and not finished:
            said = _errors_in(words.read_text(encoding="utf-8", errors="replace"))
            raise UserError(f"a process of {count} ended; the run is saved. Its last words:\n{said}")
    reached = checkpoints.latest(after=first, up_to=last)
    if reached is None:
        raise UserError("the run was finished before its first step.")
    if finished:
        checkpoints.finish(reached.step, last)
    return reached.step - first


def end_with(node: str | None, run: str | None = None) -> None:
    """Have this process, one of several, end with a Train Steps, which trains in a folder of the name `run`.

    None: each one of the graph is trained.
    """
    global _last, _run
    _last, _run = node, run


def require_same_run(node: str | None, run: str) -> None:
    """Raise UserError where this process would train another run than the server that started it shows."""
    if _run is not None and node == _last and run != _run:
        raise UserError(
            f"this process would train {run}, and ComfyUI shows {_run}: they see other weights, pictures or "
            "settings. Queue the graph again if a file was changed meanwhile; otherwise set gpus to 1, and "
            "please report it."
        )


def trained_before(node: str | None) -> bool:
    """Return whether this Train Steps was trained before the processes were started, for one behind it."""
    return _last is not None and node != _last


def _errors_in(words: str) -> str:
    """Return the errors that the processes ended with, else their last lines: behind these torchrun adds its
    own traceback and a table, neither of which says why."""
    errors = dict.fromkeys(re.findall("graft worker: .*", words))
    return "\n".join(errors or TORCHRUN.split(words)[0].splitlines()[-20:])


def _follow(run: Run, process: subprocess.Popen[bytes], show: Show, shown: int, last: int) -> bool:
    """Report steps after `shown` until the processes have ended; say whether it was finished early."""
    place = 0
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        comfy.model_management.throw_exception_if_processing_interrupted()
        part = read_entries(run.folder / "log.jsonl", place)
        place = part["next"]
        for entry in part["entries"]:
            if entry["step"] > shown:
                shown = entry["step"]
                if show(progress_of(entry, total=last)) == STOP:
                    return True
    return False


@contextmanager
def _started(graph: Path, node: str, run: Run, count: int, words: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start the processes; when the context is left, ask those that are still there to save and end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    options = json.dumps(sys.argv[1:])
    command += [str(LAUNCH), "worker", str(graph), "--until", node, "--comfyui-options", options]
    command += ["--folder", run.folder.name, "--end-with", str(os.getpid())]
    environment = {**os.environ, "COMFYUI_PATH": str(Path(folder_paths.__file__).parent)}
    process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            _ask_to_save(process)
        for end in (process.terminate, process.kill):
            try:
                process.wait(GRACE)
                break
            except subprocess.TimeoutExpired:
                end()
        process.wait()


def _ask_to_save(process: subprocess.Popen[bytes]) -> None:
    """Ask the process that keeps the run to end, and so the others; or all of them, while there is none.

    torchrun would end them by force after half a minute, in the middle of a long step.
    """
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children():
            if child.environ().get("RANK") == "0":
                child.terminate()
                return
    process.terminate()
