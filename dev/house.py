"""Print the figures of the house, `python dev/house.py`: sizes of rooms, directions of imports, names.

`tests/dev/test_house.py` holds the limits. All is read from the source; nothing of Graft is imported.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("training", "training/comfy", "starter", "nodes", "commands", "tests/support", "dev", "tests")
"""From the ground up: a room imports from its own floor and from those below."""

SHIPPED = ("training", "starter", "nodes", "commands")
ENTRY = "__init__.py"
Function = ast.FunctionDef | ast.AsyncFunctionDef

VERBS = frozenset(
    """
    adapt add append apply ask attach begin bind bring build call check choose clean clear clip close commit
    complete compute convert copy decode define delete draw drop encode end exclude execute export extend
    extract fetch fill find finetune finish fit fold follow forget forward free gather get give go group
    handle hold ignore import init initialize install interrupt join keep kill leave lend let list load look
    make match measure merge move multiply note open optimize pack pin plot post prepare preview print probe
    prune put quantize queue raise read record refuse register release remember remove rename render replace
    report request require reset resize restore resume rotate run save say scan send set show shuffle start
    step stop store sum sweep synchronize take tell tidy train try undo unload unmerge update use validate
    wait warn watch wrap write
    """.split()
)
"""Public functions that act begin with one of these."""

GIVES = frozenset("as bring compute count digest every find measure return say whether yield".split())
"""First words of docstrings of functions that only give a value: nouns may name those."""

NOUNS: Mapping[str, str] = {
    "*: main": "a program's entry, by its usual name",
    "*: from_*": "another constructor",
    "*: on_*": "a handler, named after its event",
    "*: no_progress": "the handler that does nothing",
    "training/job/read.py: maybe": "the answer that is an argument's default",
    "training/loop.py: step_*": "calls within a step, named after the moment",
    "training/loop.py: backward": "PyTorch's own name",
    "training/job/keys.py: *": "the reading of a key, named after it",
    "training/job/rules.py: *": "a rule, named after what it decides",
    "training/objective/*: *": "a formula: it adds to a new tensor",
    "training/run/plots.py: *": "a picture, named after what it shows",
    "training/comfy/run/checkpoint_grid.py: checkpoint_grid": "a picture, named after what it shows",
}
"""Public functions that act and begin with no verb, as globs of "file: name" -> why they may."""


# --- imports ------------------------------------------------------------------------------------------------


def source_files(room: str) -> list[Path]:
    """Return the Python files of a room, those of rooms inside it among them."""
    return sorted((ROOT / room).rglob("*.py"))


def floor_of(path: Path) -> int:
    """Return the index in FLOORS of the innermost room that a file or folder of the checkout is in.

    The root's own files stand beside the commands.
    """
    place = path.relative_to(ROOT).as_posix()
    rooms = [room for room in FLOORS if place == room or place.startswith(f"{room}/")]
    return FLOORS.index(max(rooms, key=len, default="commands"))


def imports_of(path: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Yield (module, level, names) of every import statement in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level, [alias.name for alias in node.names]


def imported_files(path: Path) -> set[Path]:
    """Return the files of the checkout that a file imports: relatively, or as the package `graft`."""
    imported: set[Path] = set()
    for module, level, names in imports_of(path):
        parts = [part for part in module.split(".") if part]
        if level:
            folder = path.parents[level - 1]
        elif parts[:1] == ["graft"]:
            folder, parts = ROOT, parts[1:]
        else:
            continue
        place = folder.joinpath(*parts)
        targets = [file for name in names if (file := _file_at(place / name))]
        imported.update(targets or filter(None, [_file_at(place)]))
    return imported - {ROOT / ENTRY}


def _file_at(place: Path) -> Path | None:
    """Return the file of a module or package, None where there is none."""
    return next(
        (file for file in (place.with_name(f"{place.name}.py"), place / ENTRY) if file.is_file()), None
    )


def arrows() -> dict[Path, set[Path]]:
    """Return what each file of the house imports of it."""
    rooms = [room for room in FLOORS if "/" not in room]
    return {path: imported_files(path) for room in rooms for path in source_files(room)}


def arrows_up(graph: Mapping[Path, set[Path]]) -> list[str]:
    """Return the imports from a floor above, as "file -> file"."""
    return [
        f"{path.relative_to(ROOT)} -> {target.relative_to(ROOT)}"
        for path, targets in graph.items()
        for target in sorted(targets)
        if floor_of(target) > floor_of(path)
    ]


def top_level() -> list[str]:
    """Return what a stranger sees first: files and folders of the root, without hidden and built ones."""
    built = ("__pycache__", "build", "dist", "graft-demo")
    names = (path.name for path in ROOT.iterdir())
    return sorted(
        n for n in names if not n.startswith(".") and n not in built and not n.endswith(".egg-info")
    )


def room_of(path: Path) -> str:
    """Return the folder of a file. A module that lies loose in `training/` or in `training/comfy/` is a room
    of its own.
    """
    place = path.relative_to(ROOT)
    loose = place.parent.as_posix() in FLOORS[:2] and place.name != ENTRY
    return (place if loose else place.parent).as_posix()


def room_graph(graph: Mapping[Path, set[Path]]) -> dict[str, set[str]]:
    """Return which rooms each room imports from."""
    rooms: defaultdict[str, set[str]] = defaultdict(set)
    for path, targets in graph.items():
        rooms[room_of(path)] |= {room_of(target) for target in targets} - {room_of(path)}
    return rooms


def circles(graph: Mapping[Path, set[Path]] | Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of more than one node of which each can be reached from each (Tarjan 1972)."""
    order: dict[object, int] = {}
    lowest: dict[object, int] = {}
    stack: list[object] = []
    cycles: list[list[str]] = []

    def visit(node: object) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for target in graph.get(node, ()):  # type: ignore[call-overload]
            if target not in order:
                visit(target)
            if target in stack:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == order[node]:
            first = stack.index(node)
            if len(group := stack[first:]) > 1:
                cycles.append(sorted(map(str, group)))
            del stack[first:]

    for node in graph:
        if node not in order:
            visit(node)
    return cycles


