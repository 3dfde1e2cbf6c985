"""Kills at random moments, and faults of disks, files and people: does a run survive them?

    python dev/bench.py faults --json

A run is killed with SIGKILL, at a random moment or, half of the times, inside a save (before or after a file
is renamed or flushed), and then continued. It must end with the digest of an undisturbed run: same
weights, optimizer memory, averages and losses, bit for bit. The other faults are the tests of that name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json as json_format
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZERS = ("adamw", "adamw8bit", "prodigy", "schedule-free-adamw", "adafactor")
TRIES = 20
STEPS = 30
PATIENCE_SECONDS = 300

FAULTS = {
    "cancel as an exception and as a base exception": (
        "run/execute",
        "a_run_that_was_cancelled_resumes_bit_equal",
    ),
    "error inside an optimizer step": (
        "run/execute",
        "an_error_inside_an_optimizer_step_falls_back_to_the_saved_one",
    ),
    "corrupted newest checkpoint": (
        "run/checkpoints",
        "a_damaged_newest_checkpoint_falls_back_to_the_one_before",
    ),
    "leftovers of a killed save": ("run/checkpoints", "leftovers_of_a_killed_run_are_removed"),
    "truncated log": ("run/execute", "the_log_has_every_step_once_after_a_resume"),
    "the same run twice at a time": ("run/execute", "one_run_is_not_trained_twice_at_a_time"),
    "read-only output": ("run/execute", "a_folder_that_cannot_be_written_is_named_before_any_step"),
    "full disk at the start": ("run/watch", "a_run_does_not_start_on_a_full_disk"),
    "disk that fills up": ("run/watch", "a_disk_that_fills_up_stops_the_run_with_a_saved_state"),
    "locked folder": ("run/watch", "a_failed_write_is_reported_and_training_goes_on"),
    "no space inside a save": (
        "run/saved_state",
        "a_save_that_breaks_at_any_moment_leaves_the_state_before_or_after",
    ),
    "file removed while open": ("run/saved_state", "a_loaded_state_outlives_its_files"),
    "clock going backwards": ("run/execute", "a_clock_that_is_set_back_disturbs_nothing"),
    "full disk, a tmpfs of 1 MB": (
        "run/faults",
        "a_full_disk_keeps_what_was_saved_and_the_run_goes_on_with_more_room",
    ),
    "error inside the sampler": (
        "comfy/samples",
        "an_error_in_the_sampler_costs_the_pictures_and_not_the_run",
    ),
    "cancel in every phase": (
        "comfy/faults",
        "cancel_in_every_phase_leaves_a_server_that_trains_the_next_prompt",
    ),
    "20 queued runs": ("comfy/faults", "twenty_queued_runs_leave_no_memory_and_no_hooks_behind"),
    "NaN in one image": ("run/execute", "an_image_that_is_no_number_is_named_and_the_weights_are_kept"),
    "interrupt during validation": ("validation", "a_measurement_that_was_interrupted_is_made_up_for"),
    "SIGTERM": ("run/kill", "sigterm_saves_the_step_and_ends_the_process"),
}
"""What goes wrong -> the file under tests/ and the test in it that does it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python dev/bench.py faults`."""
    parser.add_argument("--tries", type=int, default=TRIES, help="runs that are killed")


def run(args: argparse.Namespace) -> int:
    """Return 0 when every run survived everything."""
    return main(args.json, tries=args.tries)


def main(json: bool = False, *, tries: int = TRIES, steps: int = STEPS) -> int:
    """Kill runs, run the fault tests, print what came of it; 0 when everything survived."""
    killed = kill_runs(tries, steps)
    faults = run_faults()
    report = {"kill9": killed, "faults": faults}
    if json:
        print(json_format.dumps(report, indent=1))
    else:
        print(f"killed and continued bit-equal: {killed['equal']} of {killed['tried']}")
        for name, outcome in faults.items():
            print(f"{name}: {outcome}")
    failed = [outcome for outcome in faults.values() if outcome != "ok" and not outcome.startswith("skipped")]
    survived = killed["equal"] == killed["tried"] and not failed
    return 0 if survived else 1


def kill_runs(tries: int, steps: int, *, seed: int = 0) -> dict[str, Any]:
    """Kill `tries` runs, the optimizers in turn, and return how many ended as if nothing had happened."""
    moments = random.Random(seed)
    outcomes: dict[str, dict[str, int]] = {name: {"tried": 0, "equal": 0} for name in OPTIMIZERS}
    expected: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="graft-faults-") as place:
        for index in range(tries):
            name = OPTIMIZERS[index % len(OPTIMIZERS)]
            if name not in expected:
                began = time.monotonic()
                expected[name] = train(Path(place, name), name, steps)
                seconds = time.monotonic() - began
            folder = Path(place, f"{index}-{name}")
            outcomes[name]["tried"] += 1
            if index % 2:
                inside = f"{moments.choice(('replace', 'fsync'))}:{moments.randrange(1, 3 * steps)}"
                kill_once(folder, name, steps, inside=inside)
            else:
                kill_once(folder, name, steps, after=moments.uniform(0.0, seconds))
            outcomes[name]["equal"] += train(folder, name, steps) == expected[name]
    total = {key: sum(outcome[key] for outcome in outcomes.values()) for key in ("tried", "equal")}
    return {**total, "per_optimizer": outcomes}


def kill_once(folder: Path, optimizer: str, steps: int, *, after: float = 0.0, inside: str = "") -> None:
    """Start the run in a process of its own and kill it, `after` seconds of training or `inside` a save."""
    command = [sys.executable, str(Path(__file__).resolve()), str(folder), optimizer, str(steps), inside]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != b"ready":
            raise RuntimeError(f"the run to be killed did not start: {' '.join(command)}")
        if not inside:
            time.sleep(after)
            process.kill()
        process.wait(PATIENCE_SECONDS)


def train(folder: Path, optimizer: str, steps: int) -> str:
    """Train the tiny denoiser, saving every step, or go on from what is there; return the state's digest."""
    from graft.tests.support.tiny import TinyDataset, TinyDenoiser, TinySamples
    from graft.training import config as c
    from graft.training.run.execute import execute
    from graft.training.run.folder import Run

    averages = optimizer.startswith("schedule-free")
    config = c.TrainConfig(
        batch_size=2,
        gradient_accumulation=2,
        adapter=c.AdapterConfig(rank=4, targets="all", dropout=0.1),
        optimizer=c.OptimizerConfig(name=optimizer, lr=1.0 if optimizer == "prodigy" else 1e-3),
        schedule=c.ScheduleConfig(name="cosine", warmup_steps=3, total_steps=steps),
        ema=c.EmaConfig(decay=0.0 if averages else 0.9),
        validation=c.ValidationConfig(every=10),
    )
    run = Run(folder, c.CheckpointConfig(minutes=0))
    samples = TinySamples()
    return execute(run, TinyDenoiser(), TinyDataset(), config, None, steps=steps, validation=samples).digest


def run_faults() -> dict[str, str]:
    """Run the fault tests; return "ok" or the reason by fault."""
    if importlib.util.find_spec("pytest") is None:
        return dict.fromkeys(FAULTS, "not run: pytest is not installed (pip install -e .[test])")
    if not (ROOT / "tests").is_dir():
        return dict.fromkeys(FAULTS, "not run: the tests are in the source repository only")

    outcomes: dict[str, str] = {}
    for folder in dict.fromkeys(path_of(file).parent for file, _ in FAULTS.values()):
        tests = [(path_of(file), name) for file, name in FAULTS.values() if path_of(file).parent == folder]
        outcomes |= run_tests([f"{path}::test_{name}" for path, name in tests])
    return {fault: outcomes.get(f"test_{test}", "not run") for fault, (_, test) in FAULTS.items()}


def path_of(file: str) -> Path:
    """Return the test file that a row of FAULTS names: "run/kill" is tests/run/test_kill.py."""
    path = ROOT / "tests" / file
    return path.with_name(f"test_{path.name}.py")


def run_tests(tests: Sequence[str]) -> dict[str, str]:
    """Run tests in a process of their own; return "ok" or the reason by name, parameters together."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="graft-faults-") as place:
        report = Path(place, "report.xml")
        options = ["-c", str(ROOT / "pyproject.toml"), "--junitxml", str(report)]
        subprocess.run([*command, *options, *tests], stdout=sys.stderr, check=False)
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            name = case.attrib["name"].split("[")[0]
            problem = next((result for result in case if result.tag in ("failure", "error", "skipped")), None)
            if problem is not None:
                reason = problem.attrib.get("message", problem.tag).splitlines()[0]
                outcomes[name] = f"skipped: {reason}" if problem.tag == "skipped" else reason
            else:
                outcomes.setdefault(name, "ok")
    return outcomes


def victim(folder: str, optimizer: str, steps: str, inside: str) -> None:
    """Train until killed, or until a call ("replace:7": before or after the seventh rename) kills it."""
    if inside:
        name, _, count = inside.partition(":")
        left, function = [int(count)], getattr(os, name)

        def deadly(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and int(count) % 2:
                die()
            result = function(*args)
            if left[0] == 0:
                die()
            return result

        setattr(os, name, deadly)
    print("ready", flush=True)
    train(Path(folder), optimizer, int(steps))


def die() -> None:
    """End this process as `kill -9` does: nothing is flushed, closed or cleaned up."""
    if hasattr(signal, "SIGKILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(9)


if __name__ == "__main__":
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()
    if sys.argv[1:] in ([], ["--json"]):
        sys.exit(main(json=bool(sys.argv[1:])))
    victim(*sys.argv[1:])
