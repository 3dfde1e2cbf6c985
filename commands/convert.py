"""`graft convert`: convert a LoRA between layouts and number formats."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..training.memory.precision import DTYPES
from ..training.tools.convert import LAYOUTS, convert_file
from .headless.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("lora", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--layout", choices=LAYOUTS, default="kohya")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: as in the file")
    parser.add_argument("--base", type=Path, help="a checkpoint of the base, for the names of its layers")


def run(args: argparse.Namespace) -> int:
    """Write the LoRA and print a report. Raises UserError where the layout has no name for a layer."""
    dtype = DTYPES[args.dtype] if args.dtype else None
    say(convert_file(args.lora, args.output, args.layout, dtype=dtype, base=args.base))
    return 0
