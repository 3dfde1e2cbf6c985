"""Every LoRA file that Save LoRA writes, loaded by ComfyUI and by diffusers, against what was trained.

    python dev/exports.py write OUT                    families x methods x formats x number formats
    python dev/exports.py comfy OUT [--comfyui DIR]    through that ComfyUI's own loader, in its own Python
    python dev/exports.py diffusers OUT                through diffusers' own pipelines
    python dev/exports.py table OUT                    what all readers so far have found

OUT/<family>/base.safetensors is a tiny random model, OUT/<family>/<case>/ a state with random adapters and
its files. A reader's difference to each weight must be the adapter's own, recomputed from the state. Unless
that holds for every file, but for those that MISSING lists with the reason, a reader exits with 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import runpy
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parent.parent
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()
    sys.exit(importlib.import_module("graft.dev.exports").main())

from ..commands.headless.comfyui import import_comfyui
from ..commands.headless.server import comfyui_version, find_comfyui
from ..training.adapters.build import restore_adapters
from ..training.network.frozen_layer import LayerSpec
from ..training.run.saved_state import load_state

WRITTEN = "written.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
"""Largest relative error of a layer's difference: rounding, and in bf16 that of up to four factors."""

KINDS = {2: "linear", 3: "conv1d", 4: "conv2d"}
"""By the number of a weight's axes. An embedding's difference is formed as a linear layer's."""


@dataclass(frozen=True)
class Written:
    """One file, or the words with which Save LoRA refuses to write it."""

    family: str
    case: str
    format: str
    dtype: str
    refused: str = ""

    def path(self, out: Path) -> Path:
        name = "".join(letter if letter.isalnum() else "-" for letter in self.format).strip("-")
        return out / self.family / self.case / f"{name}.{self.dtype}.safetensors"


@dataclass
class Loaded:
    """What a reader makes of one file."""

    file: Written
    reader: str
    layers: int = 0
    """That were trained."""
    lost: list[str] = field(default_factory=list)
    """Layers that the reader leaves as they are."""
    extra: list[str] = field(default_factory=list)
    """Weights that it changes and that were not trained."""
    warnings: list[str] = field(default_factory=list)
    worst: float = 0.0
    """Largest relative error of a layer's difference, which is that of `worst_layer`."""
    worst_layer: str = ""
    ratio: float = 0.0
    """Norm of all differences over that of the adapters' own."""
    error: str = ""

    @property
    def sound(self) -> bool:
        faults = (self.error, self.lost, self.extra, self.warnings)
        return not any(faults) and self.worst <= TOLERANCE[self.file.dtype]


@dataclass(frozen=True)
class Missing:
    """Files that a reader cannot have, by globs."""

    reader: str
    reason: str
    family: str = "*"
    case: str = "*"
    format: str = "*"

    def __contains__(self, item: tuple[str, Written]) -> bool:
        reader, file = item
        globs = (
            (reader, self.reader),
            (file.family, self.family),
            (file.case, self.case),
            (file.format, self.format),
        )
        return all(fnmatchcase(value, glob) for value, glob in globs)


_DIFFUSERS = "diffusers *"
_KOHYA, _PEFT = "ComfyUI (kohya)", "diffusers (PEFT)"
_EVERY_LAYER = ("LoCon", "Tucker", "everything")
"""Cases of plain LoRA with layers outside the blocks."""
MISSING = (
    Missing(_DIFFUSERS, "diffusers has no LoHa", case="LoHa*"),
    Missing(_DIFFUSERS, "diffusers has no LoKr", case="*LoKr*"),
    Missing(_DIFFUSERS, "diffusers drops the magnitudes of DoRA, with a warning", case="*DoRA*"),
    Missing(_DIFFUSERS, "diffusers has no Tucker factor", family="SD*", case="Tucker"),
    Missing(_DIFFUSERS, "diffusers reads SD3 under its own names only", family="SD3*", format=_KOHYA),
    Missing(
        _DIFFUSERS,
        "diffusers reads SD1.5 under its own names and those of sd-scripts, not under ComfyUI's",
        family="SD1.5",
        format=_KOHYA,
    ),
    Missing(
        _DIFFUSERS,
        "diffusers reads Lumina 2 under ComfyUI's names only where every layer of the blocks is trained",
        family="Lumina2",
        format=_KOHYA,
    ),
    *(
        Missing(
            "ComfyUI *",
            "ComfyUI does not know what diffusers calls the layers of U-Nets and Lumina 2",
            family=family,
            format=_PEFT,
        )
        for family in ("SD1.5", "SDXL", "Lumina2")
    ),
    *(
        Missing(
            "ComfyUI *",
            "ComfyUI knows what diffusers calls the layers of Flux.2 and Chroma within the blocks only",
            family=family,
            case=case,
            format=_PEFT,
        )
        for family in ("Flux.2", "Klein", "Chroma")
        for case in _EVERY_LAYER
    ),
    *(
        Missing(
            "ComfyUI 0.3.*",
            "ComfyUI 0.3 does not know what diffusers calls Flux.2's MLPs and single blocks",
            family=family,
            format=_PEFT,
        )
        for family in ("Flux.2", "Klein")
    ),
    *(
        Missing(
            _DIFFUSERS,
            "diffusers reads ComfyUI's names of Flux and Chroma within the blocks only",
            family=family,
            case=case,
            format=_KOHYA,
        )
        for family in ("Flux", "Chroma")
        for case in _EVERY_LAYER
    ),
    *(
        Missing(
            _DIFFUSERS,
            "diffusers keeps ComfyUI's order of shift and scale in Flux.2's last modulation",
            family=family,
            case=case,
            format=_KOHYA,
        )
        for family in ("Flux.2", "Klein")
        for case in _EVERY_LAYER
    ),
)


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
        from .exports_comfy import read

        reader = f"ComfyUI {version}"
    else:
        from .exports_diffusers import read, version

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
    from .exports_comfy import write

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


