"""Train Steps on several GPUs of this machine: torchrun starts a process for each.

The processes execute the queued graph up to Train Steps (`graft worker`) and save the run where this process
finds it. This process follows the run's log. Train Steps that come before were trained here; the processes
only read their runs.
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
"""Seconds that the processes have to finish their step and save; after SIGTERM, the same again."""
TORCHRUN = re.compile(r"^Traceback .*\n.*_run_module_as_main", re.MULTILINE)
"""The start of torchrun's own traceback: it runs with -m, the processes do not."""

_last: str | None = None
"""In one of the processes: the Train Steps that they were started for."""
_run: str | None = None
"""In one of the processes: the folder name of the run in the server that started them."""


def train(
    run: Run, prompt: Mapping[str, Any], node: str | None, count: int, first: int, last: int, show: Show
) -> int:
    """Train `run` from step `first` to `last` in `count` processes; return how many steps were done.

    They may be fewer: after Finish, and when the settings end the run. Raises UserError on Windows, and with
    the errors of the processes when they fail; the run is then saved, as it is on Cancel.
    """
    checkpoints = Checkpoints(run)
    saved = checkpoints.latest(after=first, up_to=last)
    if saved is not None and checkpoints.is_end(saved.step, last):
        return saved.step - first
    if sys.platform == "win32":
        raise UserError(
            "gpus: PyTorch for Windows has no NCCL, which GPUs need to work together. Set gpus to 1 and "
            "raise gradient accumulation in Optimizer Settings instead, or run ComfyUI in WSL 2 or on Linux."
        )
    device = comfy.model_management.get_torch_device().type
    if device not in ("cuda", "cpu"):
        raise UserError(f"gpus: devices of type {device!r} cannot train together; set gpus to 1.")
    if node is None or not isinstance(prompt, Mapping) or node not in prompt:
        raise UserError("gpus: only a Train Steps in the queued graph itself can use several; set gpus to 1.")
    unload()
    with scratch_folder(FOR_WORKERS) as scratch:
        graph, output_file = scratch / "graph.json", scratch / "output.log"
        graph.write_text(json.dumps(prompt), encoding="utf-8")
        with output_file.open("wb") as output, _started(graph, node, run, count, output) as process:
            finished = _follow(run, process, show, saved.step if saved else first, last)
        if process.returncode and not finished:
            errors = _errors_in(output_file.read_text(encoding="utf-8", errors="replace"))
            raise UserError(f"one of {count} processes failed; the run is saved. Its last output:\n{errors}")
    reached = checkpoints.latest(after=first, up_to=last)
    if reached is None:
        raise UserError("the run was finished before its first step.")
    if finished:
        checkpoints.finish(reached.step, last)
    return reached.step - first


def end_with(node: str | None, run: str | None = None) -> None:
    """Make this process, one of several, train only the Train Steps `node`, in a folder named `run`.

    None: train every one in the graph.
    """
    global _last, _run
    _last, _run = node, run


def require_same_run(node: str | None, run: str) -> None:
    """Raise UserError where this process would train another run than the server that started it shows."""
    if _run is not None and node == _last and run != _run:
        raise UserError(
            f"this process would train {run}, but ComfyUI shows {_run}: the two see different weights, "
            "images or settings. Queue the graph again if a file has changed meanwhile; otherwise set gpus "
            "to 1, and please report it."
        )


def trained_before(node: str | None) -> bool:
    """Return whether this Train Steps, which others follow, was trained before the processes were started."""
    return _last is not None and node != _last


def _errors_in(output: str) -> str:
    """Return the errors that the processes ended with, else their last lines. The traceback and the table
    that torchrun adds after these do not say why."""
    errors = dict.fromkeys(re.findall("graft worker: .*", output))
    return "\n".join(errors or TORCHRUN.split(output)[0].splitlines()[-20:])


def _follow(run: Run, process: subprocess.Popen[bytes], show: Show, shown: int, last: int) -> bool:
    """Show steps after `shown` until the processes have ended; return whether Finish ended the run."""
    position = 0
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        comfy.model_management.throw_exception_if_processing_interrupted()
        part = read_entries(run.folder / "log.jsonl", position)
        position = part["next"]
        for entry in part["entries"]:
            if entry["step"] > shown:
                shown = entry["step"]
                if show(progress_of(entry, total=last)) == STOP:
                    return True
    return False


@contextmanager
def _started(graph: Path, node: str, run: Run, count: int, output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start the processes; on leaving the context, ask those still running to save and end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    options = json.dumps(sys.argv[1:])
    command += [str(LAUNCH), "worker", str(graph), "--until", node, "--comfyui-options", options]
    command += ["--folder", run.folder.name, "--end-with", str(os.getpid())]
    environment = {**os.environ, "COMFYUI_PATH": str(Path(folder_paths.__file__).parent)}
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
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
    """Ask the process that keeps the run to end, and with it the others; while there is none, ask them all.

    torchrun would kill them after half a minute, in the middle of a long step.
    """
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children():
            if child.environ().get("RANK") == "0":
                child.terminate()
                return
    process.terminate()
