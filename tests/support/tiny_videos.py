"""Tiny VAEs of video and sound through ComfyUI's own loader, and models that take a clip's first frame."""

from __future__ import annotations

import atexit
import json
from contextlib import nullcontext
from functools import cache, partial
from unittest.mock import patch

import comfy.ldm.ace.vae.music_dcae_pipeline as ace
import comfy.ldm.hunyuan_video.vae_refiner as refiner
import comfy.ldm.lightricks.vae.causal_video_autoencoder as ltx
import comfy.ldm.wan.vae as wan
import comfy.ldm.wan.vae2_2 as wan22
import comfy.sd
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL

from graft.tests.support import dynamic_vram
from graft.tests.support.tiny_models import Tiny, fill
from graft.tests.support.tiny_others import _WAN, OTHERS

_LTX = {
    "_class_name": "CausalVideoAutoencoder",
    "dims": 3,
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 128,
    "encoder_blocks": [
        ["res_x", {"num_layers": 1}],
        ["compress_all", {}],
        ["compress_all", {}],
        ["compress_all", {}],
        ["res_x", {"num_layers": 1}],
    ],
    "decoder_blocks": [
        ["res_x", {"num_layers": 1, "inject_noise": False}],
        ["compress_all", {"residual": False}],
        ["compress_all", {"residual": False}],
        ["compress_all", {"residual": False}],
        ["res_x", {"num_layers": 1, "inject_noise": False}],
    ],
    "encoder_base_channels": 8,
    "decoder_base_channels": 8,
    "scaling_factor": 1.0,
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
    "use_quant_conv": False,
    "causal_decoder": False,
}
_WAN_VAE = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "attn_scales": []}
_WAN_VAE |= {"temperal_downsample": [False, True, True], "dropout": 0.0}
_HUNYUAN_VAE = {
    "block_out_channels": [64] * 5,
    "in_channels": 3,
    "out_channels": 3,
    "num_res_blocks": 1,
    "ffactor_spatial": 16,
    "ffactor_temporal": 4,
    "z_channels": 32,
}

_ACE_VAE = (
    {
        **{f"{side}_block_out_channels": (8, 8, 16, 32) for side in ("encoder", "decoder")},
        **{f"{side}_layers_per_block": (1, 1, 1, 1) for side in ("encoder", "decoder")},
        "attention_head_dim": 8,
    },
    {"depths": [1] * 4, "dims": [16] * 4, "num_mels": 16, "upsample_initial_channel": 256},
)
"""Of a mel spectrogram's autoencoder, and of what makes samples of it."""


def _smaller(kind, **sizes):
    """Return a class in place of `kind` with these sizes, whatever else it is asked for."""
    return lambda **options: kind(**{**options, **sizes})


def _load(network, building=nullcontext, metadata=None):
    """Return a VAE as ComfyUI loads the file of a network with random weights."""
    fill(network, 0)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    positive = ("std-of-means", "running_var")
    state |= {name: torch.ones_like(tensor) for name, tensor in state.items() if name.endswith(positive)}
    with dynamic_vram.off(), building():
        return comfy.sd.VAE(sd=state, metadata=metadata, device=torch.device("cpu"), dtype=torch.float32)


@cache
def wan_vae():
    """Wan 2.1's: 4 frames and 8 x 8 pixels a cell, 16 channels."""
    building = partial(patch.object, wan, "WanVAE", _smaller(wan.WanVAE, num_res_blocks=1))
    return _load(wan.WanVAE(dim=8, z_dim=16, **_WAN_VAE), building)


@cache
def wan22_vae():
    """Wan 2.2's, of its 5B model: 4 frames and 16 x 16 pixels a cell, 48 channels."""
    small = {"dim": 8, "dec_dim": 8, "num_res_blocks": 1}
    building = partial(patch.object, wan22, "WanVAE", _smaller(wan22.WanVAE, **small))
    return _load(wan22.WanVAE(z_dim=48, **_WAN_VAE, dim=8, dec_dim=8), building)


@cache
def ltx_vae():
    """LTX-Video's: 8 frames and 32 x 32 pixels a cell, 128 channels."""
    return _load(ltx.VideoVAE(config=_LTX), metadata={"config": json.dumps({"vae": _LTX})})


@cache
def hunyuan_vae():
    """HunyuanVideo 1.5's: 4 frames and 16 x 16 pixels a cell, 32 channels."""
    encoder, decoder = (_smaller(kind, **_HUNYUAN_VAE) for kind in (refiner.Encoder, refiner.Decoder))
    network = torch.nn.ModuleDict({"encoder": encoder(), "decoder": decoder()})
    return _load(network, lambda: patch.multiple(refiner, Encoder=encoder, Decoder=decoder))


@cache
def flux2_vae():
    """Flux.2's: 16 x 16 pixels a cell, 128 channels."""
    small = {"ch": 32, "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1}

    def build(ddconfig, embed_dim, **_):
        return AutoencoderKL(ddconfig={**ddconfig, **small}, embed_dim=embed_dim)

    config = {"double_z": True, "z_channels": 32, "resolution": 256, "in_channels": 3, "out_ch": 3}
    config |= {"attn_resolutions": [], "dropout": 0.0, "batch_norm_latent": True}
    return _load(build(config, 32), lambda: patch.object(comfy.sd, "AutoencoderKL", build))


@cache
def oobleck_vae():
    """Stable Audio's: 2048 samples a cell, 64 channels."""
    small = _smaller(comfy.sd.AudioOobleckVAE, channels=4)
    return _load(small(), lambda: patch.object(comfy.sd, "AudioOobleckVAE", small))


@cache
def ace_vae():
    """ACE-Step's: 4096 samples and 8 mel bands a cell, 8 channels."""
    made = ace.MusicDCAE.__init__
    return _load(
        ace.MusicDCAE(44100, *_ACE_VAE), lambda: patch.object(made, "__defaults__", (None, *_ACE_VAE))
    )


for vae in (wan_vae, wan22_vae, ltx_vae, hunyuan_vae, flux2_vae, oobleck_vae, ace_vae):
    atexit.register(vae.cache_clear)  # while ComfyUI is still there to unload them

WAN_I2V = Tiny("WAN21_T2V", {**_WAN, "in_dim": 36}, "WAN22_I2V", frames=3)
"""An expert of Wan 2.2 for image to video."""
FIRST_FRAMES = {
    "wan_i2v": (WAN_I2V, wan_vae),
    "wan21_i2v": (OTHERS["wan_i2v"], wan_vae),
    "wan_5b": (OTHERS["wan_5b"], wan22_vae),
    "ltxv": (OTHERS["ltxv"], ltx_vae),
    "hunyuan_15": (OTHERS["hunyuan_15"], hunyuan_vae),
}
"""Models that take a clip's first frame, with their VAEs."""


class Patcher:
    patches: dict = {}

    def is_clone(self, other):
        return False


class Clip:
    """A CLIP whose texts are those of a tiny model."""

    layer_idx, patcher = None, Patcher()
    tokenizer, cond_stage_model = None, torch.nn.Linear(1, 1)

    def __init__(self, tiny):
        self.tiny, self.asked = tiny, []

    def tokenize(self, text, **options):
        self.asked.append((text, options))
        return text

    def encode_from_tokens_scheduled(self, text):
        options = self.tiny.conditioning(0)
        return [[options.pop("cross_attn"), {"pooled_output": None, **options}]]
