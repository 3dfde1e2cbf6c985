"""Tiny random CLIPs of ComfyUI's own classes, for the families whose text encoders can be trained."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import comfy.model_management
import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import comfy.text_encoders.sd3_clip as sd3_clip
import torch

from graft.tests.support import dynamic_vram
from graft.tests.support.tiny_models import TINY, fill
from graft.training.config import AdapterConfig, MemoryConfig, OptimizerConfig, TrainConfig

WIDTHS = {"sd15": {"clip_l": 64}, "sdxl": {"clip_l": 24, "clip_g": 40}, "sd35m": {"clip_l": 24, "clip_g": 40}}
ENCODERS = {
    "sd15": (comfy.sd1_clip.SD1ClipModel, comfy.sd1_clip.SD1Tokenizer),
    "sdxl": (comfy.sdxl_clip.SDXLClipModel, comfy.sdxl_clip.SDXLTokenizer),
    "sd35m": (sd3_clip.sd3_clip(t5=False), sd3_clip.SD3Tokenizer),
}


@dynamic_vram.off()
def clip_of(name, seed=5):
    """A CLIP of three layers an encoder."""
    base = json.loads(open(comfy.sd1_clip.__file__.replace(".py", "_config.json")).read())
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    options = {
        f"{encoder}_model_config": {**base, **sizes, "hidden_size": width, "projection_dim": width}
        for encoder, width in WIDTHS[name].items()
    }
    model, tokenizer = ENCODERS[name]
    cpu = torch.device("cpu")
    options |= {"load_device": cpu, "offload_device": cpu, "dtype": torch.float32}
    clip = comfy.sd.CLIP(SimpleNamespace(params={}, clip=model, tokenizer=tokenizer), model_options=options)
    fill(clip.cond_stage_model, seed)
    return clip


CONTEXT = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}}


UNETS = {
    "sd15": {},
    "sdxl": {"adm_in_channels": 40 + 1536},
    "sd35m": {"adm_in_channels": 64, "context_embedder_config": CONTEXT},
}


CONFIG = TrainConfig(
    batch_size=2,
    seed=3,
    adapter=AdapterConfig(rank=4, alpha=4.0, text_encoder=0.5),
    optimizer=OptimizerConfig(lr=1e-2),
    memory=MemoryConfig(dtype="fp32"),
)


def tiny(name):
    return dataclasses.replace(TINY[name], unet={**TINY[name].unet, **UNETS[name]})
