"""`graft inspect`: show what a LoRA file holds."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ..training.files.lora.read import read_lora
from ..training.tools.inspect import inspect, text
from .headless.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("lora", type=Path)
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Print a report. Raises UserError for a file that is no LoRA."""
    report = inspect(read_lora(args.lora))
    say(json.dumps(asdict(report), indent=1) if args.json else text(report))
    return 0
