"""Check the types of all that ships: `python dev/check_types.py [OPTION OF MYPY ...]`.

Mypy names modules after their folders, and a checkout's folder may have any name. So it reads the checkout
through a link named `graft`.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = "graft-types-"


def main() -> int:
    """Run mypy and return its exit code; files are named from the checkout's root."""
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()
    install_graft = importlib.import_module("graft.commands.headless.server").install_graft
    with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as scratch:
        install_graft(Path(scratch) / "graft")
        command = [sys.executable, "-m", "mypy", *sys.argv[1:]]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "MYPYPATH": scratch}, stdout=subprocess.PIPE, text=True
        )
    # Mypy's cache repeats errors with the link of an earlier run.
    print(re.sub(rf"(?m)^\S*{SCRATCH}\w+.graft.", "", done.stdout), end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
