"""A check of every LoRA file that Save LoRA writes, loaded by ComfyUI and by diffusers.

    python dev/check_exports.py write OUT                 families x methods x formats x number formats
    python dev/check_exports.py comfy OUT [--comfyui DIR] through that ComfyUI's own loader, by its own Python
    python dev/check_exports.py diffusers OUT             through diffusers' own pipelines
    python dev/check_exports.py table OUT                 what all readers so far have found

OUT/<family>/base.safetensors is a tiny random model, OUT/<family>/<case>/ a state with random adapters and
its files. A reader's difference to each weight must be the adapter's own, recomputed from the state. Unless
that holds for every file, but for those that MISSING lists with the reason, a reader exits with 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import torch

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parent.parent
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()
    sys.exit(importlib.import_module("graft.dev.check_exports").main())

from ..commands.headless.import_comfyui import import_comfyui
from ..commands.headless.server import comfyui_version, find_comfyui
from .exports.files import WRITTEN, Written, chosen, read_results, save
from .exports.report import report


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; return 1 where a file does not load as it should."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("command", choices=("write", "comfy", "diffusers", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--comfyui", type=Path, help="folder of a ComfyUI; default: as the tests find it")
    parser.add_argument("--only", nargs="*", default=["*"], metavar="FAMILY/CASE", help="globs; default: all")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.command == "write":
        return write_files(args)
    if args.command == "table":
        return report(read_results(args.out))
    if args.command == "comfy":
        version = start_comfyui(args)
        from .exports.in_comfyui import read

        reader = f"ComfyUI {version}"
    else:
        from .exports.in_diffusers import read, version

        reader = f"diffusers {version}"
    files = [Written(**values) for values in json.loads((args.out / WRITTEN).read_text())]
    files = [file for file in files if not file.refused and chosen(file, args.only)]
    if not files:
        parser.error(f"{args.out} has no file of {', '.join(args.only)}; write them first.")
    results = list(read(args.out, files, reader))
    save(args.out / f"{reader}.json", results)
    return report(results)


def write_files(args: argparse.Namespace) -> int:
    """Write the files and the list of them; say what Save LoRA refuses."""
    start_comfyui(args)
    from .exports.in_comfyui import write

    files = list(write(args.out, args.only))
    save(args.out / WRITTEN, files)
    refused = Counter(f"{f.format}: {f.refused.rpartition(': ')[2]}" for f in files if f.refused)
    print(f"{len(files) - refused.total()} files in {args.out}")
    print(*(f"refused, {count} files, {why}" for why, count in refused.items()), sep="\n")
    return 0


def start_comfyui(args: argparse.Namespace) -> str:
    """Make the ComfyUI of the command line importable; return its version."""
    comfyui = args.comfyui or find_comfyui()
    import_comfyui(comfyui, ["--cpu"])
    return comfyui_version(comfyui)
