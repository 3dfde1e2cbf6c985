"""The report of the check of exports, and MISSING: files that a reader cannot load, with the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .files import DTYPES, TOLERANCE, Loaded, Written


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


def report(results: list[Loaded]) -> int:
    """Print the table and the faults; return 1 where there are any."""
    lines = faults(results)
    print(table(results), *lines, sep="\n")
    return 1 if lines else 0


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
        verdict = f"MISSING lists them ({reason(group[0])}), but they load" if sound else fault(group[0])
        lines.append(f"{reader}: {family}, {name}: {cases}: {verdict}")
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
