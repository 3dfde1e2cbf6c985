"""The table of what Graft does and which test shows it: `python dev/features.py` writes docs/features.md.

Rows and their names are in features.txt; a test says what it shows with `@pytest.mark.feature(12, 34)`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "features.md"
HEAD = """# What Graft does, and what shows it

Written by `python dev/features.py` from the marks of the tests. *GPU only*: no test shows it without a
graphics card ([devices](compatibility.md#devices)).

| | capability | test |
|---|---|---|
"""


@dataclass(frozen=True)
class Test:
    """A test that shows a row."""

    file: Path
    """Relative to the project."""
    name: str
    needs_gpu: bool

    def __str__(self) -> str:
        sentence = self.name.removeprefix("test_").replace("_", " ")
        return f"[{sentence}](../{self.file.as_posix()})"


def rows() -> dict[int, str]:
    """Return {number: name} of every row."""
    lines = (ROOT / "dev" / "features.txt").read_text(encoding="utf-8").splitlines()
    return {int(number): name for number, name in (line.split(" ", 1) for line in lines)}


def marked() -> dict[int, list[Test]]:
    """Return the tests of every row that a mark names, whether or not there is such a row."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        needs_gpu = any(ast.unparse(node) == "pytestmark = pytest.mark.gpu" for node in module.body)
        for node in module.body:
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.feature":
                    for row in map(ast.literal_eval, mark.args):
                        found[row].append(Test(path.relative_to(ROOT), node.name, needs_gpu))
    return dict(found)


def page() -> str:
    """Return the text of the page."""
    lines, shown = [], marked()
    for row, name in rows().items():
        tests = shown.get(row, [])
        only = "*GPU only*: " if tests and all(test.needs_gpu for test in tests) else ""
        lines.append(f"| F{row} | {name} | {only}{'; '.join(map(str, tests)) or '**nothing yet**'} |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
