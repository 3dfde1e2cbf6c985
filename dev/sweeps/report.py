"""The report of a sweep: its cases, the problems of each, and the table of both.

Cases are saved as lines of JSON, each written when the case is done, so a sweep that was stopped goes on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

KINDS = ("wrong", "dead queue", "hang", "traceback", "answer 500")
"""What a case can do wrong.

wrong: another result than it should be, a bad file that is taken for a sound one, an error that does not
name the file, a file where none may be. dead queue: nothing that is queued afterwards runs. hang: it goes on
after Cancel. traceback: an error that was not meant for people. answer 500: the server's own."""


@dataclass(frozen=True)
class Problem:
    """One thing that a case did wrong."""

    kind: str
    """One of KINDS."""
    words: str


@dataclass(frozen=True)
class Case:
    """Something to try."""

    group: str
    """Row of the table."""
    name: str
    """What it is: the same in every run of the sweep with this seed."""
    run: Callable[[], list[Problem]]


@dataclass
class Report:
    """The cases that are done."""

    file: Path | None = None
    """Of JSON lines; those that are there are not done again."""
    done: dict[str, tuple[str, list[Problem]]] = field(default_factory=dict)
    """Name of a case -> its group and problems."""

    def __post_init__(self) -> None:
        if self.file and self.file.exists():
            for line in self.file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.done[row["name"]] = row["group"], [Problem(**problem) for problem in row["problems"]]

    def run(self, cases: Iterable[Case]) -> None:
        """Run the cases that are not done yet."""
        for case in cases:
            if case.name not in self.done:
                self.add(case, case.run())

    def add(self, case: Case, problems: list[Problem]) -> None:
        """Note what came of a case, and print it where something went wrong."""
        self.done[case.name] = case.group, problems
        for problem in problems:
            print(ascii(f"{problem.kind}: {case.name}: {problem.words}")[1:-1], flush=True)
        if self.file:
            row = {"group": case.group, "name": case.name, "problems": [asdict(p) for p in problems]}
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    @property
    def failed(self) -> bool:
        return any(problems for _, problems in self.done.values())

    def table(self) -> Iterator[str]:
        """Yield a line for each group, and one for all: its cases, and how many of them had each problem."""
        rows: dict[str, Counter[str]] = {}
        for group, problems in self.done.values():
            counts = Counter({problem.kind for problem in problems})
            for row in (group, "all"):
                rows.setdefault(row, Counter()).update(counts)
                rows[row]["cases"] += 1
        rows["all"] = rows.pop("all", Counter())
        columns = ("cases", *KINDS)
        width = max(map(len, rows))
        yield " ".join([" " * width, *(f"{name:>10}" for name in columns)])
        for name, counts in rows.items():
            yield " ".join([f"{name:{width}}", *(f"{counts[column]:>10}" for column in columns)])
