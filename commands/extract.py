"""`graft extract`: extract a LoRA from the difference of two models."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..training.memory.precision import DTYPES
from ..training.tools.extract import extract_files
from .headless.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("base", type=Path, help="the original model, .safetensors")
    parser.add_argument("tuned", type=Path, help="the fine-tuned model, .safetensors")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the LoRA")
    parser.add_argument("--rank", type=int, help="largest rank of a layer")
    parser.add_argument(
        "--energy", type=float, help="share of the difference to keep in each layer, such as 0.95"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp16")
    parser.add_argument("--device", type=torch.device, default="cpu", help="where to compute, such as cuda")


def run(args: argparse.Namespace) -> int:
    """Write the LoRA and print a report. Raises UserError for models of different layers."""
    size = {"rank": args.rank, "energy": args.energy}
    dtype = DTYPES[args.dtype]
    say(extract_files(args.base, args.tuned, args.output, **size, dtype=dtype, device=args.device))
    return 0
