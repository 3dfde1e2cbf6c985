"""What lies in a run's folder for people to look at: sample images and checkpoints, by step."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

SAMPLE = re.compile(r"step-(\d{8,20})-(\d{1,6})\.(png|webp|flac)", re.ASCII)
INPUT = re.compile(r"input-(\d{1,6})\.(png)", re.ASCII)
CHECKPOINT = re.compile(r"step-(\d{8,20})", re.ASCII)


def list_files(folder: Path) -> dict[str, Any]:
    """Return a run's samples, the inputs of those made from images, and the steps of its checkpoints."""
    lies_in = folder / "samples"
    names = [name for name in _names(lies_in) if is_file_of(folder, lies_in / name)]
    samples = [
        {"name": match[0], "step": int(match[1]), "number": int(match[2])}
        for name in names
        if (match := SAMPLE.fullmatch(name))
    ]
    inputs = [{"name": name, "number": int(match[1])} for name in names if (match := INPUT.fullmatch(name))]
    checkpoints = (CHECKPOINT.fullmatch(name) for name in _names(folder / "checkpoints"))
    return {
        "samples": sorted(samples, key=lambda row: (row["step"], row["number"])),
        "inputs": sorted(inputs, key=lambda row: row["number"]),
        "checkpoints": sorted(int(match[1]) for match in checkpoints if match),
    }


def is_file_of(folder: Path, path: Path) -> bool:
    """Return whether `path` is a regular file in `folder`, also after following links."""
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []
