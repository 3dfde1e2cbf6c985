"""Helpers of all tools: where results may go, and the report on keys that were left out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..files.lora.match import by_reason
from ..user_error import UserError


def check_output(output: Path, inputs: Iterable[Path]) -> None:
    """Raise UserError unless `output` is a .safetensors file that is none of the `inputs`."""
    if output.suffix != ".safetensors":
        raise UserError(f"{output.name}: the result is a .safetensors file; give it that extension.")
    if output.is_dir():
        raise UserError(f"{output.name}: a folder has that name; choose another name.")
    for path in inputs:
        same_place = os.path.realpath(output) == os.path.realpath(path)
        if same_place or (output.exists() and path.exists() and output.samefile(path)):
            raise UserError(
                f"{output.name}: the result would replace a file that it is made from; choose another name."
            )


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """Return lines that list the keys of a file that were left out, by reason; none where none were."""
    lines: list[str] = []
    for reason, keys in by_reason(left_out).items():
        lines += [f"{len(keys)} keys {reason} and were left out:", *(f"  {key}" for key in keys)]
    return lines
