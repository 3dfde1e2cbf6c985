"""The time to load a base of 5 GB for training, against a plain read of its file: `graft bench load`.

SD3.5 Medium with random weights in bf16 is written to a temporary folder. In turns, in a process each, with
the file put out of the system's cache where it lets us: its bytes are read, each piece over the last; they
are read into memory that is kept, as a base is (`ratio_to_keep`); and it is loaded by Load Base Model's own
function and held as for a run, every weight touched once, up to where the first step would begin.
The digest of all weights by which a run knows its base is a part of it; `again_s` is what it takes when the
graph is queued once more. `wait_cpu_s` and `wait_again_cpu_s` are the CPU seconds of a run from the loaded
base to its first step, planned for 12 GiB: the first time, and when its memory was estimated before. Seconds
are medians. Anonymous memory is what the process has beside the mapped file (Linux only).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..headless.import_comfyui import start_comfyui
from .process import run_alone

FILE = "graft_bench_sd35m.safetensors"
CHUNK = 1 << 24
"""Bytes read at a time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument(
        "--folder", type=Path, help="where the file is written; default: the temporary folder"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds of reading and loading, in turns")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0."""
    if args.part:
        print(json.dumps(PARTS[args.part](args.folder / FILE)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        part = partial(run_alone, args.program, "--folder", folder, "--part")
        report: dict[str, Any] = part("write")
        rounds = [{**part("read"), **part("keep"), **part("load")} for _ in range(args.repeats)]
    report |= {
        key: statistics.median(timing[key] for timing in rounds)
        for key in ("read_s", "keep_s", "ready_s", "again_s", "wait_cpu_s", "wait_again_cpu_s")
    }
    report["rounds"] = [(timing["read_s"], timing["keep_s"], timing["ready_s"]) for timing in rounds]
    report["anonymous_mb"] = rounds[0]["anonymous_mb"]
    report["ratio"] = round(report["ready_s"] / report["read_s"], 3)
    report["ratio_to_keep"] = round(report["ready_s"] / report["keep_s"], 3)
    if report["anonymous_mb"] is not None:
        report["anonymous_share"] = round(report["anonymous_mb"] / report["file_mb"], 3)
    print(json.dumps(report) if args.json else "  ".join(f"{key} {value}" for key, value in report.items()))
    return 0


def write(path: Path) -> dict[str, Any]:
    """Write the file, as a diffusion model that ComfyUI detects."""
    start_comfyui()
    import torch
    from safetensors.torch import save_file

    from .base_models import FULL, build

    network = build(FULL["sd35m"], torch.bfloat16).model.diffusion_model
    tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, path)
    return {"file_mb": round(path.stat().st_size / 1e6)}


def read(path: Path) -> dict[str, Any]:
    """Read the file's bytes, each piece over the last."""
    forget(path)
    buffer = bytearray(CHUNK)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return {"read_s": round(time.perf_counter() - began, 2)}


def keep(path: Path) -> dict[str, Any]:
    """Read the file's bytes into memory that is kept."""
    forget(path)
    pieces: list[bytes] = []
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(CHUNK):
            pieces.append(piece)
    return {"keep_s": round(time.perf_counter() - began, 2)}


def load(path: Path) -> dict[str, Any]:
    """Load the file and hold it as for a run."""
    start_comfyui()
    import folder_paths
    import torch

    from ...training.comfy.model.denoiser import ComfyDenoiser
    from ...training.comfy.model.loading import load_base
    from ...training.comfy.paths import cache_folder
    from ...training.job.graph import FROM_CHECKPOINT

    folder_paths.add_model_folder_path("diffusion_models", str(path.parent))
    folder_paths.set_output_directory(str(path.parent / "output"))
    shutil.rmtree(cache_folder(), ignore_errors=True)
    forget(path)
    with peak_anonymous() as peak:
        began = time.perf_counter()
        patcher = load_base(path.name, (), FROM_CHECKPOINT, "bf16")[0]
        denoiser = ComfyDenoiser(patcher)
        first = denoiser.fingerprint
        with denoiser.hold(torch.bfloat16) as base:
            for layer in base.layers.values():
                layer.weight(torch.bfloat16, denoiser.device).sum()
        seconds = time.perf_counter() - began
    began = time.perf_counter()
    assert ComfyDenoiser(patcher).fingerprint == first
    again = time.perf_counter() - began
    waits = [round(wait(ComfyDenoiser(patcher)), 2) for _ in range(2)]
    return {
        "ready_s": round(seconds, 2),
        "again_s": round(again, 3),
        "wait_cpu_s": waits[0],
        "wait_again_cpu_s": waits[1],
        "anonymous_mb": peak[0],
    }


def wait(denoiser: Any) -> float:
    """Return the CPU seconds from the loaded base to the first step of a run, which is not computed."""
    from ...training.config import AdapterConfig, MemoryConfig, TrainConfig
    from ...training.loop import train
    from .base_models import FULL, batch_of

    class Begun(Exception):
        """The first step asked for its batch."""

    class Data:
        fingerprint = "random"

        def largest_batch(self, size: int) -> Any:
            return batch_of(FULL["sd35m"], size)

        def batch(self, size: int, *, seed: int, index: int) -> Any:
            raise Begun

    memory = MemoryConfig(dtype="bf16", budget_gb=12)
    began = time.process_time()
    with suppress(Begun):
        train(denoiser, Data(), TrainConfig(adapter=AdapterConfig(rank=16), memory=memory), None, steps=1)
    return time.process_time() - began


PARTS = {"write": write, "read": read, "keep": keep, "load": load}
"""Each runs in a process of its own."""


def forget(path: Path) -> None:
    """Ask the system to drop the file from its cache."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def peak_anonymous() -> Iterator[list[int | None]]:
    """Yield a list that ends up holding by how many MB anonymous memory grew at most; None where unknown."""
    before = anonymous()
    peak: list[int | None] = [None if before is None else 0]
    done = threading.Event()

    def watch() -> None:
        while before is not None and not done.wait(0.02):
            peak[0] = max(peak[0] or 0, round(((anonymous() or before) - before) / 1e6))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def anonymous() -> int | None:
    """Return the bytes of this process that are in memory and of no file; None if unknown."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), None)
