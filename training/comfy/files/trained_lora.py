"""A training state as ComfyUI's values: a patched MODEL, a LORA_MODEL, a loss map, a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import comfy.sd
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...family import Family
from ...files.lora.write import lora_tensors
from ...state import TrainState


def with_lora(
    model: Any, clip: Any, state: TrainState, family: Family, strength: float = 1.0
) -> tuple[Any, Any]:
    """Return clones of MODEL and CLIP with the state's LoRA, applied by the stock loader's own code."""
    lora = lora_model(state, family)
    return comfy.sd.load_lora_for_models(model, clip, lora, strength, strength)  # type: ignore[no-any-return]


def lora_model(state: TrainState, family: Family) -> dict[str, Tensor]:
    """Return ComfyUI's LORA_MODEL: the tensors of the LoRA file, of the moving average where there is one."""
    return lora_tensors(replace(state, weights=state.result()), family)


def images(drawn: Sequence[Image.Image]) -> Tensor:
    """Return images of equal size as ComfyUI's IMAGE, (B, H, W, 3) float32 from 0 to 1."""
    arrays = [np.asarray(image.convert("RGB"), dtype=np.float32) / 255 for image in drawn]
    return torch.from_numpy(np.stack(arrays))


def loss_map(state: TrainState) -> dict[str, list[float]]:
    """Return ComfyUI's LOSS_MAP, which its Plot Loss Graph node draws."""
    return {"loss": list(state.losses)}
