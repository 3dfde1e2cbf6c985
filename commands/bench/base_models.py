"""Random base models at the real families' widths, built from ComfyUI's own classes, and their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...training.model import Batch

Settings = Mapping[str, Any]

HOST = torch.device("cpu")


@dataclass(frozen=True)
class BaseModel:
    """One model: how ComfyUI builds it, and the size of a sample."""

    config: str
    """Class in comfy.supported_models."""
    network: Settings
    latents: tuple[int, int, int]
    """(channels, height, width)"""
    tokens: int
    width: int
    """Of a token of text."""
    pooled: int


def _mmdit(depth: int, **extra: Any) -> Settings:
    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 64 * depth}}
    return {
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "depth": depth,
        "input_size": None,
        "adm_in_channels": 2048,
        "context_embedder_config": embedder,
        "num_patches": 384**2,
        "pos_embed_max_size": 384,
        "pos_embed_scaling_factor": None,
        **extra,
    }


def _unet(depth: tuple[int, ...], middle: int, outputs: tuple[int, ...], channels: int = 320) -> Settings:
    return {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": channels,
        "use_spatial_transformer": True,
        "use_linear_in_transformer": True,
        "legacy": False,
        "num_res_blocks": [len(depth) // 3] * 3,
        "channel_mult": [1, 2, 4],
        "transformer_depth": list(depth),
        "transformer_depth_output": list(outputs),
        "transformer_depth_middle": middle,
        "context_dim": 2048,
        "num_heads": -1,
        "num_head_channels": 64,
        "adm_in_channels": 2816,
        "num_classes": "sequential",
    }


def _flux(double: int, single: int) -> Settings:
    return {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": 768,
        "context_in_dim": 4096,
        "hidden_size": 3072,
        "mlp_ratio": 4.0,
        "num_heads": 24,
        "depth": double,
        "depth_single_blocks": single,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "guidance_embed": True,
        "txt_ids_dims": [],
    }


_SD35M = _mmdit(24, qk_norm="rms", x_block_self_attn_layers=list(range(13)))
_SD35L = _mmdit(38, qk_norm="rms", num_patches=192**2, pos_embed_max_size=192)
_SDXL = _unet((0, 0, 2, 2, 10, 10), 10, (0, 0, 0, 2, 2, 2, 10, 10, 10))

SMALL: Mapping[str, BaseModel] = {
    "sd3": BaseModel("SD3", _mmdit(12), (16, 64, 64), 77, 4096, 2048),
    "sdxl": BaseModel("SDXL", _unet((0, 1, 1), 1, (0, 0, 1, 1, 1, 1)), (4, 32, 32), 77, 2048, 1280),
    "flux": BaseModel("Flux", _flux(1, 2), (16, 32, 32), 77, 4096, 768),
}
"""Real widths, few blocks: for a CPU."""

FULL: Mapping[str, BaseModel] = {
    "sdxl": BaseModel("SDXL", _SDXL, (4, 128, 128), 77, 2048, 1280),
    "sd35m": BaseModel("SD3", _SD35M, (16, 128, 128), 154, 4096, 2048),
    "sd35l": BaseModel("SD3", _SD35L, (16, 128, 128), 154, 4096, 2048),
    "flux": BaseModel("Flux", _flux(19, 38), (16, 128, 128), 512, 4096, 768),
}
"""The models as people have them, at 1024 x 1024 pixels: for a GPU."""

_NARROW_FLUX = {**_flux(19, 38), "hidden_size": 128, "num_heads": 2, "axes_dim": [8, 28, 28]}

NARROW: Mapping[str, BaseModel] = {
    "sdxl": BaseModel("SDXL", {**_SDXL, "model_channels": 64}, (4, 8, 8), 4, 2048, 1280),
    "flux": BaseModel("Flux", _NARROW_FLUX, (16, 4, 4), 4, 4096, 768),
}
"""All of their layers, each so small that a step lasts as long as calling them: what fast cards wait for."""


_DRY_UNET = {
    **_unet((0, 0, 1, 1), 1, (0, 0, 0, 1, 1, 1), 64),
    "num_res_blocks": [2, 2],
    "channel_mult": [1, 2],
}
_DRY_MMDIT = {"num_patches": 32**2, "pos_embed_max_size": 32, "qk_norm": "rms"}

DRY: Mapping[str, BaseModel] = {
    "sdxl": BaseModel("SDXL", _DRY_UNET, (4, 16, 16), 8, 2048, 1280),
    "sd35m": BaseModel(
        "SD3", _mmdit(3, **_DRY_MMDIT, x_block_self_attn_layers=[0]), (16, 16, 16), 8, 4096, 2048
    ),
    "sd35l": BaseModel("SD3", _mmdit(4, **_DRY_MMDIT), (16, 16, 16), 8, 4096, 2048),
    "flux": BaseModel(
        "Flux", {**_NARROW_FLUX, "depth": 2, "depth_single_blocks": 3}, (16, 16, 16), 8, 4096, 768
    ),
}
"""The families of FULL, so small that a dry run trains each in a second."""


def build(model: BaseModel, dtype: torch.dtype, *, seed: int = 0) -> Any:
    """Return a ModelPatcher with random weights that keep the size of what passes through, in host memory as
    ComfyUI's loaders leave them."""
    import comfy.model_management
    import comfy.model_patcher

    config = _config_of(model, dtype)
    with torch.inference_mode(False):
        made = config.get_model({}, "", device=HOST)
        made.diffusion_model.to(dtype=dtype)
        _fill(made.diffusion_model, seed)
    device = comfy.model_management.get_torch_device()
    patcher = comfy.model_patcher.ModelPatcher(made, load_device=device, offload_device=HOST)

    def again(disable_dynamic: bool = False) -> Any:
        return build(model, dtype, seed=seed)

    patcher.cached_patcher_init = (again, ())  # how newer versions make a copy for their training node
    return patcher


