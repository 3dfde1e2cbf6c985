"""The import of ComfyUI into this process, for commands that need its model classes only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .server import find_comfyui


def start_comfyui(device: str = "cpu") -> None:
    """Make ComfyUI importable as its own main.py does, on "cpu" or "cuda".

    Raises ComfyUIError if there is none and none can be fetched.
    """
    flags = ["--use-pytorch-cross-attention", *(["--cpu"] if device == "cpu" else [])]
    import_comfyui(find_comfyui(), flags)


def import_comfyui(comfyui: Path, options: Sequence[str]) -> None:
    """Make the modules of the ComfyUI in folder `comfyui` importable, its command line being `options`."""
    sys.path.insert(0, str(comfyui))
    argv, sys.argv = sys.argv, ["main.py", *options]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args  # noqa: F401
    finally:
        sys.argv = argv