def report(results: list[Loaded]) -> int:
    """Print the table and the faults; return 1 where there are any."""
    lines = faults(results)
    print(table(results), *lines, sep="\n")
    return 1 if lines else 0


def chosen(file: Written, globs: Iterable[str]) -> bool:
    """Return whether `--only` names the file's case."""
    return any(fnmatchcase(f"{file.family}/{file.case}", glob) for glob in globs)


def save(path: Path, rows: Iterable[Written | Loaded]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1), encoding="utf-8")


def read_results(out: Path) -> list[Loaded]:
    """Return what each reader found when it was last run."""
    paths = sorted(path for path in out.glob("*.json") if path.name != WRITTEN)
    rows = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))]
    return [Loaded(**{**row, "file": Written(**row["file"])}) for row in rows]


def base_of(out: Path, family: str) -> dict[str, Tensor]:
    """Return the tiny model's weights: the network's by their paths, the text encoders' behind TEXT."""
    return load_file(out / family / "base.safetensors")


def differences(out: Path, file: Written, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what was trained: weight's path -> its difference, from the state beside the file."""
    state = load_state(out / file.family / file.case)
    paths = {name.rsplit(".", 1)[0] for name in state.weights}
    shapes = {path: tuple(base[f"{path}.weight"].shape) for path in paths}
    specs = {path: LayerSpec(KINDS[len(shape)], shape) for path, shape in shapes.items()}
    adapters = restore_adapters(specs, state.adapter, state.weights, torch.device("cpu"))
    with torch.no_grad():
        return {f"{path}.weight": adapter.delta(base[f"{path}.weight"]) for path, adapter in adapters.items()}


def compare(result: Loaded, trained: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Loaded:
    """Complete `result` with what differs between these differences, by the same names."""
    norms = {name: float(difference.norm()) for name, difference in trained.items()}
    result.layers = len(trained)
    result.lost = sorted(trained.keys() - found.keys())
    result.extra = sorted(found.keys() - trained.keys())
    errors = {name: relative_error(found[name], trained[name]) for name in trained.keys() & found.keys()}
    result.worst_layer = max(errors, key=errors.__getitem__, default="")
    result.worst = errors.get(result.worst_layer, 0.0)
    norm = math.hypot(*(float(difference.norm()) for difference in found.values()))
    result.ratio = norm / math.hypot(*norms.values())
    return result


def relative_error(found: Tensor, trained: Tensor) -> float:
    """Return the norm of what differs over that of what was trained; infinite where they do not compare."""
    if found.shape != trained.shape:
        return math.inf
    error = float((found - trained).norm() / trained.norm())
    return math.inf if math.isnan(error) else error


def reason(result: Loaded) -> str:
    """Return why the reader cannot have the file, "" where it should."""
    return next((row.reason for row in MISSING if (result.reader, result.file) in row), "")


def faults(results: Iterable[Loaded]) -> list[str]:
    """Return a line for each family and format of which a file does not load, or loads against MISSING."""
    groups: dict[tuple[str, str, str, bool], list[Loaded]] = {}
    for result in results:
        if result.sound == bool(reason(result)):
            key = (result.reader, result.file.family, result.file.format, result.sound)
            groups.setdefault(key, []).append(result)
    lines = []
    for (reader, family, name, sound), group in groups.items():
        cases = ", ".join(dict.fromkeys(result.file.case for result in group))
        said = f"MISSING lists them ({reason(group[0])}), but they load" if sound else fault(group[0])
        lines.append(f"{reader}: {family}, {name}: {cases}: {said}")
    return lines


def fault(result: Loaded) -> str:
    """Return what is wrong with a file."""
    named = {"lost": result.lost, "changed though not trained": result.extra}
    parts = [result.error[:200]]
    parts += [
        f"{len(names)} layers {what} ({', '.join(names[:3])})" for what, names in named.items() if names
    ]
    if result.worst > TOLERANCE[result.file.dtype]:
        parts.append(f"relative error of {result.worst:.1e} in {result.worst_layer}")
    parts += [warning[:200] for warning in result.warnings[:2]]
    return "; ".join(filter(None, parts))


def table(results: Iterable[Loaded]) -> str:
    """Return a row for each family and format, and how many files are not there, by reason."""
    head = f"{'family':<11} {'format':<17} {'reader':<16} files sound layers  lost  norm ratio   worst error"
    lines = [head + "".join(f" {dtype:>8}" for dtype in DTYPES)]
    groups: dict[tuple[str, str, str], list[Loaded]] = {}
    absent: Counter[str] = Counter()
    for result in results:
        if why := reason(result):
            absent[why] += 1
        else:
            key = (result.file.family, result.file.format, result.reader)
            groups.setdefault(key, []).append(result)
    for (family, name, reader), group in groups.items():
        exact = [result.ratio for result in group if result.file.dtype == "fp32"]
        worst = [max(r.worst for r in group if r.file.dtype == dtype) for dtype in DTYPES]
        lines.append(
            f"{family:<11} {name:<17} {reader:<16} {len(group):>5} {sum(r.sound for r in group):>5} "
            f"{sum(r.layers for r in group):>6} {sum(len(r.lost) for r in group):>5} {min(exact):>5.3f} "
            f"{max(exact):>5.3f}            " + "".join(f" {error:>8.1e}" for error in worst)
        )
    return "\n".join([*lines, *(f"not there, {count} files: {why}" for why, count in absent.items())])