def build_outline(model: BaseModel, dtype: torch.dtype) -> Any:
    """Return a ModelPatcher on the CPU whose weights are fake tensors: shapes only."""
    import comfy.model_patcher

    from ...training.comfy.model.outline import make_fake

    made = _config_of(model, dtype).get_model({}, "", device=torch.device("meta"))
    make_fake(made.diffusion_model)
    return comfy.model_patcher.ModelPatcher(made, load_device=HOST, offload_device=HOST)


def _config_of(model: BaseModel, dtype: torch.dtype) -> Any:
    """Return ComfyUI's configuration of the model."""
    import comfy.ldm.flux.model
    import comfy.supported_models

    network = dict(model.network)
    if "txt_ids_dims" in network and "txt_ids_dims" not in _fields(comfy.ldm.flux.model.FluxParams):
        del network["txt_ids_dims"]  # of newer versions
    config = getattr(comfy.supported_models, model.config)(network)
    config.set_inference_dtype(dtype, None)
    return config


def batch_of(model: BaseModel, size: int = 1, *, latents: tuple[int, int] | None = None) -> Batch:
    """Return `size` random samples, of (height, width) latents other than the model's own if given."""
    generator = torch.Generator().manual_seed(1)
    shape = (model.latents[0], *(latents or model.latents[1:]))
    conditioning = [
        {
            "cross_attn": torch.randn(1, model.tokens, model.width, generator=generator),
            "pooled_output": torch.randn(1, model.pooled, generator=generator),
        }
        for _ in range(size)
    ]
    return Batch(torch.randn(size, *shape, generator=generator), conditioning)


def _fields(kind: type) -> Mapping[str, Any]:
    return kind.__dataclass_fields__  # type: ignore[attr-defined, no-any-return]


@torch.no_grad()
def _fill(network: torch.nn.Module, seed: int) -> None:
    """Set matrices to normal numbers that keep the size of what they are applied to: a million, repeated."""
    numbers = torch.randn((1 << 20) - 3, generator=torch.Generator().manual_seed(seed))
    for name, tensor in network.state_dict().items():
        if tensor.ndim >= 2:
            for part in tensor.view(-1).split(len(numbers)):
                part.copy_(numbers[: len(part)])
            tensor.mul_(tensor[0].numel() ** -0.5 * (0.02 if name.endswith("pos_embed") else 1.0))
        elif tensor.is_floating_point():
            tensor.fill_(1.0 if name.endswith(("weight", "scale")) else 0.0)
