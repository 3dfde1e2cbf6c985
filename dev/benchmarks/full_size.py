"""One training step of whole models on any machine: SDXL and SD3.5 Medium with random weights, in bf16 at 256
pixels. `python dev/bench.py full-size`.

Each runs in a process of its own, whose peak memory is reported, base and all; the first step, which reads
every weight for the first time, and the second are timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from ...commands.bench.process import peak_rss, run_alone
from ...commands.headless.import_comfyui import start_comfyui

MODELS = ("sdxl", "sd35m")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pixels", type=int, default=256)
    parser.add_argument("--checkpointing", default="auto")
    parser.add_argument("--alone", choices=MODELS, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0."""
    if args.alone:
        print(json.dumps(measure(args.alone, args)))
        return 0
    report = {}
    for name in args.models:
        options = ["--alone", name, "--rank", str(args.rank), "--pixels", str(args.pixels)]
        options += ["--checkpointing", args.checkpointing]
        report[name] = run_alone(args.program, *options)
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    for name, figures in report.items():
        print(f"{name:6} " + "  ".join(f"{key} {value}" for key, value in figures.items()))
    return 0


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return sizes, seconds and the peak memory of this process after two steps."""
    start_comfyui()
    import torch

    from ...commands.bench.base_models import FULL, batch_of, build
    from ...commands.bench.step import OneBatch
    from ...training.comfy.model.denoiser import ComfyDenoiser
    from ...training.config import AdapterConfig, MemoryConfig, TrainConfig
    from ...training.loop import train

    model = FULL[name]
    denoiser = ComfyDenoiser(build(model, torch.bfloat16))
    weights = sum(t.nbytes for t in denoiser.network.state_dict().values())
    memory = MemoryConfig(dtype="bf16", checkpointing=args.checkpointing)
    config = TrainConfig(adapter=AdapterConfig(rank=args.rank), memory=memory)
    seconds: list[float] = []
    losses: list[float] = []

    def note(progress: Any, handles: Any) -> None:
        seconds.append(progress.seconds)
        losses.append(progress.loss)

    cells = args.pixels // 8
    data = OneBatch(batch_of(model, latents=(cells, cells)))
    train(denoiser, data, config, None, steps=2, on_step=note)
    return {
        "parameters_m": round(sum(t.numel() for t in denoiser.network.state_dict().values()) / 1e6),
        "base_mb": round(weights / 1e6),
        "peak_mb": peak_rss(),
        "seconds": _rounded(seconds),
        "losses": _rounded(losses),
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]
