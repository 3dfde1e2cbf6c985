"""`graft merge`: merge LoRAs into a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..training.tools.merge import merge_files
from .headless.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("base", type=Path, help="checkpoint or diffusion model, .safetensors")
    parser.add_argument("lora", type=Path, nargs="+", help="LoRA files, merged in this order")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the merged checkpoint")
    parser.add_argument("--strength", type=float, default=1.0, help="of every LoRA (default 1)")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print a report. Raises UserError for files that do not go together."""
    say(merge_files(args.base, [(path, args.strength) for path in args.lora], args.output))
    return 0
