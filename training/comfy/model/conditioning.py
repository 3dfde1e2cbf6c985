"""ComfyUI's CONDITIONING as the engine's Conditioning, and back.

The one rule: a step sees what sampling would see. So what ComfyUI's sampler acts on outside of the model
(`control`, `hooks`, areas, ranges of steps) is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import comfy.clip_vision
import torch
from torch import Tensor

from ...model import Condition, Conditioning
from ...user_error import UserError

NEUTRAL = {
    "strength": 1.0,
    "mask_strength": 1.0,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "clip_start_percent": 0.0,
    "clip_end_percent": 1.0,
    "set_area_to_bounds": False,
    "control_apply_to_uncond": False,
}
"""What only the sampler reads, and the value at which it does nothing."""
SAMPLER_ONLY = {
    *("control", "hooks", "area", "mask", "gligen", "default", "timestep_start", "timestep_end"),
    *NEUTRAL,
}
"""What the model itself never sees (comfy/samplers.py, get_area_and_mult)."""

PACKED = "latent_shapes"
"""What says which tensors a sample's latents are packed from, such as video and sound."""


def read_conditioning(conditioning: Any, where: str = "conditioning") -> Conditioning:
    """Return the model's part of a CONDITIONING with one entry, its tensors on the CPU.

    Raises UserError that names what cannot be trained: what only the sampler acts on, several entries, and
    objects of nodes that have no numbers to store.
    """
    if not _is_conditioning(conditioning):
        raise UserError(f"{where}: this is no CONDITIONING; connect what CLIP Text Encode gives out, say.")
    if len(conditioning) != 1:
        raise UserError(
            f"{where}: has {len(conditioning)} entries, as from Conditioning (Combine) or a schedule of "
            "hooks; a step trains one. Connect what goes into that node."
        )
    [[cross_attn, options]] = conditioning
    acting = sorted(
        name for name in SAMPLER_ONLY & options.keys() if NEUTRAL.get(name, None) != options[name]
    )
    if acting:
        raise UserError(
            f"{where}: {', '.join(acting)} act in the sampler and not in the model, so they cannot be "
            "trained. Connect the conditioning from before the node that added them."
        )
    values = {"cross_attn": cross_attn, **options}
    return {
        name: _to_value(value, f"{where}: {name}")
        for name, value in values.items()
        if value is not None and name not in SAMPLER_ONLY
    }


def as_sampled(value: Any) -> Any:
    """Return a stored value as ComfyUI's models take it: what CLIP Vision made is an object there."""
    if isinstance(value, Mapping):
        parts = {name: as_sampled(part) for name, part in value.items()}
        if "last_hidden_state" not in parts:
            return parts
        output = comfy.clip_vision.Output()
        vars(output).update(parts)
        return output
    return [as_sampled(part) for part in value] if isinstance(value, list | tuple) else value


def _is_conditioning(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(
            isinstance(entry, Sequence)
            and len(entry) == 2
            and isinstance(entry[0], Tensor | None)
            and isinstance(entry[1], Mapping)
            for entry in value
        )
    )


def _to_value(value: Any, where: str) -> Condition:
    """Return a value with its tensors on the CPU. Raises UserError for what cannot be stored."""
    if isinstance(value, Tensor) and not getattr(value, "is_nested", False):
        return value.detach().to("cpu").clone()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, list | tuple):
        return [_to_value(part, f"{where}[{index}]") for index, part in enumerate(value)]
    if isinstance(value, comfy.clip_vision.Output):
        value = vars(value)
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _to_value(part, f"{where}.{name}") for name, part in value.items()}
    raise UserError(
        f"{where} is a {type(value).__name__}, which cannot be stored: tensors, numbers, texts and lists of "
        "them can. Connect the conditioning from before the node that added it."
    )
