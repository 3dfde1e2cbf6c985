"""`graft clean runs FOLDER [RUN ...]`: list runs with their sizes; delete those that are named."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from ..training.run.delete_run import delete_run
from ..training.run.run_list import list_runs
from ..training.user_error import UserError
from .headless.terminal import say

RUNS = "runs"
USAGE = f"graft clean {RUNS} FOLDER [RUN ...] [--yes]"


def clean_runs(arguments: Sequence[str], *, yes: bool) -> int:
    """List the runs in a folder, or delete the named ones, and return the exit code. Asks first unless `yes`.

    Raises UserError for a folder or a run that is not there, and for a run that is being trained.
    """
    folder, names = Path(*arguments[:1]), arguments[1:]
    if not arguments or not folder.is_dir():
        raise UserError(f"{USAGE}: {folder} is no folder; give output/graft of a ComfyUI.")
    rows = {row.run: row for row in list_runs(folder)}
    for name in names:
        if name not in rows:
            raise UserError(f"{name}: no such run in {folder}; `graft clean {RUNS} {folder}` lists them.")
    for row in (rows[name] for name in names or rows):
        date = f"{datetime.fromtimestamp(row.changed):%Y-%m-%d}"
        say(f"{row.bytes / 1e6:9.1f} MB  {date}  step {row.step:6d}  {row.run}")
    if not names:
        say(f"{sum(row.bytes for row in rows.values()) / 1e6:9.1f} MB in {len(rows)} runs")
        return 0
    if not yes and input("Delete them with all their files? [y/N] ").strip().lower() not in ("y", "yes"):
        say("nothing was deleted")
        return 1
    freed = sum(delete_run(folder, name) for name in dict.fromkeys(names))
    say(f"freed {freed / 1e6:.1f} MB")
    return 0
