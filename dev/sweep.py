"""Try Graft with many kills, prompts, files or command lines: `python dev/sweep.py files --count 20`.

Prints a table of what went wrong; the exit code is 1 where anything did. With --json a sweep that was
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import os
import random
import resource
import runpy
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SWEEPS = ("kills", "prompts", "files", "commands")
LARGEST = 12 << 30
"""Bytes that a process may take: an absurd size must not end the machine."""


def main() -> int:
    """Run one sweep and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--count", type=int, help="so many cases, drawn from all")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="cases of such names, as in 'merge*'")
    parser.add_argument("--comfyui", type=Path, metavar="FOLDER", help="default: as `graft train` finds it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line a case; these are not repeated")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch: a fork of several threads has one of them
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()
    from graft.commands.headless.server import find_comfyui
    from graft.dev.sweeps.report import Report

    resource.setrlimit(resource.RLIMIT_DATA, (LARGEST, LARGEST))
    sweep = importlib.import_module(f"graft.dev.sweeps.{args.sweep}")
    report = Report(args.json)
    with tempfile.TemporaryDirectory(prefix="graft-sweep-", ignore_cleanup_errors=True) as place:
        comfyui = args.comfyui.resolve() if args.comfyui else find_comfyui()
        with sweep.cases(Path(place).resolve(), comfyui, args.seed) as cases:
            chosen = [case for case in cases if fnmatch.fnmatch(case.name, args.only)]
            if args.count is not None:
                chosen = random.Random(args.seed).sample(chosen, min(args.count, len(chosen)))
            report.run(chosen)
    print("\n".join(report.table()))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
