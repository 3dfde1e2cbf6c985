"""Benchmarks for maintainers: `python dev/bench.py NAME [--json]`; for the rest see `graft bench`."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = {
    "data": ("data", "memory and time of choosing a batch at a million images; encoding beside a plain loop"),
    "optimizers": ("optimizers", "optimizers on the starter: held-out loss and memory of their states"),
    "full-size": ("full_size", "two steps of SDXL and SD3.5 Medium as large as they are, on a CPU"),
    "sliders": ("sliders", "sliders on the starter at -1, 0 and 1, as its judge scores their pictures"),
    "routes": ("routes", "time of a step while a hundred pages ask the server at once"),
    "faults": ("faults", "runs killed 20 times and continued, and what else can go wrong"),
}
"""name -> (module in benchmarks/, what it measures)."""


def main() -> int:
    """Run one benchmark and return its exit code."""
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()
    parser = argparse.ArgumentParser(description=__doc__)
    bench = importlib.import_module("graft.commands.bench")
    bench.add_rows(parser, "graft.dev.benchmarks", BENCHMARKS, [str(Path(__file__).resolve())])
    args = parser.parse_args()
    return int(args.benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
