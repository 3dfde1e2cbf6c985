"""Packages that single settings need; everything else runs without them."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def optional(module: str, setting: str, instead: str, *, package: str = "") -> Any:
    """Return the module that `setting` needs, of a package of its own name if not of `package`.

    Raises ValueError with the command that installs it into this Python, and what to do `instead`.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        package = package or module.partition(".")[0]
        raise ValueError(
            f"{setting} needs the package {package}, which cannot be used here ({error}). Install it with\n"
            f'"{sys.executable}" -m pip install {package}\nand restart ComfyUI, or {instead}.'
        ) from error
