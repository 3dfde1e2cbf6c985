"""Tiny edit models, and what the stock nodes make of a caption and reference latents."""

from __future__ import annotations

import dataclasses

import torch
from comfy_extras.nodes_edit_model import ReferenceLatent
from comfy_extras.nodes_flux import FluxKontextMultiReferenceLatentMethod

from graft.tests.support.tiny_models import TINY
from graft.tests.support.tiny_others import OTHERS
from graft.training.comfy.model.conditioning import read_conditioning

EDITS = {"flux": TINY["flux"], "flux2": TINY["flux2"], "qwen": TINY["qwen"], "krea2": OTHERS["krea2"]}
METHODS = {"krea2": "index"}
"""Those that see references only by a method."""


def latents(tiny, seed, size=None):
    """Return latents for a tiny model, without batch."""
    frames = [tiny.frames] if tiny.frames else []
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tiny.channels, *frames, *(size or tiny.size), generator=generator)


def stock_conditioning(tiny, index, references, method=""):
    """Return the CONDITIONING of the stock nodes for caption `index` and reference latents."""
    text = {"pooled_output": None, **tiny.conditioning(index)}  # as a CLIP without one gives
    conditioning = [[text.pop("cross_attn"), text]]
    for reference in references:
        conditioning = ReferenceLatent.execute(conditioning, {"samples": reference[None]}).result[0]
    if method:
        conditioning = FluxKontextMultiReferenceLatentMethod.execute(conditioning, method).result[0]
    return conditioning


def edit_batch(name, references, size=None):
    """Return a batch with these lists of reference latents, one a sample."""
    tiny = EDITS[name]
    stock = [
        stock_conditioning(tiny, index, each, METHODS.get(name, "")) for index, each in enumerate(references)
    ]
    batch = tiny.batch(range(len(references)), size)
    return dataclasses.replace(batch, conditioning=[read_conditioning(each) for each in stock])
