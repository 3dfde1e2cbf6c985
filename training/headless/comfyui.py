"""ComfyUI in this process, without its server: for commands that need its model classes only."""

from __future__ import annotations

import sys

from ...demo.runtime import find_comfyui


def start_comfyui(device: str = "cpu") -> None:
    """Make ComfyUI importable as its own main.py does, on "cpu" or "cuda".

    Raises ComfyUIError if there is none and none can be fetched.
    """
    sys.path.insert(0, str(find_comfyui()))
    flags = ["--use-pytorch-cross-attention", *(["--cpu"] if device == "cpu" else [])]
    argv, sys.argv = sys.argv, ["main.py", *flags]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args  # noqa: F401
    finally:
        sys.argv = argv
