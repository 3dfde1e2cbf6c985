"""Tiny random models of every family, through ComfyUI's own classes and, where it can size them, its own
loader.

`TINY[name]()` is a ModelPatcher of 0.1 to 3 M parameters to train on; `files()` are state dicts that
ComfyUI's loader must recognize by their names and shapes, at the sizes it insists on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.supported_models
import torch
from comfy.ldm.chroma.model import ChromaParams
from comfy.ldm.flux.model import Flux, FluxParams
from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

from graft.tests.support import dynamic_vram
from graft.training.model import Batch


def image_conditioning(index, *, tokens, width, pooled):
    generator = torch.Generator().manual_seed(1000 + index)
    found = {"cross_attn": torch.randn(1, tokens, width, generator=generator)}
    if pooled:
        found["pooled_output"] = torch.randn(1, pooled, generator=generator)
    return found


@dataclass(frozen=True)
class Tiny:
    """How to build one family's model and what it is conditioned on."""

    config: str
    """Class in comfy.supported_models."""
    unet: dict = field(repr=False)
    family: str = ""
    """Expected Family.name."""
    size: tuple = (8, 8)
    """Of latents, behind channels and frames."""
    width: int = 64
    """Of a token of text."""
    pooled: int = 0
    channels: int = 16
    frames: int = 0
    """0 for image latents (B, C, H, W)."""
    extra: Callable = dict
    """Further conditioning."""
    idle: tuple = ()
    """Globs of layers whose output this conditioning does not let the network see."""
    weights: Callable = dict
    """What of a file the model insists on."""
    building: Callable = nullcontext
    """A context in which its network is small."""

    @property
    def missing(self):
        """Whether this ComfyUI is too old for it."""
        return not hasattr(comfy.supported_models, self.config)

    def __call__(self, seed=0, patcher=None):
        model_config = getattr(comfy.supported_models, self.config)(dict(self.unet))
        model_config.unet_config.update(self.unet)  # also where it has one size
        model_config.set_inference_dtype(torch.float32, None)
        with dynamic_vram.off(), self.building():  # layers would get their weights with a file's
            model = model_config.get_model(self.weights(), "")
        fill(model.diffusion_model, seed)
        device = comfy.model_management.get_torch_device()
        usual = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
        return (patcher or usual)(model, load_device=device, offload_device=torch.device("cpu"))

    def conditioning(self, index):
        return {**image_conditioning(index, tokens=8, width=self.width, pooled=self.pooled), **self.extra()}

    def batch(self, indices=(0, 1), size=None):
        shape = (self.channels, *([self.frames] if self.frames else []), *(size or self.size))
        latents = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in indices]
        return Batch(
            torch.stack(latents), [self.conditioning(i) for i in indices], [f"{i}.png" for i in indices]
        )


