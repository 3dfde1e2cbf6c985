"""A tiny SD3 checkpoint of ComfyUI's own classes, and noise to train it on."""

from __future__ import annotations

import comfy.lora
import comfy.model_management
import comfy.ops
import comfy.sd
import torch
from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

from graft.tests.support import dynamic_vram
from graft.training.model import Batch


@dynamic_vram.off()
def sd3_state_dict(depth=2):
    network = OpenAISignatureMMDITWrapper(
        in_channels=16,
        out_channels=16,
        patch_size=2,
        depth=depth,
        input_size=None,
        adm_in_channels=2048,
        context_embedder_config={
            "target": "torch.nn.Linear",
            "params": {"in_features": 4096, "out_features": 64 * depth},
        },
        num_patches=64,
        pos_embed_max_size=8,
        pos_embed_scaling_factor=None,
        qk_norm="rms",
        x_block_self_attn_layers=[0],
        device="meta",
        dtype=torch.float32,
        operations=comfy.ops.disable_weight_init,
    )
    generator = torch.Generator().manual_seed(0)
    return {k: torch.randn(v.shape, generator=generator) * 0.05 for k, v in network.state_dict().items()}


class Noise:
    """Two samples of noise with random conditioning."""

    fingerprint = "noise"

    def batch(self, size, *, seed, index):
        g = torch.Generator().manual_seed(index % 2)
        condition = {
            "cross_attn": torch.randn(1, 9, 4096, generator=g),
            "pooled_output": torch.randn(1, 2048, generator=g),
        }
        return Batch(torch.randn(size, 16, 8, 8, generator=g), [condition] * size)
