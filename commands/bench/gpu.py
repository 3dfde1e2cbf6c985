"""Everything that wants measuring on a GPU, in calls of a few minutes each: `graft bench gpu`.

Every call does the next parts of the list, each in a process of its own, adds them to one file of results,
and prints the table of all so far; it begins no part that may not end in time. So the list is done piece by
piece on a machine that is lent for minutes. A part that failed is kept with its reason, and done again only
with --again. `--device cpu --size dry` runs the same parts on models that are small enough for a CPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...training.files.whole_file import whole_file
from ...training.user_error import UserError
from .gpu_parts import PARTS, Part, run_part

RESULTS = Path("graft_bench_gpu.json")
MINUTES = 9.0
COLUMNS = ("part", "plan", "s/step", "peak GiB", "estimate", "ratio", "of peak", "weights")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "dry"), default="full", help="dry: tiny models, for a CPU")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the most that this call may take")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PART", help="names, or globs of them")
    parser.add_argument("--again", action="store_true", help="do parts again that have failed")
    parser.add_argument("--folder", type=Path, help="where 'stream' writes its file; default: temporary")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Do the next parts, print the table, and return 0."""
    if args.part:
        part = next(part for part in PARTS if part.name == args.part)
        print(json.dumps(run_part(part, args.device, args.size, args.folder)))
        return 0
    wanted = [part for part in PARTS if any(fnmatch.fnmatch(part.name, glob) for glob in args.only)]
    if not wanted:
        known = ", ".join(part.name for part in PARTS)
        raise UserError(f"only: no part is named {', '.join(args.only)}; the parts are {known}.")
    results = run_next(wanted, args, lambda part, seconds: _run_alone(part, args, seconds))
    left = [part.name for part in wanted if part.name not in results["parts"]]
    if args.json:
        print(json.dumps({**results, "left": left}, indent=1))
        return 0
    print(as_table(results))
    print(
        f"{len(wanted) - len(left)} of {len(wanted)} parts are done" + ("; run this again." if left else ".")
    )
    return 0


def run_next(
    wanted: Sequence[Part],
    args: argparse.Namespace,
    run_one: Callable[[Part, float], Mapping[str, Any]],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run the wanted parts that have no result yet, as long as the next may end in time; write each result
    at once. Raises UserError for a file of results of another device or size."""
    began, results = clock(), read_results(args)
    for part in wanted:
        before = results["parts"].get(part.name)
        if before is not None and not (args.again and "failed" in before):
            continue
        left = 60 * args.minutes - (clock() - began)
        if left < part.seconds:
            break
        results["parts"][part.name] = dict(run_one(part, left))
        with whole_file(args.results) as temporary:
            temporary.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return results


def read_results(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results so far. Raises UserError if the file holds something else."""
    kind = {"device": args.device, "size": args.size}
    if not args.results.exists():
        return {**kind, "parts": {}}
    try:
        results = json.loads(args.results.read_text(encoding="utf-8"))
        found = {name: results[name] for name in kind}
        assert isinstance(results["parts"], dict)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise UserError(
            f"{args.results}: holds no results of `graft bench gpu`; name another file."
        ) from error
    if found != kind:
        raise UserError(f"{args.results}: holds results of {found}, not of {kind}; name another file.")
    return results  # type: ignore[no-any-return]


def _run_alone(part: Part, args: argparse.Namespace, seconds: float) -> Mapping[str, Any]:
    """Return what a part prints in a process of its own, or why it failed."""
    command = [
        sys.executable,
        *args.program,
        "--part",
        part.name,
        "--device",
        args.device,
        "--size",
        args.size,
    ]
    command += ["--folder", str(args.folder)] if args.folder else []
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {seconds:.0f} s"}
    whole = round(time.monotonic() - began)
    lines = done.stdout.splitlines() if done.returncode == 0 else done.stderr.splitlines()
    if done.returncode:
        return {"failed": lines[-1] if lines else f"exit code {done.returncode}", "whole_s": whole}
    return {**json.loads(lines[-1]), "whole_s": whole}


def as_table(results: Mapping[str, Any]) -> str:
    """Return the results as lines of columns; what is no step of training is a sentence."""
    rows, notes = [COLUMNS], []
    for name, part in results["parts"].items():
        for row in part.get("rows", ()):
            rows.append((name, *(_cell(row.get(key)) for key in ROW)))
        for key in ("failed", "skipped", "note"):
            if key in part:
                notes.append(f"{name}: {part[key]}")
    runs = [results["parts"].get(f"dynamic {state}", {}).get("rows") for state in ("off", "on")]
    if all(runs):
        same = [row["weights"] for row in runs[0]] == [row["weights"] for row in runs[1]]
        notes.append(f"dynamic VRAM on and off end in {'the same' if same else 'DIFFERENT'} bits")
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in [*lines, *notes])


ROW = ("plan", "seconds", "peak_gib", "estimate_gib", "ratio", "of_peak", "weights")
"""What a part says of one training, in the order of COLUMNS."""


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
