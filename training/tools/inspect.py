"""A summary of a LoRA: method, ranks, alphas, size, how much it changes each block, and its metadata."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from ..family import FAMILIES, Family
from ..files.lora.read import LoraFile, LoraLayer


@dataclass(frozen=True)
class Report:
    """The contents of a LoRA file that need no base."""

    name: str
    algorithms: dict[str, int]
    """Method -> number of layers."""
    ranks: dict[str, int]
    """Rank ("full" where there is none) -> number of layers."""
    scales: dict[str, int]
    """alpha / rank -> number of layers."""
    dtypes: dict[str, int]
    layers: int
    parameters: int
    norms: dict[str, float]
    """Block -> Frobenius norm of what the LoRA adds to it at strength 1, without what depends on the base:
    DoRA's magnitudes, OFT, BOFT and GLoRA."""
    other: list[str]
    """Keys that belong to no method."""
    base: str
    """The model that the LoRA was made for, by its metadata or else by the names of its layers."""
    metadata: dict[str, str]


def inspect(file: LoraFile) -> Report:
    """Return a report on a LoRA file."""
    layers = file.layers.values()
    squares: defaultdict[str, float] = defaultdict(float)
    for name, layer in file.layers.items():
        if not layer.method.multiplies_base:
            squares[block_of(name)] += layer.square()
    for name, whole in file.whole.items():
        squares[block_of(name)] += sum(
            float(t.double().square().sum()) for s, t in whole.items() if s != "alpha"
        )
    groups = [*(layer.tensors for layer in layers), *(o.tensors for o in file.others.values())]
    groups += file.whole.values()
    tensors = [tensor for group in groups for key, tensor in group.items() if not key.endswith("alpha")]
    named = (
        file.metadata.get(key) for key in ("ss_base_model_version", "modelspec.architecture", "graft_base")
    )
    return Report(
        name=file.name,
        algorithms=dict(Counter(file.methods.values())),
        ranks=dict(Counter(str(layer.rank or "full") for layer in layers)),
        scales=dict(Counter(f"{layer.scale:.4g}" for layer in layers)),
        dtypes=dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
        layers=len(file.methods),
        parameters=sum(tensor.numel() for tensor in tensors),
        norms={block: total**0.5 for block, total in squares.items()},
        other=sorted(file.other),
        base=", ".join(value for value in named if value) or guessed_base(file),
        metadata=dict(file.metadata),
    )


def guessed_base(file: LoraFile) -> str:
    """Return which model the layers belong to by `Family.layer_sign`; U-Nets differ by the width of text."""
    for name in file.methods:
        families = [family for family in FAMILIES.values() if _has_sign(family, name)]
        if families:
            return f"{_family_names(families, file.layers.get(name))} (not stated, by its layers)"
        if re.search(DIFFUSERS_SIGN, name):
            return "a transformer in diffusers' names (not stated, by its layers)"
    return "not stated"


DIFFUSERS_SIGN = "add_q_proj|attn_add_"
"""Regular expression for layers that many transformers have in diffusers."""


def _has_sign(family: Family, name: str) -> bool:
    return bool(family.layer_sign and re.search(family.layer_sign, name))


def _family_names(families: list[Family], layer: LoraLayer | None) -> str:
    """Return "A", "A or B" or "A or a relative of it", narrowed down by a layer that takes in the text."""
    width = layer.shape[1] if layer and not layer.method.multiplies_base else 0
    fitting = [family for family in families if family.caption and family.caption.width == width]
    first, *others = [family.name for family in fitting or families]
    return " or ".join([first, *others] if len(others) < 2 else [first, "a relative of it"])


def block_of(name: str) -> str:
    """Return the part of a layer's name up to its first number: its block, whatever the layout."""
    match = re.match(r".*?[._]\d+", name)
    return match[0] if match else name


def text(report: Report) -> str:
    """Return a report for people to read."""

    def counts(values: dict[str, int]) -> str:
        return ", ".join(f"{value} ({count})" for value, count in sorted(values.items(), key=lambda v: -v[1]))

    lines = [
        report.name,
        f"  method   {counts(report.algorithms)}",
        f"  rank     {counts(report.ranks)}",
        f"  strength {counts(report.scales)} (alpha / rank)",
        f"  type     {counts(report.dtypes)}",
        f"  size     {report.layers} layers, {report.parameters / 1e6:.2f} M parameters",
        f"  base     {report.base}",
        "  norm of the difference, block by block",
        *(f"    {norm:10.4f}  {block}" for block, norm in report.norms.items()),
    ]
    if report.other:
        lines += ["  not part of any method", *(f"    {key}" for key in report.other)]
    if report.metadata:
        lines += [
            "  metadata",
            *(f"    {key}: {_short(value)}" for key, value in sorted(report.metadata.items())),
        ]
    return "\n".join(lines)


def _short(value: str, width: int = 100) -> str:
    return value if len(value) <= width else f"{value[:width]}... ({len(value)} characters)"
