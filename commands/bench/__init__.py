"""`graft bench NAME [--json]`: the benchmarks that users run, one row and one module each.

A benchmark's module has `add_arguments(parser)` for options beyond `--json`, and `run(args)`, which prints
its figures (as one JSON object where `args.json` is set) and returns an exit code.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

GRAFT = Path(__file__).resolve().parents[2] / "__main__.py"
BENCHMARKS = {
    "step": ("step", "time and memory of a step, beside other trainers on the same base"),
    "quality": ("quality", "how fast a LoRA learns, beside ComfyUI's TrainLoraNode"),
    "plan": ("plan", "CPU time to plan a run, and to plan it once more"),
    "gpu": ("gpu", "all that wants measuring on a GPU, in calls of a few minutes"),
    "load": ("load", "loading a base of 5 GB for training, beside plainly reading its file"),
}
"""name -> (module in this folder, what it measures)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand a benchmark, with its own options."""
    add_rows(parser, __name__, BENCHMARKS, [str(GRAFT), "bench"])


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was asked for and return its exit code."""
    return int(args.benchmark(args))


def add_rows(
    parser: argparse.ArgumentParser, package: str, rows: Mapping[str, tuple[str, str]], program: Sequence[str]
) -> None:
    """Add a subcommand for each of `rows`, {name: (module in package, what it measures)}, to `parser`.

    `program` and a name start the same benchmark in another process.
    """
    commands = parser.add_subparsers(metavar="benchmark", required=True)
    for name, (module, summary) in rows.items():
        row = commands.add_parser(name, help=summary, description=f"Measure {summary}.")
        row.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        implementation = importlib.import_module(f"{package}.{module}")
        implementation.add_arguments(row)
        row.set_defaults(benchmark=implementation.run, program=[*program, name])
