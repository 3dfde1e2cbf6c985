"""`graft export-workflow job.yaml`: the same run as a graph, in ComfyUI's API format."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..training.job.graph import Prompt
from ..training.job.read import model_paths, read_job
from .headless.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("job", type=Path, metavar="JOB.yaml", help="see example_workflows/jobs")
    parser.add_argument("-o", "--out", dest="output", type=Path, metavar="FILE", help="default: the console")


def run(args: argparse.Namespace) -> int:
    """Write the job's graph, and name the folders to register with ComfyUI."""
    job = read_job(args.job)
    text = as_text(job.prompt)
    if args.output:
        args.output.write_text(text, encoding="utf-8", newline="\n")
    else:
        say(text)
    for entry in model_paths(job).values():
        lines = "\n".join(f"    {kind}: |\n" + _indented(folders) for kind, folders in entry.items())
        note = "The graph needs these lines in ComfyUI's extra_model_paths.yaml:"
        print(f"{note}\ngraft_job:\n{lines}", file=sys.stderr)
    return 0


def as_text(prompt: Prompt) -> str:
    """Return a graph as JSON with one node a line."""
    rows = [f"  {json.dumps(key)}: {json.dumps(node, ensure_ascii=False)}" for key, node in prompt.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _indented(folders: str) -> str:
    return "\n".join(f"        {folder}" for folder in folders.splitlines())