# --- functions ----------------------------------------------------------------------------------------------


def functions() -> Iterator[tuple[Path, Function]]:
    """Yield the functions of all that ships, those within others among them."""
    for path in (path for room in SHIPPED for path in source_files(room)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function):
                yield path, node


def acts(node: Function) -> bool:
    """Return whether a function acts: it gives nothing, or its docstring begins with what it does.

    A context manager is left out: its name is the state within it, as in `with locked(folder):`.
    """
    marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
    if marks & {"contextmanager", "asynccontextmanager", "property", "setter", "overload"}:
        return False
    first = (ast.get_docstring(node) or "return").split()[0].lower().strip(".,:`")
    return (node.returns is not None and ast.unparse(node.returns) == "None") or first in VERBS - GIVES


def acting_nouns() -> list[str]:
    """Return the public functions that act and begin with no verb, but those of NOUNS, as "file: name"."""
    names = [
        f"{path.relative_to(ROOT).as_posix()}: {node.name}"
        for path, node in functions()
        if acts(node) and not node.name.startswith("_") and node.name.split("_")[0] not in VERBS
    ]
    return [name for name in names if not any(fnmatchcase(name, glob) for glob in NOUNS)]


def lines_of(node: Function) -> int:
    """Return a function's number of lines, with its docstring."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


# --- rows ---------------------------------------------------------------------------------------------------

ROWS = {
    "model": "Chroma",
    "adapter": "lokr",
    "optimizer": "adafactor",
    "setting": "noise_offset",
}
"""Kind of row -> one that has everything of its kind."""


def files_naming(name: str) -> list[str]:
    """Return the files of the engine and the nodes that name a row: as a text, a field, or an argument."""
    files = [path for room in ("training", "nodes") for path in source_files(room)]
    return [path.relative_to(ROOT).as_posix() for path in files if name in _names_in(path)]


def _names_in(path: Path) -> set[str]:
    used: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.keyword | ast.arg):
            used.add(node.arg or "")
        elif isinstance(node, ast.Name):
            used.add(node.id)
    return used


# --- the report ---------------------------------------------------------------------------------------------


def figures() -> dict[str, int]:
    """Return the figures that have limits, by name."""
    graph = arrows()
    inits = [ROOT / ENTRY, *(path for path in graph if path.name == ENTRY)]
    return {
        "top-level entries": len(top_level()),
        "loose modules in training/": sum(path.name != ENTRY for path in (ROOT / "training").glob("*.py")),
        "arrows up": len(arrows_up(graph)),
        "circles of files": len(circles(graph)),
        "circles of rooms": len(circles(room_graph(graph))),
        "lines of the largest __init__.py": max(len(path.read_text().splitlines()) for path in inits),
        "lines of a function, 95th percentile": _percentile_95([lines_of(node) for _, node in functions()]),
        "functions that act and begin with no verb": len(acting_nouns()),
    }


def _percentile_95(values: list[int]) -> int:
    return round(statistics.quantiles(values, n=20)[-1])


def main() -> int:
    """Print the figures, what they count where it is little, and where rows are named."""
    graph = arrows()
    print(*(f"{value:5}  {name}" for name, value in figures().items()), sep="\n")
    for title, rows in (
        ("arrows up", arrows_up(graph)),
        ("circles of files", [" ".join(group) for group in circles(graph)]),
        ("circles of rooms", [" ".join(group) for group in circles(room_graph(graph))]),
        ("act and begin with no verb", acting_nouns()),
        ("may be nouns", [f"{glob}  {why}" for glob, why in NOUNS.items()]),
    ):
        print(f"\n{title}:", *(rows or ["none"]), sep="\n  ")
    print("\nfiles of the engine and the nodes that name a row, for one row of each kind:")
    for kind, name in ROWS.items():
        files = files_naming(name)
        print(f"  {kind} {name!r}: {len(files)}: {', '.join(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
