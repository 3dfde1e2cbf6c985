"""`graft worker`: one of the processes that torchrun starts to train one job together.

Each process has a ComfyUI of its own, without the server, on its own graphics card, and executes the same
graph. Rank 0 keeps the run and does what follows the training; the others end with it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..training.files import leftovers
from ..training.job.graph import Prompt, of_kind
from ..training.job.read import read_job
from ..training.log import log
from . import train
from .headless.executor import Executor, set_up_comfyui
from .headless.gpu import choose_gpu
from .headless.server import find_comfyui, has_card


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("job", type=Path, help="a job file (.yaml), or a graph in API format (.json)")
    parser.add_argument(
        "--until",
        metavar="ID",
        help="end with this Train Steps, and read what those before it gave from their finished runs; "
        "otherwise the whole graph is executed",
    )
    parser.add_argument(
        "--comfyui-options", default="[]", metavar="JSON", help="ComfyUI's own options for a .json graph"
    )
    parser.add_argument(
        "--folder", metavar="NAME", help="the name of the folder of the run that is to be trained"
    )
    parser.add_argument(
        "--end-with", type=int, metavar="PID", help="save and end as soon as this process has ended"
    )


def run(args: argparse.Namespace) -> int:
    """Execute the job's graph together with the other processes. Raises UserError where a node fails."""
    logging.basicConfig(level=logging.INFO if _place().rank == 0 else logging.WARNING, format="%(message)s")
    if args.end_with:
        threading.Thread(target=end_with, args=(args.end_with,), daemon=True).start()
    choose_gpu(_place().local_rank)
    comfyui = find_comfyui()
    with leftovers.scratch_folder(leftovers.OF_WORKERS) as scratch:
        base = scratch.resolve()
        prompt, options, extra = _task(args, comfyui, base)
        set_up_comfyui(comfyui, options)
        import folder_paths

        folder_paths.set_temp_directory(str(base / "temp"))
        with together() as device:
            log.info("process %d of %d, on %s.", _place().rank + 1, _place().world, device)
            execute(Executor(prompt, extra), prompt, args.until, args.folder)
    return 0


def execute(executor: Executor, prompt: Prompt, last: str | None, run: str | None = None) -> None:
    """Execute a graph up to the Train Steps `last`, or all of it; rank 0's part is more than the others'."""
    from ..training import distributed
    from ..training.comfy.run import workers

    workers.end_with(last, run)
    encoders = of_kind(prompt, "GraftEncodeDataset")
    if _place().local_rank == 0 and encoders:
        executor.run(encoders)  # into the cache, where the others of this machine find it
    distributed.wait_for_all()
    if distributed.rank() == 0:
        executor.run([last] if last else executor.outputs)
    else:
        for node in of_kind(prompt, "GraftTrainSteps"):
            executor.prompt[node]["inputs"].pop("sample_prompts", None)
        executor.run([last] if last else of_kind(prompt, "GraftTrainSteps"))


def end_with(process: int) -> None:
    """Wait for the end of `process`, for which a run is trained here; save the run, and end this one.

    Rank 0 ends by itself; then torchrun ends the others, unless it is gone too.
    """
    torchrun = os.getppid()
    while leftovers.is_alive(process) or (_place().rank and leftovers.is_alive(torchrun)):
        time.sleep(1.0)
    leftovers.remove_folders(leftovers.FOR_WORKERS)
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Place:
    """Which process this is, as torchrun says."""

    rank: int
    local_rank: int
    """On this machine."""
    world: int


def _place() -> Place:
    environment = os.environ
    return Place(
        int(environment.get("RANK", 0)),
        int(environment.get("LOCAL_RANK", 0)),
        int(environment.get("WORLD_SIZE", 1)),
    )


@contextmanager
def together() -> Iterator[Any]:
    """Join the other processes, if there are any, and yield the device that this one trains on."""
    import comfy.model_management

    from ..training import distributed

    device = comfy.model_management.get_torch_device()
    if "WORLD_SIZE" not in os.environ:
        yield device
        return
    with distributed.join_processes(device):
        yield device


def _task(
    args: argparse.Namespace, comfyui: Path, base: Path
) -> tuple[Prompt, Sequence[str], dict[str, Any]]:
    """Return the graph, ComfyUI's options and what goes with the graph."""
    if args.job.suffix == ".json":
        task = json.loads(args.job.read_text(encoding="utf-8"))
        return task, json.loads(args.comfyui_options), {}
    job = read_job(args.job, has_dataset=train.has_dataset)
    output = ["--output-directory", str(job.output)]
    cpu = ["--cpu"] if job.device == "cpu" or not has_card() else []
    options = ["--base-directory", str(base), *output, *train.files(job, comfyui, base), *cpu]
    return job.prompt, options, train.extra_data(job)
