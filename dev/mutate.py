"""Change the engine in small ways and see whether a test fails: `python dev/mutate.py [ROOM ...]`.

A mutant that no test notices has survived: a test is missing, or the change makes no difference that is worth
one, and then survivors.txt says why. Each is written into a copy of the checkout, and the tests that call the
changed function run in a fork of one process that has imported PyTorch. (mutmut and cosmic-ray know no random
sample and no reasons for survivors, and start a process for each mutant, which imports PyTorch anew.)
It needs a system that can fork.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "__main__.py"))["import_graft"]()
    sys.exit(import_module("graft.dev.mutate").main())

from .mutants import MODULE, Mutant, mutants

ROOT = Path(__file__).resolve().parent.parent
ROOMS = tuple(f"training/{room}" for room in ("objective", "adapters", "optimizer", "run", "memory/plan.py"))
ARGUED = ROOT / "dev" / "survivors.txt"
FATES = ("killed", "argued", "unexplained")
LIMIT = 0.1
"""The largest share of unexplained survivors in a room."""

TESTS = ("adapters", "files", "job", "memory", "objective", "optimizer", "run", "tools", ".")
"""Folders of tests that run on the engine alone."""
BESIDE = ("tests/data/test_slider.py", "tests/comfy/test_sliders.py", "tests/comfy/test_preservation.py")
"""The only tests of a part of the engine, elsewhere."""
SLOW = ("test_architecture.py", "test_bare_machine.py", "test_gpu.py", "test_rows.py", "test_wheel.py")
WARM = (
    *(
        "torch",
        "torch.distributed",
        "torch.utils.checkpoint",
        "torch._dynamo",
        "torchvision",
        "PIL.Image",
        "yaml",
    ),
    *(
        "safetensors.torch",
        "bitsandbytes",
        "diffusers.training_utils",
        "lycoris",
        "peft",
        "pytorch_optimizer",
    ),
)
"""What the forked process has imported."""
MOST_SECONDS, MOST_CASES = (40, 10, 40), (99, 2, 99)
"""Of the tests for one mutant, and cases of a test: of the room's own, of others, and of BESIDE."""

# --- tests --------------------------------------------------------------------------------------------------


def call_in_fork(act: Callable[[], int], seconds: float) -> int | None:
    """Return what `act` returns in a forked process, None where that takes too long. It is heard nowhere."""
    child = os.fork()
    if not child:
        code = 70
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            code = int(act())
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)  # what it has started goes too
    except ProcessLookupError:
        pass
    return os.waitstatus_to_exitcode(done[1]) if done[0] else os.waitpid(child, 0)[0] and None


def run_tests(root: Path, tests: list[str], *, plugin: object = None, stop: bool = True) -> int:
    """Return pytest's exit code for tests of a checkout."""
    os.chdir(root)
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "dev")]
    for name in [name for name in sys.modules if name.partition(".")[0] == "graft"]:
        del sys.modules[name]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=--import-mode=importlib"]
    options += ["--basetemp", str(root.parent / "tmp"), *(["-x"] if stop else [])]
    return int(pytest.main([*options, *tests], plugins=[plugin] if plugin else []))


