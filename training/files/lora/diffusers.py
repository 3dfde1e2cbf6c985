"""The layouts that a trained LoRA is saved in: ComfyUI's, and that of diffusers and PEFT."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...family import Family, is_text
from ...state import TrainState
from ...user_error import UserError
from .names import ARCHITECTURES, TEXT_ENCODERS, Architecture, Part, split_text_path
from .peft import is_plain, peft_tensors, shape_of
from .write import lora_layers, lora_tensors

Layers = Mapping[str, Mapping[str, Tensor]]
"""Module path -> what a LoRA file holds for it, by suffix: "lora_down.weight", "lora_up.weight", "alpha"."""


def diffusers_tensors(state: TrainState, family: Family, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a diffusers/PEFT file of a training state; see `to_diffusers`."""
    exact = {path: {s: t.float() for s, t in values.items()} for path, values in lora_layers(state).items()}
    tensors = to_diffusers(exact, family)
    return {key: tensor.to(dtype) for key, tensor in tensors.items()}


def to_diffusers(layers: Layers, family: Family) -> dict[str, Tensor]:
    """Return a diffusers/PEFT file's tensors: "<prefix>.<layer>.lora_A.weight", "lora_B.weight".

    Raises UserError for a family or a layer without diffusers names, and for anything but plain LoRA.
    """
    if not family.export:
        raise UserError(f"{family.name} has no diffusers names here; save its LoRA in the ComfyUI format.")
    return under_diffusers_names(layers, ARCHITECTURES[family.export])


def under_diffusers_names(layers: Layers, architecture: Architecture) -> dict[str, Tensor]:
    """As `to_diffusers`, for a kind of network that diffusers knows."""
    tensors: dict[str, Tensor] = {}
    for path, values in layers.items():
        if not is_plain(values):
            raise UserError(
                f"{path}: diffusers knows plain LoRA only, and this layer holds {', '.join(sorted(values))}; "
                "save it in the ComfyUI format. Resize LoRA makes plain LoRA of LoHa and LoKr."
            )
        if is_text(path):
            encoder, inner = split_text_path(path)
            tensors |= peft_tensors(values, [Part(inner)], TEXT_ENCODERS[encoder].peft)
            continue
        parts = architecture.parts(path, shape_of(values))
        if not parts:
            raise UserError(f"{path}: diffusers has no such layer; exclude it, or use the ComfyUI format.")
        tensors |= peft_tensors(values, parts, architecture.diffusers)
    return tensors


FILE_FORMATS: Mapping[str, Callable[[TrainState, Family, torch.dtype], dict[str, Tensor]]] = {
    "ComfyUI (kohya)": lora_tensors,
    "diffusers (PEFT)": diffusers_tensors,
}
"""Names for people -> (state, family, dtype) -> the file's tensors."""


def comfy_reads(format: str, family: Family) -> bool:
    """Return whether ComfyUI's loader knows every name of a family's file in this format."""
    if FILE_FORMATS[format] is lora_tensors or not family.export:
        return True
    return ARCHITECTURES[family.export].comfy_reads_diffusers
