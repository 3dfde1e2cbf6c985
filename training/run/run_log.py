"""The log of a run on disk: `log.jsonl` and `log.csv` with one line per step; if wanted, also `log.sqlite`
with one row per step in its table `steps`, and TensorBoard's files.

A run that resumes first drops the lines after its step, and the torn line that a kill may leave, so every
step is there once.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ..files.whole_file import whole_file
from ..log import log
from ..loop import Progress
from ..optional_packages import optional
from ..user_error import FileError

FIELDS = (
    "step",
    "epoch",
    "loss",
    "smoothed",
    "validation",
    "lr",
    "grad_norm",
    "seconds",
    "images_per_second",
    "time_left",
    "memory",
    "plan",
)

CHUNK = 4 << 20
"""Bytes of a log that are read at once, at most."""

RETRY_SECONDS = 30.0
"""Wait after a failed write before the next one: on Windows a failure takes two seconds."""

Entry = dict[str, Any]


def entry_of(progress: Progress) -> Entry:
    """Return the log's entry for one step; a value that does not apply is None."""
    rate = progress.images / progress.seconds if progress.seconds else None
    values = {**vars(progress), "images_per_second": rate, "memory": progress.memory or None}
    return {name: _rounded(values[name]) for name in FIELDS}


def progress_of(entry: Entry, total: int) -> Progress:
    """Return the step that an entry was made from, in a run to step `total`."""
    numbers = {name: entry[name] for name in ("step", "loss", "lr", "grad_norm", "seconds", "validation")}
    smoothed, left = (math.nan if entry[name] is None else entry[name] for name in ("smoothed", "time_left"))
    return Progress(**numbers, total=total, smoothed=smoothed, time_left=left)


def describe(progress: Progress) -> str:
    """Return one line about a step, for the console and the node."""
    parts = [
        f"step {progress.step}/{progress.total}",
        f"loss {progress.loss:.4f} (mean {progress.smoothed:.4f})",
        f"validation {progress.validation:.4f}" if progress.validation is not None else "",
        f"{progress.seconds:.2f} s/step",
        f"{clock(progress.time_left)} left" if math.isfinite(progress.time_left) else "",
        f"lr {progress.lr:.2e}",
        f"gradient {progress.grad_norm:.3g}",
        f"{progress.memory / 2**30:.1f} GB ({progress.plan})" if progress.memory else "",
    ]
    return "  ".join(part for part in parts if part)


def clock(seconds: float) -> str:
    """Return a duration like 0:42, 12:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def read_log(path: Path) -> list[Entry]:
    """Return the entries of a `log.jsonl` up to the first torn line; none if there is no file."""
    entries: list[Entry] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if (entry := _entry(line)) is None:
                break
            entries.append(entry)
    except (OSError, ValueError):
        pass
    return entries


def read_entries(path: Path, start: int) -> dict[str, Any]:
    """Return the complete lines of a log from byte `start` on, at most CHUNK bytes.

    Skips lines that are not entries, as after a kill or if `start` lies within a line, and lines longer than
    CHUNK.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = start if start <= size else 0
            file.seek(start)
            text = file.read(CHUNK)
    except OSError:
        return {"start": 0, "next": 0, "more": False, "entries": []}
    end = text.rfind(b"\n") + 1
    whole = text if not end and len(text) == CHUNK else text[:end]
    entries = [entry for line in whole.splitlines() if (entry := _entry(line)) is not None]
    return {
        "start": start,
        "next": start + len(whole),
        "more": bool(whole) and start + len(text) < size,
        "entries": entries,
    }