class Reach:
    """A plugin that records which functions of a checkout each test calls, and its seconds."""

    def __init__(self, root: Path) -> None:
        self.inside = f"{root}/training/"
        self.start = len(f"{root}/")
        self.shared: set[str] = set()
        """By imports and by fixtures of several tests: they count for each test of the file."""
        self.now = self.shared
        self.tests: dict[str, set[str]] = {}
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if file.startswith(self.inside):
            self.now.add(f"{file[self.start :]}: {frame.f_code.co_name}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.now = self.tests.setdefault(item.nodeid, set())
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        before, self.now = self.now, self.now if fixturedef.scope == "function" else self.shared
        try:
            return (yield)
        finally:
            self.now = before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration  # type: ignore[assignment]
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


@dataclass(frozen=True)
class Reached:
    """What a file of tests calls."""

    shared: list[str]
    tests: dict[str, tuple[float, list[str]]]
    """Test -> (seconds, functions)."""


def reach(root: Path, file: str) -> Reached:
    """Return what each passing test of a file calls."""

    def act() -> int:
        recorder = Reach(root)
        sys.settrace(recorder)
        threading.settrace(recorder)
        run_tests(root, [file], plugin=recorder, stop=False)
        sys.settrace(None)
        passed = recorder.tests.keys() - recorder.failed
        tests = {t: (recorder.seconds[t], sorted(recorder.tests[t])) for t in sorted(passed)}
        (root.parent / "reached.json").write_text(json.dumps([sorted(recorder.shared), tests]))
        return 0

    if call_in_fork(act, 600) != 0:
        raise RuntimeError(f"{file} did not end")
    return Reached(*json.loads((root.parent / "reached.json").read_text()))


def reach_all(root: Path, stored: Path | None) -> dict[str, Reached]:
    """Return what the engine's tests call. `stored` keeps it: only changed files of tests are run again."""
    known = json.loads(stored.read_text()) if stored and stored.exists() else {}
    files = [path for room in TESTS for path in sorted((root / "tests" / room).glob("test_*.py"))]
    files += [root / file for file in BESIDE]
    found = {}
    for path in (path for path in files if path.name not in SLOW):
        name, digest = path.relative_to(root).as_posix(), sha256(path.read_bytes()).hexdigest()
        if name not in known or known[name][0] != digest:
            begin = time.monotonic()
            reached = reach(root, name)
            known[name] = digest, reached.shared, reached.tests
            print(f"{name}: {len(reached.tests)} tests, {time.monotonic() - begin:.0f} s", flush=True)
            if stored:
                stored.write_text(json.dumps(known))
        found[name] = Reached(*known[name][1:])
    return found


def choose_tests(mutant: Mutant, own: str, reached: Mapping[str, Reached]) -> list[list[str]]:
    """Return the tests that call the changed function, the fastest ones: of the folder `own`, and others.

    What is outside functions is for all that import the file. Tests of BESIDE count where there is no other.
    """
    key = f"{mutant.file}: {mutant.function}"
    anywhere = f"{mutant.file}: " if mutant.function == MODULE else f"{key}\n"
    groups: defaultdict[int, list[tuple[float, str]]] = defaultdict(list)
    for file, each in reached.items():
        group = 0 if file.startswith(own) else 2 if file.startswith(BESIDE) else 1
        for test, (seconds, functions) in each.tests.items():
            if key in each.shared or any(name == key or name.startswith(anywhere) for name in functions):
                groups[group].append((seconds, test))
    if len(groups) > 1:
        groups.pop(2, None)
    chosen = []
    for group, tests in sorted(groups.items()):
        kept: list[str] = []
        cases: Counter[str] = Counter()
        left = MOST_SECONDS[group]
        for seconds, test in sorted(tests):
            cases[name := test.partition("[")[0]] += 1
            if left > seconds and cases[name] <= MOST_CASES[group]:
                left -= seconds
                kept.append(test)
        chosen.append(kept)
    # Tests of a file share fixtures.
    return [sorted(tests, key=lambda test: test.partition("::")[0]) for tests in chosen if tests]


class Failed:
    """A plugin that writes down which test failed."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.file.open("a") as file:
                file.write(f"{report.nodeid}\n")


def failing(root: Path, tests: list[str], *, stop: bool = True, seconds: float = 1200) -> list[str] | None:
    """Return the tests that fail, [""] where a file does not load or end, None where all pass."""
    plugin = Failed(root.parent / "failed")
    plugin.file.write_text("")
    if not tests or call_in_fork(lambda: run_tests(root, tests, plugin=plugin, stop=stop), seconds) == 0:
        return None
    return plugin.file.read_text().splitlines() or [""]


def kill(root: Path, mutant: Mutant, groups: list[list[str]]) -> str | None:
    """Return the test that fails with a mutant in the copy of the checkout, None where it survives."""
    path = root / mutant.file
    times, source = path.stat(), path.read_bytes()
    stamp = int(sha256(mutant.source).hexdigest()[:7], 16)
    path.write_bytes(mutant.source)
    os.utime(path, (stamp, stamp))  # a time of its own: stored bytecode is told by time and size
    try:
        failed = next(filter(None, (failing(root, tests, seconds=120) for tests in groups)), None)
        return failed[0] if failed else None
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


# --- the report ---------------------------------------------------------------------------------------------


def argued() -> dict[str, str]:
    """Return {mutant: reason} of survivors.txt.

    A block has "file: function" and changes below it, once or more, and one reason for them all, indented.
    """
    reasons = {}
    for block in filter(None, ARGUED.read_text(encoding="utf-8").split("\n\n")):
        lines = block.strip().splitlines()
        reason, place = " ".join(line.strip() for line in lines if line.startswith("  ")), ""
        for line, after in pairwise(lines):
            if line.startswith("- "):
                reasons[f"{place}\n{line}\n{after}"] = reason
            elif not line.startswith(("+ ", "  ")):
                place = line
    return reasons


def sample(room: str, count: int, seed: int) -> list[Mutant]:
    """Return a random choice of the mutants of a room: a folder, or one file. A change elsewhere in the room
    hardly moves it.
    """
    path = ROOT / room
    files = [path] if path.is_file() else sorted(path.glob("*.py"))
    found = [m for file in files for m in mutants(file.relative_to(ROOT).as_posix(), file.read_bytes())]
    return sorted(found, key=lambda mutant: sha256(f"{seed} {mutant}".encode()).digest())[:count]


def copy_checkout(place: Path) -> Path:
    """Copy the checkout into a folder and return the copy."""
    skipped = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "graft-demo", "*.egg-info")
    return Path(shutil.copytree(ROOT, place / "graft", ignore=skipped))


def main() -> int:
    """Run mutants, print those that survive, and return whether a room has too many unexplained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", default=ROOMS, metavar="ROOM", help="folder or file of training/")
    parser.add_argument("--count", type=int, default=60, help="mutants of each room, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reached", type=Path, help="file that keeps which test calls what")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in WARM:
        with suppress(ImportError):
            import_module(name)
    reasons = argued()
    fates: defaultdict[str, Counter[str]] = defaultdict(Counter)
    killers: defaultdict[str, list[str]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="graft-mutants-", ignore_cleanup_errors=True) as scratch:
        root = copy_checkout(Path(scratch).resolve())
        reached = reach_all(root, options.reached)
        for room in options.rooms:
            for mutant in sample(room, options.count, options.seed):
                groups = choose_tests(mutant, f"tests/{room.split('/')[1]}/", reached)
                killer = kill(root, mutant, groups)
                if killer is None:
                    fate = "argued" if str(mutant) in reasons else "unexplained"
                    print(f"{mutant}\n  {fate}, {sum(map(len, groups))} tests\n", flush=True)
                else:
                    fate = "killed"
                    killers[killer].append(room)
                fates[room][fate] += 1
        # A test that fails without a mutant, alone or now and then, has killed none.
        for test in failing(root, sorted(filter(None, killers)), stop=False) or ():
            print(f"{test} fails by itself: its {len(killers[test])} mutants are not killed")
            for room in killers[test]:
                fates[room].update({"killed": -1, "unexplained": 1})
    print("{:24}{:>9}{:>9}{:>9}{:>13}".format("room", "mutants", *FATES))
    shares = []
    for room, counts in fates.items():
        shares.append(counts["unexplained"] / counts.total())
        line = [room, counts.total(), *(counts[fate] for fate in FATES)]
        print("{:24}{:>9}{:>9}{:>9}{:>13}".format(*line), f"{shares[-1]:5.0%}")
    return int(max(shares) > LIMIT)
