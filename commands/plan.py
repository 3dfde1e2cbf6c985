"""`graft plan CHECKPOINT --card 24GB`: the memory of a run by every plan, without training or loading."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..training.user_error import UserError
from .headless.import_comfyui import start_comfyui
from .headless.terminal import say

GIB = 1 << 30
LARGEST = {"batch": 4096, "rank": 4096, "resolution": 16384}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", type=Path, help="base model, .safetensors")
    parser.add_argument("--card", metavar="SIZE", help="memory of the device, e.g. 24GB; default: not judged")
    parser.add_argument("--resolution", default="1024", metavar="PIXELS", help="1024, or 832x1216")
    parser.add_argument("--batch", type=int, default=1, help="images in one step")
    parser.add_argument("--algorithm", default="lora", help="as in Build LoRA, such as dora")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="attn-mlp", help="attn, attn-mlp, linear, all or everything")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--tflops", type=float, help="what the device reaches in bf16: prints seconds")
    parser.add_argument("--bandwidth", type=float, default=20, help="host to device, GB/s")


def run(args: argparse.Namespace) -> int:
    """Print the table. Raises UserError for sizes that are none, and for a file that is no model."""
    card = read_memory(args.card) if args.card else None
    size = read_size(args.resolution)
    for name, value in (("batch", args.batch), ("rank", args.rank)):
        if not 1 <= value <= LARGEST[name]:
            raise UserError(f"{name}: {value} is outside 1 to {LARGEST[name]}.")
    start_comfyui()
    from ..training.adapters.select import select
    from ..training.comfy.model.outline import outline, outlined_batch
    from ..training.config import AdapterConfig, MemoryConfig, OptimizerConfig, TrainConfig
    from ..training.memory.plan import every_plan, make_estimator
    from ..training.memory.plan_table import format_plans

    config = TrainConfig(
        batch_size=args.batch,
        adapter=AdapterConfig(algorithm=args.algorithm, rank=args.rank, targets=args.targets),
        optimizer=OptimizerConfig(name=args.optimizer),
        memory=MemoryConfig(dtype="bf16"),
    )
    denoiser = outline(args.checkpoint)
    batch = outlined_batch(denoiser, args.batch, *size)
    adapted = select(denoiser.specs, denoiser.family, config.adapter)
    estimate = make_estimator(denoiser, adapted, config, batch)
    flops = args.tflops * 1e12 if args.tflops else None
    say(
        f"{denoiser.family.name}, {args.resolution} pixels, batch {args.batch}, "
        f"{args.algorithm} of rank {args.rank} on {len(adapted)} layers, {args.optimizer}, bf16"
    )
    say(format_plans([estimate(plan) for plan in every_plan()], card, flops, args.bandwidth * 1e9))
    return 0


def read_memory(text: str) -> int:
    """Read a size such as "24GB", "8 GiB" or "24": graphics cards are sold in GiB, whatever they say.

    Raises UserError for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gi?b?)?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise UserError(f"card: {text!r} is no size of memory; write for example 24GB.")
    return int(float(match[1]) * GIB)


def read_size(text: str) -> tuple[int, int]:
    """Read "1024" or "832x1216" as (width, height). Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    sides = [int(side) for side in (match[1], match[2] or match[1])] if match else [0]
    if min(sides) < 64 or max(sides) > LARGEST["resolution"]:
        most = LARGEST["resolution"]
        raise UserError(f"resolution: {text!r}; write for example 1024 or 832x1216, from 64 to {most}.")
    return sides[0], sides[1]