def _entry(line: str | bytes) -> Entry | None:
    """Return the entry in a line, None if there is none. Numbers that JSON does not know become None."""
    try:
        entry = json.loads(line, parse_constant=lambda name: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None


class RunLog:
    """Appends to the log of a run that is at `step`. A log that cannot be written never stops a run.

    Entries after the last step that is written stay, up to step `last`, which has a checkpoint.
    """

    def __init__(
        self, folder: Path, step: int, *, last: int = 0, tensorboard: bool = False, sqlite: bool = False
    ) -> None:
        self.board = _tensorboard(folder, step) if tensorboard else None
        self.files: list[_File] = [
            _Lines(folder / "log.jsonl", _json),
            _Lines(folder / "log.csv", _csv, ",".join(FIELDS) + "\n"),
        ]
        if sqlite:
            self.files.append(_Table(folder / "log.sqlite"))
        known = read_log(self.files[0].path)
        self.later = [line for line in known if step < line["step"] <= last]
        self._append([line for line in known if line["step"] <= step])

    def write(self, progress: Progress) -> None:
        line = entry_of(progress)
        self._append([line])
        self.later = [later for later in self.later if later["step"] > progress.step]
        if self.board is not None:
            for name in ("loss", "smoothed", "validation", "lr", "grad_norm"):
                if line[name] is not None:
                    self.board.add_scalar(f"graft/{name}", line[name], progress.step)

    def close(self) -> None:
        self._append(self.later, at_last=True)
        if self.board is not None:
            self.board.close()

    def _append(self, lines: Sequence[Entry], *, at_last: bool = False) -> None:
        for file in self.files:
            file.append(lines, at_last=at_last)


class _File(ABC):
    """One file of a log, opened for each step. Lines that cannot be written wait, so that no step is missing
    once a spreadsheet program releases the file or the drive comes back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[Entry] = []
        self.begun = False
        self.failed_at = -math.inf

    def append(self, lines: Sequence[Entry], *, at_last: bool) -> None:
        """Write the waiting lines and `lines`. Soon after a failure all of them wait, unless `at_last`."""
        self.waiting += lines
        if self.begun and not self.waiting:
            return
        if not at_last and time.monotonic() < self.failed_at + RETRY_SECONDS:
            return
        try:
            if self.begun:
                self.extend(self.waiting)
            else:
                self.begin(self.waiting)
        except OSError as error:
            if at_last:
                log.warning("%s lacks the last steps of the run (%s).", self.path, error)
            elif self.failed_at == -math.inf:
                log.warning(
                    "%s cannot be written (%s); training goes on without it and tries again later.",
                    self.path,
                    error,
                )
            self.failed_at = time.monotonic()
        else:
            self.waiting, self.failed_at, self.begun = [], -math.inf, True

    @abstractmethod
    def begin(self, entries: Sequence[Entry]) -> None:
        """Write a new file. Raises OSError."""

    @abstractmethod
    def extend(self, entries: Sequence[Entry]) -> None:
        """Append to the file, all or nothing. Raises OSError."""


class _Lines(_File):
    """A text file with one line per step."""

    def __init__(self, path: Path, row: Callable[[Entry], str], head: str = "") -> None:
        super().__init__(path)
        self.row, self.head = row, head
        self.size = 0
        """Bytes of complete lines."""

    def begin(self, entries: Sequence[Entry]) -> None:
        text = self._text(entries, self.head)
        with whole_file(self.path) as temporary:
            temporary.write_bytes(text)
        self.size = len(text)

    def extend(self, entries: Sequence[Entry]) -> None:
        with self.path.open("ab") as file:
            file.truncate(min(self.size, file.tell()))  # without the torn line of a write that failed
            file.seek(0, os.SEEK_END)
            file.write(self._text(entries))
            size = file.tell()
        self.size = size

    def _text(self, entries: Sequence[Entry], head: str = "") -> bytes:
        return (head + "".join(map(self.row, entries))).encode("utf-8", "backslashreplace")


class _Table(_File):
    """A SQLite file with the table `steps`: one column per field, one row per step."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        instead = "switch sqlite off in Checkpoint Settings: log.csv and log.jsonl are written without it"
        self.sqlite3 = optional("sqlite3", "the log as a SQLite file", instead)

    def begin(self, entries: Sequence[Entry]) -> None:
        self.path.with_name(f"{self.path.name}-journal").unlink(
            missing_ok=True
        )  # of a process that was killed
        with whole_file(self.path) as temporary:
            columns = ", ".join(FIELDS[1:])
            self._insert(temporary, entries, f"CREATE TABLE steps (step INTEGER PRIMARY KEY, {columns})")

    def extend(self, entries: Sequence[Entry]) -> None:
        if not self.path.exists():
            raise FileNotFoundError("it is gone")
        self._insert(self.path, entries)

    def _insert(self, path: Path, entries: Sequence[Entry], first: str = "") -> None:
        row = f"INSERT OR REPLACE INTO steps VALUES ({', '.join('?' * len(FIELDS))})"
        try:
            with closing(self.sqlite3.connect(path, timeout=1.0)) as table, table:
                table.execute("PRAGMA synchronous = OFF")  # after a power cut, the next run writes a new file
                if first:
                    table.execute(first)
                table.executemany(row, [[line.get(name) for name in FIELDS] for line in entries])
        except self.sqlite3.Error as error:
            raise FileError(str(error)) from error


def _json(line: Entry) -> str:
    return json.dumps(line) + "\n"


def _csv(line: Entry) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([line.get(name) for name in FIELDS])
    return text.getvalue()


def _finite(text: str) -> float | None:
    """Return the number in `text`, None for one beyond all floats, like 1e309."""
    value = float(text)
    return value if math.isfinite(value) else None


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.8g}") if math.isfinite(value) else None


def _tensorboard(folder: Path, step: int) -> Any:
    instead = "switch it off: log.csv and log.jsonl are written without it"
    module = optional("torch.utils.tensorboard", "tensorboard", instead, package="tensorboard")
    return module.SummaryWriter(folder / "tensorboard", purge_step=step + 1)
