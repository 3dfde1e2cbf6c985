"""A benchmark in a process of its own, for figures such as peak memory that belong to a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def run_alone(benchmark: Sequence[str], *options: str) -> Any:
    """Return the last line, which is JSON, that a benchmark prints in a process of its own.

    `benchmark` is a program and its arguments: `args.program` of the benchmark that runs now.
    """
    command = [sys.executable, *benchmark, *options]
    completed = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(completed.stdout.splitlines()[-1])


def peak_rss() -> int:
    """Return the most memory that this process has had, in MB."""
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)
    import psutil  # type: ignore[import-untyped]  # Windows

    peak: int = psutil.Process().memory_info().peak_wset
    return round(peak / 1e6)
