"""What 8-bit products cost in learning: the starter model's held-out loss against that in full precision.

    graft bench compute --json

The same runs, seed by seed, but for *compute*: a LoRA on attention and MLPs, bf16. Losses are measured in
full precision at fixed noise by `training.validation`: those of the LoRA on the base as people use it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from ...training.config import AdapterConfig, Compute, MemoryConfig, OptimizerConfig, TrainConfig
from ...training.data import BucketConfig, DatasetConfig, encode, scan
from ...training.loop import train
from ...training.validation import validation_loss
from .learners import BATCH_SIZE, RANK
from .quality import RESOLUTION, STARTER, load_starter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `graft bench compute`."""
    formats = [name for name in get_args(Compute) if name not in ("auto", "full")]
    parser.add_argument("--compute", choices=formats, default="int8", help="compared with full precision")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 40, 60], help="when to measure")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--limit", type=int, default=0, help="measure this many held-out images; 0 is all")


def run(args: argparse.Namespace) -> int:
    """Train with both, and print how they compare."""
    results = measure(args.compute, args.steps, args.seeds, args.rate, args.limit)
    print(json.dumps(results, indent=1) if args.json else table(results))
    return 0


def measure(
    compute: Compute, steps: Sequence[int], seeds: Sequence[int], rate: float, limit: int
) -> dict[str, Any]:
    """Return the losses of every seed, and the ratios of their means to those in full precision."""
    torch.set_num_threads(1)
    losses: dict[Compute, list[list[float]]] = {"full": [], compute: []}
    with tempfile.TemporaryDirectory(prefix="graft-compute-") as place:
        denoiser, encoder = load_starter(Path(place))
        config = DatasetConfig(bucket=BucketConfig(resolutions=(RESOLUTION,)), dtype="fp32")
        dataset = encode(scan(STARTER / "dataset", config), encoder, Path(place, "cache"))
        held_out = encode(scan(STARTER / "validation", config), encoder, Path(place, "cache")).validation()
        full = MemoryConfig(dtype="bf16", compute="full")
        for seed in seeds:
            for name, curve in losses.items():
                run = TrainConfig(
                    batch_size=BATCH_SIZE,
                    seed=seed,
                    adapter=AdapterConfig(rank=RANK),
                    optimizer=OptimizerConfig(lr=rate),
                    memory=MemoryConfig(dtype="bf16", checkpointing="none", base="resident", compute=name),
                )
                state, found = None, []
                for step in sorted(steps):
                    state = train(denoiser, dataset, run, state, steps=step - (state.step if state else 0))
                    found.append(round(validation_loss(denoiser, held_out, full, state, limit=limit), 5))
                curve.append(found)
    means = {
        name: [round(statistics.mean(each), 5) for each in zip(*curve)] for name, curve in losses.items()
    }
    ratios = [round(a / b, 5) for a, b in zip(means[compute], means["full"], strict=True)]
    return {"steps": sorted(steps), "seeds": list(seeds), "losses": losses, "mean": means, "to_full": ratios}


def table(results: dict[str, Any]) -> str:
    """Return the mean losses for people to read."""
    lines = [f"{'steps':>8}" + "".join(f"{step:>9}" for step in results["steps"])]
    lines += [
        f"{name:>8}" + "".join(f"{v:>9.5f}" for v in values) for name, values in results["mean"].items()
    ]
    return "\n".join([*lines, f"{'ratio':>8}" + "".join(f"{ratio:>9.5f}" for ratio in results["to_full"])])
