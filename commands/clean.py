"""`graft clean CACHE`: remove from the cache what has not been used for a while. Runs: `clean_runs.py`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ..training.data.store import KINDS, Store
from ..training.user_error import UserError
from .clean_runs import RUNS, USAGE, clean_runs
from .headless.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = f"graft clean CACHE [--unused-days DAYS]\n       {USAGE}"
    what = "output/graft/cache of a ComfyUI; or runs, output/graft, and the names of the runs to delete"
    parser.add_argument("cache", nargs="+", metavar="CACHE", help=what)
    parser.add_argument("--unused-days", type=float, default=30, metavar="DAYS", help="default: 30")
    parser.add_argument("--yes", action="store_true", help="delete runs without asking")


def run(args: argparse.Namespace) -> int:
    """Remove, and print what was removed and what is left. Raises UserError where no cache or run is."""
    first, *others = args.cache
    if first == RUNS:
        return clean_runs(others, yes=args.yes)
    if others:
        raise UserError(f"{others[0]}: one cache at a time; for runs, `graft clean runs FOLDER RUN ...`.")
    cache = Path(first)
    if not args.unused_days >= 0 or math.isinf(args.unused_days):
        raise UserError(
            f"unused-days: {args.unused_days} is no number of days; 30 is usual, 0 removes everything."
        )
    if not cache.is_dir():
        raise UserError(f"{cache}: there is no such folder; give output/graft/cache of a ComfyUI.")
    if not any((cache / kind).is_dir() for kind in KINDS):
        raise UserError(
            f"{cache}: holds nothing that Graft encoded ({', '.join(KINDS)}); give output/graft/cache "
            "of a ComfyUI."
        )
    store = Store(cache)
    say(f"removed {store.clean(unused_days=args.unused_days)}; {store.report()} are left")
    return 0
