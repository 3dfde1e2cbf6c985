"""`graft resize`: bring a LoRA to a lower rank."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..training.memory.precision import DTYPES
from ..training.tools.resize import resize_file
from .headless.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("lora", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, help="largest rank of a layer")
    parser.add_argument("--energy", type=float, help="share of each layer to keep, such as 0.95")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp16")


def run(args: argparse.Namespace) -> int:
    """Write the smaller LoRA and print a report. Raises UserError for a size that cannot be."""
    dtype = DTYPES[args.dtype]
    say(resize_file(args.lora, args.output, rank=args.rank, energy=args.energy, dtype=dtype))
    return 0
