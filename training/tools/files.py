"""What every tool does with files: where results may go, and what is told meanwhile and afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..files.lora.match import by_reason
from ..user_error import UserError


def check_output(output: Path, inputs: Iterable[Path]) -> None:
    """Raise UserError unless `output` is a .safetensors file other than the files that are read."""
    if output.suffix != ".safetensors":
        raise UserError(f"{output.name}: the result is a .safetensors file; let its name end in that.")
    if output.is_dir():
        raise UserError(f"{output.name}: there is a folder of that name; choose another name.")
    for path in inputs:
        same_place = os.path.realpath(output) == os.path.realpath(path)
        if same_place or (output.exists() and path.exists() and output.samefile(path)):
            raise UserError(
                f"{output.name}: the result would replace the file it is made of; choose another name."
            )


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """Return lines that list keys of a file which were not used, by reason; none for none."""
    lines: list[str] = []
    for reason, keys in by_reason(left_out).items():
        lines += [f"{len(keys)} keys {reason} and were left out:", *(f"  {key}" for key in keys)]
    return lines
