"""The parts of a conditioning that a model does not look at, and would not learn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...model import Batch, Conditioning, tensors_in
from .denoiser import ComfyDenoiser

ADDED_BY_NODES = (
    *("reference_", "concat_", "clip_vision", "unclip_", "guidance", "vace_", "audio_", "control_"),
)
"""How those parts of a conditioning begin that no text encoder makes."""


def find_unseen(
    denoiser: ComfyDenoiser, conditioning: Conditioning, latents: Tensor | None = None
) -> list[str]:
    """Return the parts of a conditioning, among those that nodes add, of which the network is given nothing.

    `latents` (1, C, ...) are those of the sample; None for any.
    """
    if latents is None:
        form = denoiser.model.latent_format
        latents = torch.zeros(1, form.latent_channels, *(1,) * (form.latent_dimensions - 2), 8, 8)

    def seen(part: Conditioning) -> Mapping[str, Any]:
        [conditions] = denoiser.conditions(latents, Batch(latents, [part]))
        return {name: condition.cond for name, condition in conditions.items()}

    whole = seen(conditioning)
    names = [name for name in conditioning if name.startswith(ADDED_BY_NODES)]
    without = {name: {n: v for n, v in conditioning.items() if n != name} for name in names}
    return [name for name in names if _is_same(whole, seen(without[name]))]


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values that a network is given are equal."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    tensors, others = tensors_in(one), tensors_in(other)
    if not tensors:
        return bool(one == other)
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))
