"""Tiny edit models, what stock nodes make of a caption and references, and what the sampler makes of that."""

from __future__ import annotations

import dataclasses

import comfy.sample
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


def sampled_arguments(denoiser, conditioning, noise, latent=None):
    """Return what KSampler gives the model for a CONDITIONING."""
    calls, apply_model = [], denoiser.model.apply_model
    denoiser.model.apply_model = lambda x, t, **given: (
        calls.append((x, t, given)) or apply_model(x, t, **given)
    )
    try:
        with torch.inference_mode():
            comfy.sample.sample(
                *(denoiser.patcher, noise, 1, 1.0, "euler", "normal", conditioning, conditioning),
                torch.zeros_like(noise) if latent is None else latent,
                disable_pbar=True,
                seed=0,
            )
    finally:
        del denoiser.model.apply_model
    return calls[0]


def assert_seen(denoiser, batch, sampled):
    """The conditions of a step with this batch are those of the sampler, to the bit."""
    x, _, given = sampled
    [seen] = denoiser.conditions(x.clone(), batch)
    assert seen.keys() == given.keys() - {"transformer_options", "control"}
    for name, condition in seen.items():
        ours, theirs = condition.cond, given[name]
        for one, other in zip(*((value if isinstance(value, list) else [value]) for value in (ours, theirs))):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name
