"""The outline of a base model: names, shapes and dtypes only, enough to plan a run in a second.

ComfyUI builds the network from the header of its file; its weights are fake tensors, which have no numbers
and take no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.model_patcher
import comfy.utils
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...family import FAMILIES
from ...files.tensor_file import FORMATS
from ...model import Batch
from ...user_error import UserError
from ..versions import prompts_wait
from .denoiser import ComfyDenoiser
from .loading import require_safetensors
from .weights import FLOAT8


class Outline(ComfyDenoiser):
    """A base model without numbers. Pages ask for estimates on it at any moment: it leaves what ComfyUI has
    loaded alone, and its `hold` raises RuntimeError while there are prompts.
    """

    def _rest(self) -> None:
        if prompts_wait():
            raise RuntimeError("ComfyUI is executing a prompt")


def outline(path: Path) -> Outline:
    """Return the model of a .safetensors file without its weights.

    Raises UserError if the file is not a base model.
    """
    shapes = _shapes(path)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(shapes)
    prefix = prefix if any(key.startswith(prefix) for key in shapes) else ""  # of diffusion_models
    config = comfy.model_detection.model_config_from_unet(shapes, prefix)
    if config is None:
        raise UserError(f"{path.name}: not a base model that ComfyUI recognizes; give its own file.")
    config.set_inference_dtype(torch.bfloat16, None)
    model = config.get_model(shapes, prefix, device=torch.device("meta"))
    make_fake(model.diffusion_model)
    _copy_float8(shapes, prefix, model.diffusion_model)
    cpu = torch.device("cpu")
    return Outline(comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu))


def outlined_batch(denoiser: ComfyDenoiser, size: int, width: int, height: int) -> Batch:
    """Return a batch of `size` samples of width x height pixels with long captions, to plan for.

    Raises UserError for families that are missing from TEXTS.
    """
    caption, cell = denoiser.family.caption, denoiser.pixels_per_cell
    if caption is None:
        known = ", ".join(family.name for family in FAMILIES.values() if family.caption)
        raise UserError(
            f"{denoiser.family.name} cannot be planned from its file alone; the families that can are "
            f"{known}. The Memory Plan node plans for every model."
        )
    latents = torch.zeros(size, denoiser.model.latent_format.latent_channels, height // cell, width // cell)
    conditioning: dict[str, Tensor] = {"cross_attn": torch.zeros(1, caption.tokens, caption.width)}
    if caption.pooled:
        conditioning["pooled_output"] = torch.zeros(1, caption.pooled)
    return Batch(latents, [conditioning] * size)


def _shapes(path: Path) -> dict[str, Tensor]:
    """Return the file's tensors on the meta device."""
    shapes = {}
    for key, entry in require_safetensors(path).entries.items():
        dtype = getattr(torch, FORMATS[entry.format][1], torch.float32)
        shapes[key] = torch.empty(entry.shape, dtype=dtype, device="meta")
    return shapes


def make_fake(network: nn.Module) -> None:
    """Replace a network's tensors on the meta device by fake ones on the CPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in network.modules():
            slots: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for slot in slots:
                for name, tensor in slot.items():
                    if tensor is not None:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        slot[name] = nn.Parameter(fake, False) if isinstance(tensor, nn.Parameter) else fake


def _copy_float8(shapes: Mapping[str, Tensor], prefix: str, network: nn.Module) -> None:
    """Give the weights that the file has in 8 bits that dtype."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for path, module in network.named_modules():
            stored, weight = shapes.get(f"{prefix}{path}.weight"), getattr(module, "weight", None)
            if stored is not None and weight is not None and stored.dtype in FLOAT8:
                module.weight = nn.Parameter(torch.empty(weight.shape, dtype=stored.dtype), False)
