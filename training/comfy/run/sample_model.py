"""A model that samples are drawn with in place of the one that is trained: a Turbo version of it, the other
expert of Wan 2.2, a quantized copy."""

from __future__ import annotations

from typing import Any

from ...adapters.select import select
from ...config import AdapterConfig
from ...family import is_text
from ...user_error import UserError
from ..model.denoiser import ComfyDenoiser


def require_same_layers(model: Any, trained: ComfyDenoiser, adapter: AdapterConfig) -> None:
    """Raise UserError if a layer that is trained is not in `model`, a MODEL, or has another shape there."""
    drawing = ComfyDenoiser(model)
    chosen = select(trained.specs, trained.family, adapter)
    for path, spec in chosen.items():
        other = drawing.specs.get(path)
        if not is_text(path) and (other is None or (other.kind, other.shape) != (spec.kind, spec.shape)):
            found = "lacks the layer" if other is None else f"has another shape {other.shape} of"
            raise UserError(
                f"model of Sample Prompts: this {drawing.family.name} {found} {path}, which is trained on "
                f"{trained.family.name}, so the LoRA does not fit it. Connect a model of the same "
                "architecture, such as its Turbo version, or none to draw with the one that is trained."
            )
