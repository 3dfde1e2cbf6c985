"""A benchmark in a process of its own, for figures that belong to a process: peak memory, above all."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

GRAFT = Path(__file__).resolve().parents[2] / "__main__.py"
"""The command `graft` of this checkout."""


def alone(name: str, *options: str) -> Any:
    """Return the last line, which is JSON, that `graft bench name` prints in a process of its own."""
    command = [sys.executable, str(GRAFT), "bench", name, *options]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def peak_rss() -> int:
    """Return the most memory that this process has had, in MB."""
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)
    import psutil  # Windows

    return round(psutil.Process().memory_info().peak_wset / 1e6)
