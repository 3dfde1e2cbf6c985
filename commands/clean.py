"""`graft clean CACHE`: remove encoded images and captions that no run has used for a while."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ..training.data.store import KINDS, Store
from ..training.user_error import UserError
from .headless.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("cache", type=Path, help="output/graft/cache of a ComfyUI")
    parser.add_argument("--unused-days", type=float, default=30, metavar="DAYS", help="default: 30")


def run(args: argparse.Namespace) -> int:
    """Remove, and print what was removed and what is left. Raises UserError where no cache is."""
    if not args.unused_days >= 0 or math.isinf(args.unused_days):
        raise UserError(
            f"unused-days: {args.unused_days} is no number of days; 30 is usual, 0 removes everything."
        )
    if not args.cache.is_dir():
        raise UserError(f"{args.cache}: there is no such folder; give output/graft/cache of a ComfyUI.")
    if not any((args.cache / kind).is_dir() for kind in KINDS):
        raise UserError(
            f"{args.cache}: holds nothing that Graft encoded ({', '.join(KINDS)}); give output/graft/cache "
            "of a ComfyUI."
        )
    store = Store(args.cache)
    say(f"removed {store.clean(unused_days=args.unused_days)}; {store.report()} are left")
    return 0
