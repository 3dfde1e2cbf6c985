"""CPU seconds to plan the memory of a run: `graft bench plan`.

The models are as large as people have them, without numbers: 1024 x 1024 pixels, batch 1, a LoRA of rank 16,
bf16. `cold` estimates every checkpointing mode, `warm` reads what `cold` has left in the cache folder. A run
estimates only up to the first plan that fits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from ..headless.import_comfyui import start_comfyui


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--models", nargs="+", default=["sdxl", "sd35m", "sd35l", "flux"])
    parser.add_argument("--size", choices=("full", "narrow"), default="full")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0."""
    start_comfyui()
    import torch

    torch.set_num_threads(1)
    report = {name: measure(name, args.size) for name in args.models}
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    for name, figures in report.items():
        print(f"{name:8} " + "  ".join(f"{key} {value}" for key, value in figures.items()))
    return 0


def measure(name: str, size: str) -> dict[str, Any]:
    """Return the CPU seconds of one model's plans, with an empty cache and with a full one."""
    import folder_paths
    import torch

    from ...training.adapters.select import select
    from ...training.comfy.model.denoiser import ComfyDenoiser
    from ...training.config import AdapterConfig, MemoryConfig, TrainConfig
    from ...training.memory.plan import make_estimator
    from .base_models import FULL, NARROW, batch_of, build_outline

    model = {"full": FULL, "narrow": NARROW}[size][name]
    config = TrainConfig(adapter=AdapterConfig(rank=16), memory=MemoryConfig(dtype="bf16"))
    before = folder_paths.get_output_directory()
    seconds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        folder_paths.set_output_directory(str(Path(folder)))
        for case in ("cold", "warm"):
            denoiser = ComfyDenoiser(build_outline(model, torch.bfloat16))
            began = time.process_time()
            adapted = select(denoiser.specs, denoiser.family, config.adapter)
            estimate = make_estimator(denoiser, adapted, config, batch_of(model))
            peaks = [estimate(plan).peak for plan in plans()]
            seconds[case] = round(time.process_time() - began, 2)
        folder_paths.set_output_directory(before)
    return {**seconds, "peak_gib": [round(peak / 2**30, 1) for peak in peaks]}


def plans() -> Any:
    """Return a plan for each checkpointing mode."""
    from ...training.config import MemoryConfig
    from ...training.memory.plan import candidates

    return candidates(MemoryConfig(base="resident"))
