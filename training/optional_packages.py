"""Optional packages, each for a single setting; everything else runs without them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .user_error import UserError


def optional(module: str, setting: str, instead: str, *, package: str = "") -> Any:
    """Return the module that `setting` needs, of a package of its own name if not of `package`.

    Raises UserError with the command that installs it into this Python, and what to do `instead`.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        package = package or module.partition(".")[0]
        # PowerShell takes a quoted path for text, so one that needs no quotes has none.
        python = f'"{sys.executable}"' if " " in sys.executable else sys.executable
        raise UserError(
            f"{setting} needs the package {package}, which cannot be used here ({error}). Install it with\n"
            f"{python} -m pip install {package}\nand restart ComfyUI, or {instead}."
        ) from error


def require_torch() -> None:
    """Raise UserError where PyTorch is too old for Graft, before anything of it is imported that fails."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
        raise UserError(
            f"Graft needs PyTorch 2.5 or newer, and this is {torch.__version__}; update ComfyUI's PyTorch."
        )
