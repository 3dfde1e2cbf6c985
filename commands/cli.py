"""The `graft` command: one row a subcommand, each with a module that is imported only when it is called.

A command's module has `add_arguments(parser)` and `run(args)`. A UserError is shown as one line, and so is
the system's error about a file; the exit code is 2. Any other error is a bug and keeps its traceback. A
result, `args.output`, goes into a folder that exists.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ..training.user_error import UserError

COMMANDS = {
    "demo": "train a LoRA in a real ComfyUI, on this machine, and draw with it",
    "train": "train a job file on a ComfyUI without an editor",
    "worker": "be one of the processes that torchrun starts for a job",
    "export-workflow": "write a job file as a graph for ComfyUI",
    "merge": "merge LoRAs into a checkpoint",
    "extract": "extract a LoRA from the difference of two models",
    "resize": "bring a LoRA to a lower rank",
    "convert": "convert a LoRA between layouts and number formats",
    "inspect": "show what a LoRA file holds",
    "plan": "estimate the memory of a run on a GPU, without training",
    "clean": "remove what has not been used for a while from the cache; list and delete runs",
    "bench": "measure Graft on this machine: speed, memory, learning",
}
"""Name -> what it does. Its module here has the same name, with underscores."""

REMEDIES: Mapping[type[OSError], str] = {
    FileNotFoundError: "does not exist; look at how its path is written",
    IsADirectoryError: "is a folder; give a file",
    NotADirectoryError: "leads through a file as if it were a folder; look at how its path is written",
    PermissionError: "may not be used (Permission denied); change its rights, or take another",
}
"""What is wrong with the file that a system's error names, and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the process's exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a console or a file with few letters must not end a command
            stream.reconfigure(errors="backslashreplace")
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="graft", description="Train LoRAs inside ComfyUI.")
    parser.add_argument("--version", action="version", version=f"graft {version()}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if argv[:1] == [name]:
            implementation = importlib.import_module(f".{name.replace('-', '_')}", __package__)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    args = parser.parse_args(argv)
    try:
        _require_folder(getattr(args, "output", None))
        return int(args.run(args))
    except (UserError, OSError) as error:
        print(f"graft {argv[0]}: {_message(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def version() -> str:
    """Return the version of this checkout, or of the installed package."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if project.is_file():
        match = re.search(r'^version = "(.+)"', project.read_text(encoding="utf-8"), re.MULTILINE)
        return match[1] if match else "unknown"
    return metadata.version("graft-lora")


def _require_folder(output: Path | None) -> None:
    if output is not None and not output.parent.exists():
        raise UserError(f"{output}: the folder {output.parent} does not exist; make it, or choose another.")


def _message(error: Exception) -> str:
    """Return an error's message; where it is the system's own, the file and what to do."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    remedy = REMEDIES.get(type(error), f"{error.strerror}; look at the file and the disk that it is on")
    return f"{error.filename}: {remedy}." if error.filename is not None else f"{error.strerror}."
