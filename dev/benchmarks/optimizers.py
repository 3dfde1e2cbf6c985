"""Optimizers compared on the demo: the loss on its held-out images and the memory of their state.

    python dev/bench.py optimizers --json

Every run starts from the same adapter, sees the same batches and noise, and is measured at the same noise
levels. Prints {"base": loss, "adamw": {"validation", "state_mb", "seconds"}, "adamw8bit": ...}.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from ...commands.bench.quality import RESOLUTION, STARTER, load_starter
from ...training.config import AdapterConfig, OptimizerConfig, TrainConfig
from ...training.data import BucketConfig, CaptionConfig, DatasetConfig, encode, scan
from ...training.loop import train
from ...training.validation import validation_loss

LR, BATCH_SIZE, RANK = 1e-3, 4, 16
"""Of its own, not the first workflow's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python dev/bench.py optimizers`."""
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "adamw8bit"], metavar="NAME")


def run(args: argparse.Namespace) -> int:
    """Train with each optimizer and print what came of it."""
    results = measure(args.optimizers, args.steps)
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        for name, figures in results.items():
            print(f"{name}: {figures}")
    return 0


def measure(optimizers: list[str], steps: int) -> dict[str, Any]:
    """Return the held-out loss of the base, and by optimizer the loss, memory and time of a run."""
    with tempfile.TemporaryDirectory(prefix="graft-optimizers-") as place:
        denoiser, encoder = load_starter(Path(place))
        config = DatasetConfig(
            bucket=BucketConfig(resolutions=(RESOLUTION,)), caption=CaptionConfig(dropout=0.1)
        )
        dataset = encode(scan(STARTER / "style", config), encoder, Path(place, "cache"))
        held_out = encode(
            scan(STARTER / "style_validation", config), encoder, Path(place, "cache")
        ).validation()
        results: dict[str, Any] = {"base": round(validation_loss(denoiser, held_out), 5)}
        for name in optimizers:
            chosen = TrainConfig(
                batch_size=BATCH_SIZE,
                adapter=AdapterConfig(rank=RANK),
                optimizer=OptimizerConfig(name=name, lr=LR),
            )
            began = time.perf_counter()
            state = train(denoiser, dataset, chosen, None, steps=steps)
            seconds = time.perf_counter() - began
            tensors = state.optimizer.tensors.values()
            results[name] = {
                "validation": round(validation_loss(denoiser, held_out, state=state), 5),
                "state_mb": round(sum(t.numel() * t.element_size() for t in tensors) / 1e6, 3),
                "seconds": round(seconds, 1),
            }
        return results
