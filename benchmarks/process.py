"""A benchmark in a process of its own, for figures that belong to a process: peak memory, above all."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def alone(name: str, *options: str) -> Any:
    """Return the last line, which is JSON, that `graft bench name` prints in a process of its own."""
    found = subprocess.run([*this_benchmark(name), *options], check=True, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def this_benchmark(name: str) -> list[str]:
    """Return the command of `graft bench name`, whatever the checkout's folder is called."""
    start = (
        "import importlib.util as u, sys; "
        f"s = u.spec_from_file_location('graft', {str(ROOT / '__init__.py')!r}, "
        f"submodule_search_locations=[{str(ROOT)!r}]); "
        "sys.modules['graft'] = m = u.module_from_spec(s); s.loader.exec_module(m); "
        "from graft.training.cli import main; sys.exit(main())"
    )
    return [sys.executable, "-c", start, "bench", name]


def peak_rss() -> int:
    """Return the most memory that this process has had, in MB."""
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)
    import psutil  # Windows

    return round(psutil.Process().memory_info().peak_wset / 1e6)
