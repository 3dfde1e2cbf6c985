"""`graft bench NAME [--json]`: what is measured of Graft, one row a benchmark, each in a module of its own.

A benchmark's module has `arguments(parser)` for options beyond `--json`, and `run(args)`, which prints its
figures (as one JSON object where `args.json` is set) and returns an exit code.
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

BENCHMARKS = {
    "data": ("data", "memory and time of choosing a batch at a million images; encoding beside a plain loop"),
    "step": ("step", "time and memory of a step, beside other trainers on the same base"),
    "quality": ("quality", "how fast a LoRA learns, beside ComfyUI's TrainLoraNode"),
    "optimizers": ("optimizers", "optimizers on the demo: held-out loss and memory of their states"),
    "full-size": ("full_size", "two steps of SDXL and SD3.5 Medium as large as they are, on a CPU"),
    "load": ("load", "loading a base of 5 GB for training, beside plainly reading its file"),
    "faults": ("faults", "runs killed 20 times and continued, and what else can go wrong"),
}
"""name -> (module in this folder, what it measures)."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand a benchmark, with its own options."""
    rows = parser.add_subparsers(dest="benchmark", metavar="benchmark", required=True)
    for name, (_, summary) in BENCHMARKS.items():
        row = rows.add_parser(name, help=summary, description=f"Measure {summary}.")
        row.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        implementation(name).arguments(row)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was asked for and return its exit code."""
    return int(implementation(args.benchmark).run(args))


def implementation(name: str) -> ModuleType:
    return importlib.import_module(f".{BENCHMARKS[name][0]}", __package__)
