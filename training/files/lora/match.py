"""The layers of a LoRA file matched to a model by their names, and the parts of fused layers joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...user_error import UserError
from .names import Target
from .peft import ALPHA, DOWN, UP, is_plain, swap_halves
from .read import LoraFile, LoraLayer

NO_LAYER = "match nothing"
NO_METHOD = "belong to no method"
IGNORED = "are ignored by ComfyUI, so here too,"
"""Reasons to leave keys out, as `Matched.left_out` has them."""


@dataclass(frozen=True)
class WholeLayer:
    """Differences of one layer that are not a product."""

    name: str
    """The file's own name for the layer."""
    target: Target
    tensors: Mapping[str, Tensor]
    """By suffix of WHOLE."""


@dataclass(frozen=True)
class Matched:
    """A file's layers by the model's keys: module paths, or keys of a checkpoint."""

    file: str
    """Its name."""
    layers: Mapping[str, LoraLayer]
    whole: tuple[WholeLayer, ...] = ()
    others: Mapping[str, Target] = field(default_factory=dict)
    """`LoraFile.others` that the model has, by the file's own names."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """The file's other keys -> why they are left out, as the end of a sentence."""


def match_lora(
    file: LoraFile, names: Mapping[str, Target], outputs: Mapping[str, int], model: str
) -> Matched:
    """Find the file's layers by their names; `outputs` holds every layer's number of outputs, in order.

    Raises UserError when none is found in `model`, or when parts of one layer cannot be joined.
    """
    parts: dict[str, list[tuple[Target, LoraLayer]]] = {}
    whole: list[WholeLayer] = []
    left_out = why_other(file)
    for name, layer in file.layers.items():
        if name in names:
            parts.setdefault(names[name].key, []).append((names[name], layer))
        else:
            left_out |= {f"{name}.{suffix}": NO_LAYER for suffix in layer.tensors}
    for name, tensors in file.whole.items():
        if name in names:
            whole.append(WholeLayer(name, names[name], tensors))
        else:
            left_out |= {f"{name}.{suffix}": NO_LAYER for suffix in tensors}
    others = {name: names[name] for name in file.others if name in names}
    for name in file.others.keys() - others.keys():
        left_out |= dict.fromkeys(file.others[name].tensors, NO_LAYER)
    if not (parts or whole or others):
        examples = ", ".join(list(file.methods)[:3])
        raise UserError(
            f"{file.name}: no layer of {model} has a name that the file uses ({examples}); was it trained on "
            "another kind of model?"
        )
    order = [key for key in outputs if key in parts]
    layers = {key: _join_parts(file.name, key, outputs[key], parts[key]) for key in order}
    return Matched(file.name, layers, tuple(whole), others, left_out)


def why_other(file: LoraFile) -> dict[str, str]:
    """Return the keys of a file's `other` tensors, and why they are left out."""
    return {key: IGNORED if key.endswith(".scalar") else NO_METHOD for key in file.other}


def by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the keys that were left out, for each reason."""
    reasons: dict[str, list[str]] = {}
    for key, reason in left_out.items():
        reasons.setdefault(reason, []).append(key)
    return reasons


def _restore_order(layer: LoraLayer, target: Target) -> LoraLayer:
    """Return a layer with its outputs in ComfyUI's order."""
    if not target.swapped:
        return layer
    if not is_plain(layer.tensors):
        raise UserError(
            f"{layer.name}: its outputs are in diffusers' order; only a plain LoRA can be reordered."
        )
    return replace(layer, tensors={**layer.tensors, UP: swap_halves(layer.tensors[UP])})


def _join_parts(file: str, path: str, outputs: int, parts: list[tuple[Target, LoraLayer]]) -> LoraLayer:
    """Return parts of a fused layer as one LoRA: a shared `down` once, different ones side by side."""
    parts = [(target, _restore_order(layer, target)) for target, layer in parts]
    target, first = parts[0]
    if len(parts) == 1 and target.rows == outputs:
        return first
    names = ", ".join(layer.name for _, layer in parts)
    if not all(is_plain(layer.tensors) for _, layer in parts):
        raise UserError(f"{file}: {names} are parts of one layer, {path}; only plain LoRAs can be joined.")
    if len({target.first for target, _ in parts}) != len(parts):
        raise UserError(f"{file}: {names} are all names of one layer, {path}; a layer may come once.")
    downs = [layer.weights["down"] for _, layer in parts]
    if any(down.shape[1:] != downs[0].shape[1:] for down in downs):
        raise UserError(f"{file}: {names} are parts of one layer, {path}, but differ in their inputs.")
    shared = all(down.shape == downs[0].shape and torch.equal(down, downs[0]) for down in downs)
    scale = first.scale if all(layer.scale == first.scale for _, layer in parts) else 1.0
    rank = downs[0].shape[0] if shared else sum(down.shape[0] for down in downs)
    up, column = torch.zeros(outputs, rank), 0
    for target, layer in parts:
        own = layer.weights["up"].float() * (layer.scale / scale)
        if own.shape[0] != target.rows:
            raise UserError(
                f"{file}: {layer.name}: {own.shape[0]} outputs, but that part of {path} has {target.rows}."
            )
        up[target.first : target.first + target.rows, column : column + own.shape[1]] = own
        column += 0 if shared else own.shape[1]
    tensors = {
        UP: up,
        DOWN: downs[0] if shared else torch.cat([down.float() for down in downs]),
        ALPHA: torch.tensor(scale * rank),
    }
    return LoraLayer(names, tensors)
