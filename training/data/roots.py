"""A dataset's folder from its name: always inside a folder that may be read.

The one rule: a graph can only name folders inside ComfyUI's input folder or a folder registered in
extra_model_paths.yaml; a graph from a stranger reads nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..user_error import UserError

KIND = "graft_datasets"
"""Key in extra_model_paths.yaml."""
RENAMED = {
    "demo": "starter",
    "demo/dataset": "starter/style",
    "demo/validation": "starter/style_validation",
    "demo/base_style": "starter/base_style",
    "starter/dataset": "starter/style",
    "starter/validation": "starter/style_validation",
}
"""Name of a shipped folder, as in saved graphs -> its name now."""
COMFYUI_OWN = ("3d", "clipspace")
"""Folders that ComfyUI makes in its input folder."""
LOOKED_AT, OF_EACH = 20_000, 500
"""Most entries searched for subfolders, in total and per folder: the menu is made at every page load."""


def resolve_dataset(name: str, roots: Sequence[str | os.PathLike[str]]) -> Path:
    """Return the folder called `name`: a name of `list_datasets`, or a path inside any of `roots`.

    Raises UserError if the name is empty, absolute or contains "..", if two folders or none match, or if the
    folder is a link out of its root; the message has the lines to register it.
    """
    parts = PurePosixPath(name.strip().replace("\\", "/")).parts
    if not parts or "\0" in name:
        raise UserError(
            f"no dataset folder chosen; put a folder with images into {_first(roots)} and choose it."
        )
    if PureWindowsPath(name.strip()).anchor or parts[0].startswith("/"):
        raise UserError(f"dataset {name!r} is a full path. {_how_to_register(Path(name.strip()), roots)}")
    if ".." in parts:
        raise UserError(
            f"dataset {name!r} leads out of its folder with '..'. {_how_to_register(None, roots)}"
        )
    for places in _places(parts, [Path(root) for root in roots]):
        there = {os.path.realpath(folder): (folder, root) for folder, root in places if folder.is_dir()}
        if len(there) > 1:
            folders = " and ".join(str(folder) for folder, _ in there.values())
            raise UserError(f"dataset {name!r} is the name of both {folders}; rename one of them.")
        for folder, root in there.values():
            _require_inside(folder, root, name, roots)
            return folder
    known = ", ".join(list_datasets(roots)[:20]) or "none"
    raise UserError(f"dataset {name!r} not found. The folders are: {known}. {_how_to_register(None, roots)}")


def _places(parts: tuple[str, ...], roots: Sequence[Path]) -> Iterator[list[tuple[Path, Path]]]:
    """Yield the (folder, root) pairs that a name may mean: names of the menu first, then looser ones."""
    beside = [(root.joinpath(*parts), root) for root in roots]
    below = [(root.joinpath(*parts[1:]), root) for root in roots]
    named = [(folder, root) for folder, root in below if root.name == parts[0]]
    yield beside[:1] + [(folder, root) for folder, root in named if root != roots[0]]
    yield beside[1:] + named
    root_now, *folder_now = PurePosixPath(RENAMED.get("/".join(parts), "")).parts or ("",)
    yield [(root.joinpath(*folder_now), root) for root in roots if root.name == root_now]


def list_datasets(roots: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the names for the menu: folders in the first root (ComfyUI's input), then registered ones.

    Each root gives its folders and their subfolders, within LOOKED_AT and OF_EACH.
    `resolve_dataset` takes any folder, however deep ("photos/2024/cats").
    """
    budget = iter(range(LOOKED_AT))
    names: list[str] = []
    for index, root in enumerate(map(Path, roots)):
        if not root.is_dir():  # registered, but gone
            continue
        below = []
        for child in _folders(root, count()):
            if index == 0 and child in COMFYUI_OWN:
                continue
            deeper = _folders(root / child, islice(budget, OF_EACH))
            below += [child, *(f"{child}/{name}" for name in deeper)]
        names += [root.name, *(f"{root.name}/{child}" for child in below)] if index else below
    return list(dict.fromkeys(names))


def _folders(folder: Path, budget: Iterator[int]) -> list[str]:
    """Return the names of the subfolders, sorted; takes one of `budget` for each entry searched."""
    try:
        with os.scandir(folder) as entries:
            seen = [entry for _, entry in zip(budget, entries, strict=False)]
            return sorted(entry.name for entry in seen if entry.name[0] != "." and entry.is_dir())
    except OSError:  # unreadable: nothing to choose
        return []


def yaml_lines(folder: str | os.PathLike[str]) -> str:
    """Return the lines of extra_model_paths.yaml that register `folder` (ComfyUI: utils/extra_config.py)."""
    path = PureWindowsPath(folder) if PureWindowsPath(folder).drive else PurePosixPath(folder)
    return f"graft:\n    base_path: {_scalar(str(path.parent))}\n    {KIND}: {_scalar(path.name)}"


def _require_inside(folder: Path, root: Path, name: str, roots: Sequence[str | os.PathLike[str]]) -> None:
    if not is_inside(folder, root):
        advice = _how_to_register(Path(os.path.realpath(folder)), roots)
        raise UserError(f"dataset {name!r} is a link that leads out of {root}. {advice}")


def is_inside(path: str | os.PathLike[str], root: str | os.PathLike[str]) -> bool:
    """Return whether `path`, with links resolved, is `root` or below it."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _how_to_register(folder: Path | None, roots: Sequence[str | os.PathLike[str]]) -> str:
    example = folder or Path(os.path.abspath("my_dataset"))
    whose = "this folder" if folder else "a folder elsewhere"
    return (
        f"Copy it into {_first(roots)}, or register {whose} with these lines in extra_model_paths.yaml "
        f"(in ComfyUI's folder; then restart ComfyUI):\n{yaml_lines(example)}"
    )


def _first(roots: Sequence[str | os.PathLike[str]]) -> str:
    return str(roots[0]) if roots else "ComfyUI's input folder"


def _scalar(text: str) -> str:
    """Return text as a YAML string, quoted if it could be read as a number, a date or a mapping."""
    reserved = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
    if re.fullmatch(r"[A-Za-z/][\w./\\:-]*", text) and text[-1] != ":" and text.lower() not in reserved:
        return text
    return "'" + text.replace("'", "''") + "'"
