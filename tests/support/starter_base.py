"""Copies of a base that differ from it."""

from __future__ import annotations

import torch

from graft.tests.support.tiny_models import TINY


def with_difference(patcher, *, strength=1.0, seed=0):
    """A clone with a difference on the weight of every layer, as Load LoRA makes it."""
    generator, patched = torch.Generator().manual_seed(seed), patcher.clone()
    weights = {key: w for key, w in patcher.model.state_dict().items() if w.ndim > 1}
    patches = {key: ("diff", (torch.randn(w.shape, generator=generator),)) for key, w in weights.items()}
    patched.add_patches({k: p for k, p in patches.items() if k.startswith("diffusion_model.")}, strength)
    return patched


def patched(strength, kind="attn1_output_patch"):
    """A MODEL with a function in its network, as FreeU makes it."""
    patcher, table = TINY["sd35m"]().clone(), {320: (strength, 0.2)}

    def scale(x, options):
        return x * table[320][0]

    getattr(patcher, f"set_model_{kind}")(scale)
    return patcher