def fill(network, seed):
    """Random weights that keep the size of what passes through; norms as they begin."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in network.state_dict().items():
        if tensor.ndim >= 2:
            fan_in = tensor[0].numel()
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * fan_in**-0.5)
        elif tensor.is_floating_point():
            tensor.fill_(1.0 if name.endswith(("weight", "scale", "gamma")) else 0.0)
        if name.endswith("pos_embed"):
            tensor.mul_(0.02)


def _mmdit(depth, **extra):
    return {
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "depth": depth,
        "input_size": None,
        "adm_in_channels": 2048,
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": 64, "out_features": 64 * depth},
        },
        "num_patches": 64,
        "pos_embed_max_size": 8,
        "pos_embed_scaling_factor": None,
        **extra,
    }


_UNET = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "use_spatial_transformer": True,
    "legacy": False,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [0, 1],
    "transformer_depth_output": [0, 0, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 64,
}
_UNET_XL = {
    **_UNET,
    "use_linear_in_transformer": True,
    "num_heads": -1,
    "num_head_channels": 32,
    "adm_in_channels": 2816,
    "num_classes": "sequential",
}
_UNET_REFINER = {**_UNET_XL, "adm_in_channels": 2560}
_UNET_1 = {
    **_UNET,
    "use_linear_in_transformer": False,
    "num_heads": 4,
    "num_head_channels": -1,
    "adm_in_channels": None,
}


def _flux(**changes):
    found = {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": 32,
        "context_in_dim": 64,
        "hidden_size": 64,
        "mlp_ratio": 2.0,
        "num_heads": 2,
        "depth": 1,
        "depth_single_blocks": 2,
        "axes_dim": [8, 12, 12],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "guidance_embed": True,
        **changes,
    }
    return found | ({"txt_ids_dims": []} if "txt_ids_dims" in fields(FluxParams) else {})


def fields(params):
    return inspect.signature(params).parameters


_FLUX2 = _flux(
    image_model="flux2",
    in_channels=128,
    out_channels=128,
    depth_single_blocks=1,  # its captions have 512 tokens, which take long
    hidden_size=160,  # above the channels: a narrower network could not draw every latent
    num_heads=5,
    vec_in_dim=None,
    axes_dim=[8, 8, 8, 8],
    patch_size=1,
    qkv_bias=False,
    global_modulation=True,
    mlp_silu_act=True,
    ops_bias=False,
    default_ref_method="index",
    ref_index_scale=10.0,
)
_CHROMA = {
    "image_model": "chroma",
    **{name: value for name, value in _flux().items() if name in fields(ChromaParams)},
    **{"in_channels": 64, "out_channels": 64, "in_dim": 64, "out_dim": 64, "hidden_dim": 64, "n_layers": 2},
    **({"vec_in_dim": None} if "vec_in_dim" in fields(ChromaParams) else {}),
}
_LUMINA = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 96,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "axes_dims": [16, 16, 16],
    "axes_lens": [300, 512, 512],
    "cap_feat_dim": 64,
    "qk_norm": True,
    "multiple_of": 32,
    "rope_theta": 10000.0,
    "ffn_dim_multiplier": 1.0,
}
_ZIMAGE = {
    **_LUMINA,
    "dim": 256,
    "axes_dims": [32, 48, 48],
    "n_layers": 1,
    "z_image_modulation": True,
    "time_scale": 1000.0,
}
_AURA = {"cond_seq_dim": 64, "n_layers": 2, "n_double_layers": 1, "n_heads": 2, "dim": 64, "max_seq": 64}
_QWEN = {
    "image_model": "qwen_image",
    "in_channels": 64,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "axes_dims_rope": (8, 12, 12),
}
_HIDREAM = {
    "image_model": "hidream",
    "attention_head_dim": 32,
    "axes_dims_rope": [16, 8, 8],
    "caption_channels": [64, 64],
    "max_resolution": [16, 16],
    "in_channels": 16,
    "llama_layers": [0, 1],
    "num_attention_heads": 2,
    "num_routed_experts": 2,
    "num_activated_experts": 1,
    "num_layers": 1,
    "num_single_layers": 1,
    "out_channels": 16,
    "patch_size": 2,
    "text_emb_dim": 32,
}


def _mask():
    return {"attention_mask": torch.ones(1, 8)}


def _llama():
    return {"conditioning_llama3": torch.randn(1, 2, 8, 64, generator=torch.Generator().manual_seed(7))}


TINY = {
    "sd15": Tiny("SD15", _UNET_1, "SD1.5", channels=4),
    "sd2": Tiny("SD20", {**_UNET_XL, "adm_in_channels": None, "num_classes": None}, "SD2", channels=4),
    "sdxl": Tiny("SDXL", _UNET_XL, "SDXL", pooled=1280, channels=4),
    "sd3": Tiny("SD3", _mmdit(2), "SD3", pooled=2048),
    "sd35m": Tiny("SD3", _mmdit(2, qk_norm="rms", x_block_self_attn_layers=[0]), "SD3.5 Medium", pooled=2048),
    "sd35l": Tiny("SD3", _mmdit(2, qk_norm="rms", x_block_self_attn_layers=[]), "SD3.5 Large", pooled=2048),
    "flux": Tiny("Flux", _flux(), "Flux.1 Dev", pooled=32),
    "schnell": Tiny("FluxSchnell", _flux(guidance_embed=False), "Flux.1 Schnell", pooled=32),
    "flux2": Tiny("Flux2", _FLUX2, "Flux.2", channels=128),
    "chroma": Tiny("Chroma", _CHROMA, "Chroma"),
    "lumina2": Tiny("Lumina2", _LUMINA, "Lumina 2", extra=_mask),
    "zimage": Tiny("ZImage", _ZIMAGE, "Z-Image", extra=_mask),
    "qwen": Tiny("QwenImage", _QWEN, "Qwen-Image", extra=_mask, frames=1),
    "hidream": Tiny("HiDream", _HIDREAM, "HiDream", pooled=32, extra=_llama),
    "generic": Tiny("AuraFlow", _AURA, "AuraFlow", channels=4),
}
"""Every kind of network; "generic" is one that has no row (AuraFlow)."""

_KLEIN = {**_FLUX2, "guidance_embed": False}
SIBLINGS = {
    "ssd1b": Tiny("SSD1B", _UNET_XL, "SSD-1B", pooled=1280, channels=4),
    "vega": Tiny("Segmind_Vega", _UNET_XL, "Segmind Vega", pooled=1280, channels=4),
    "koala700m": Tiny("KOALA_700M", _UNET_XL, "KOALA 700M", pooled=1280, channels=4),
    "koala1b": Tiny("KOALA_1B", _UNET_XL, "KOALA 1B", pooled=1280, channels=4),
    "refiner": Tiny("SDXLRefiner", _UNET_REFINER, "SDXL Refiner", pooled=1280, channels=4),
    "fill": Tiny("FluxInpaint", _flux(in_channels=96), "Flux.1 Fill", pooled=32),
    "klein": Tiny("Flux2", _KLEIN, "Flux.2 Klein", channels=128),
}
"""The rows of families that are one of these networks in other sizes, or with other inputs."""


# State dicts for ComfyUI's own detection

_META = {"device": "meta", "operations": comfy.ops.disable_weight_init, "dtype": torch.float16}
_FILE_UNET = {
    **_META,
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "use_spatial_transformer": True,
    "legacy": False,
}


@dynamic_vram.off()
def _file_xl(*depth):
    return UNetModel(
        **_FILE_UNET,
        use_linear_in_transformer=True,
        adm_in_channels=2816,
        num_classes="sequential",
        context_dim=2048,
        num_head_channels=64,
        num_heads=-1,
        channel_mult=[1],
        transformer_depth_middle=-2,
        num_res_blocks=[len(depth)],
        transformer_depth=list(depth),
        transformer_depth_output=[0] * (len(depth) + 1),
    )


@dynamic_vram.off()
def _file_sd15():
    return UNetModel(
        **_FILE_UNET,
        num_res_blocks=[1],
        channel_mult=[1],
        transformer_depth=[1],
        transformer_depth_output=[0, 0],
        transformer_depth_middle=-2,
        context_dim=768,
        num_heads=8,
        num_head_channels=-1,
    )


@dynamic_vram.off()
def _file_mmdit(depth=1, **extra):
    return OpenAISignatureMMDITWrapper(**_META, **_mmdit(depth, **extra))


@dynamic_vram.off()
def _file_flux(guidance=True):
    sizes = {"hidden_size": 128, "num_heads": 1, "axes_dim": [16, 56, 56], "mlp_ratio": 4.0}
    return Flux(**_META, **_flux(guidance_embed=guidance, **sizes))


FILES = {
    "sd15": (_file_sd15, "SD1.5"),
    "sdxl": (lambda: _file_xl(0, 0, 2, 2, 10, 10), "SDXL"),
    "ssd1b": (lambda: _file_xl(0, 0, 2, 2, 4, 4), "SSD-1B"),
    "vega": (lambda: _file_xl(0, 0, 1, 1, 2, 2), "Segmind Vega"),
    "koala700m": (lambda: _file_xl(0, 2, 5), "KOALA 700M"),
    "koala1b": (lambda: _file_xl(0, 2, 6), "KOALA 1B"),
    "sd3": (_file_mmdit, "SD3"),
    "sd35m": (lambda: _file_mmdit(2, qk_norm="rms", x_block_self_attn_layers=[0]), "SD3.5 Medium"),
    "sd35l": (lambda: _file_mmdit(2, qk_norm="rms", x_block_self_attn_layers=[]), "SD3.5 Large"),
    "flux": (_file_flux, "Flux.1 Dev"),
    "schnell": (lambda: _file_flux(guidance=False), "Flux.1 Schnell"),
}
"""name -> (network on the meta device, expected Family.name)"""


def state_dict(network):
    """A file of this network's names and shapes, in fp16: one number, repeated without memory."""
    return {
        name: torch.full((), 0.01, dtype=torch.float16).expand(t.shape)
        for name, t in network.state_dict().items()
    }
