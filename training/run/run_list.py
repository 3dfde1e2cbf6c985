"""Every run in a folder such as output/graft: what a list shows of each, and how much disk it takes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoints import Checkpoints
from .folder import Run
from .new_run_notes import changed_settings, read_settings
from .queued import read_queued
from .run_files import list_files
from .run_log import read_entries

KEYED = re.compile(r".+-[0-9a-f]{16}", re.ASCII | re.DOTALL)
"""Name of a run's folder: its name and its key."""
OTHERS = ("cache", "states", "starts")
"""Folders beside the runs."""
DEEPEST = 8
"""Most folders that a run's name has, with '/' between them."""
SOUND = ".flac"
"""Ending of samples that are no picture."""
TAIL = 16 << 10
"""Bytes at the end of a log that are sure to hold its last line."""
SHOWN = ("adapter.algorithm", "adapter.rank", "optimizer.lr", "batch_size")
"""Settings that a list shows of every run."""


@dataclass(frozen=True)
class RunRow:
    """A run in the list."""

    run: str
    """Its folder below the root, with '/' between parts."""
    name: str
    step: int
    last: int
    """The step it was queued to; 0 if unknown."""
    ended: bool
    """Whether nothing more is trained to that step: it was reached, or Finish was pressed before."""
    loss: float | None
    """Its mean over the last steps."""
    sample: str
    """File of the newest sample's first image; "" if there is none."""
    bytes: int
    changed: float
    """When it was trained last, in seconds since 1970."""
    settings: dict[str, Any]
    differs: list[tuple[str, Any, Any]]
    """(setting, value before, value) against the run of this name before it."""


def find_runs(root: Path) -> list[Path]:
    """Return the folders of all runs under `root`. Links are not followed."""
    return sorted(_runs_in(root, DEEPEST))


def list_runs(root: Path) -> list[RunRow]:
    """Return every run under `root`, the one that was trained last first."""
    rows: list[RunRow] = []
    before: dict[str, dict[str, Any]] = {}
    for changed, folder in sorted((_changed(folder), folder) for folder in find_runs(root)):
        settings = read_settings(Run(folder))
        run = folder.relative_to(root).as_posix()
        name = run.rpartition("-")[0]
        rows.append(_row(folder, run, name, changed, settings, before.get(name, settings)))
        before[name] = settings
    return rows[::-1]


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    total, waiting = 0, [folder]
    while waiting:
        for entry in _entries(waiting.pop()):
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                else:
                    total += entry.stat(follow_symlinks=False).st_size
            except OSError:  # removed meanwhile
                continue
    return total


def _row(
    folder: Path, run: str, name: str, changed: float, settings: dict[str, Any], before: dict[str, Any]
) -> RunRow:
    log = folder / "log.jsonl"
    entries = read_entries(log, max(0, log.stat().st_size - TAIL) if log.is_file() else 0)["entries"]
    newest = entries[-1] if entries else {}
    samples = [each for each in list_files(folder)["samples"] if not each["name"].endswith(SOUND)]
    checkpoints = Checkpoints(Run(folder))
    step = max([newest.get("step", 0), *checkpoints.steps()])
    last = next(reversed(read_queued(folder).values()), 0)
    return RunRow(
        run=run,
        name=name,
        step=step,
        last=last,
        ended=bool(last) and (step >= last or checkpoints.is_end(step, last)),
        loss=newest.get("smoothed", newest.get("loss")),
        sample=next(
            (
                s["name"]
                for s in samples
                if s["step"] == samples[-1]["step"] and not s["name"].endswith(".flac")
            ),
            "",
        ),
        bytes=size_of(folder),
        changed=changed,
        settings={name: settings[name] for name in SHOWN if name in settings},
        differs=changed_settings(before, settings),
    )


def _runs_in(folder: Path, depth: int, top: bool = True) -> Iterator[Path]:
    for entry in _entries(folder):
        hidden = entry.name.startswith(".") or (top and entry.name in OTHERS)
        if hidden or not depth or not entry.is_dir(follow_symlinks=False):
            continue
        path = Path(entry.path)
        if KEYED.fullmatch(entry.name) and any(
            (path / file).is_file() for file in ("config.json", "log.jsonl")
        ):
            yield path
        else:
            yield from _runs_in(path, depth - 1, top=False)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _changed(folder: Path) -> float:
    dates = [(folder / file) for file in ("log.jsonl", "config.json")]
    return max((path.stat().st_mtime for path in dates if path.is_file()), default=0.0)
