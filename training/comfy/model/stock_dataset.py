"""Stock LATENT and CONDITIONING lists as samples, from MakeTrainingDataset, LoadTrainingDataset,
ResolutionBucket or any node.

A LATENT is a batch. Its CONDITIONING has one entry for all of it, or, from ResolutionBucket, one for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import comfy.utils
import torch
from torch import Tensor

from ...data.given_latents import GivenSample
from ...model import Conditioning
from ...user_error import UserError
from .conditioning import PACKED, read_conditioning

ADVICE = "connect what VAE Encode, Make Training Dataset or Load Training Dataset gives out."


def read_samples(
    latents: Sequence[Any],
    conditioning: Sequence[Any],
    captions: Sequence[str] = (),
    masks: Sequence[Tensor] = (),
) -> list[GivenSample]:
    """Return every latent of the lists with its conditioning, caption and mask.

    `conditioning` has one CONDITIONING for each LATENT or one for all; `captions` and `masks` (B, H, W) one
    for each sample or one for all. A LATENT's own mask counts where `masks` is empty. Raises UserError that
    says which entry is not what it should be, or which list is of another length.
    """
    packed = [_samples_of(latent, f"latents, entry {index}") for index, latent in enumerate(latents)]
    batches, shapes = [batch for batch, _ in packed], [shape for _, shape in packed]
    conditioning = _one_each(conditioning, len(batches), "conditioning", "latents")
    tensors: list[Tensor] = []
    given: list[Conditioning] = []
    own_masks: list[Tensor | None] = []
    for index, (batch, entries, latent) in enumerate(zip(batches, conditioning, latents, strict=True)):
        where = f"conditioning, entry {index}"
        tensors += batch.unbind(0)
        given += [{**each, **shapes[index]} for each in _split(entries, len(batch), where)]
        own_masks += _masks_of(latent, batch, f"latents, entry {index}")
    texts: Sequence[str | None] = _one_each(captions, len(tensors), "captions", "samples") or [None] * len(
        tensors
    )
    if masks:
        if any(mask is not None for mask in own_masks):
            raise UserError(
                "masks: these latents have masks of their own (noise_mask); connect one of the two."
            )
        flat = [mask for batch in masks for mask in _reshaped(batch).unbind(0)]
        pairs = zip(_one_each(flat, len(tensors), "masks", "samples"), tensors, strict=True)
        own_masks = [_at_latents(mask[None], tensor[None], "masks")[0] for mask, tensor in pairs]
    return [
        GivenSample(f"latent-{index}", tensor, values, text, mask)
        for index, (tensor, values, text, mask) in enumerate(
            zip(tensors, given, texts, own_masks, strict=True)
        )
    ]


def _samples_of(latent: Any, where: str) -> tuple[Tensor, Conditioning]:
    """Return the tensor of a LATENT, (B, C, ...) float32 on the CPU, and {}.

    Video with sound becomes (B, 1, N), as samplers pack it, and its shapes are what the model is told.
    """
    samples, shapes = latent.get("samples") if isinstance(latent, Mapping) else None, {}
    if samples is not None and getattr(samples, "is_nested", False):
        samples, parts = comfy.utils.pack_latents(samples.unbind())
        shapes = {PACKED: [[1, *part[1:]] for part in parts]}
    if not isinstance(samples, Tensor) or samples.ndim < 3 or not samples.is_floating_point():
        found = (
            f"a LATENT of {tuple(samples.shape)}"
            if isinstance(samples, Tensor)
            else f"a {type(latent).__name__}"
        )
        raise UserError(f"{where}: {found}, which is no batch of latents; {ADVICE}")
    return samples.detach().to("cpu", torch.float32), shapes


def _split(entries: Any, count: int, where: str) -> list[Conditioning]:
    """Return the conditioning of each of `count` samples."""
    if count > 1 and isinstance(entries, Sequence) and len(entries) == count:  # ResolutionBucket's form
        return [read_conditioning([entry], f"{where}, sample {index}") for index, entry in enumerate(entries)]
    return [read_conditioning(entries, where)] * count


def _masks_of(latent: Mapping[str, Any], batch: Tensor, where: str) -> list[Tensor | None]:
    """Return a mask (H, W) for each sample of a LATENT, or None for each."""
    mask = latent.get("noise_mask")
    if mask is None:
        return [None] * len(batch)
    return [*_at_latents(mask, batch, where)]


def _at_latents(mask: Tensor, batch: Tensor, where: str) -> Tensor:
    """Return masks at the resolution of a batch's latents, (B, H, W), as sampling resizes them."""
    if batch.ndim < 4:
        raise UserError(f"{where}: latents without height and width have no mask; disconnect it.")
    resized: Tensor = comfy.utils.reshape_mask(mask.detach().to("cpu", torch.float32), batch.shape)[:, 0]
    if resized.ndim == 4:  # of video
        if not (resized == resized[:, :1]).all():
            raise UserError(
                f"{where}: its mask changes from frame to frame; only one for all can be trained."
            )
        resized = resized[:, 0]
    return resized.clamp(0, 1)


def _reshaped(mask: Tensor) -> Tensor:
    """Return a MASK as (B, H, W)."""
    return mask.reshape(-1, *mask.shape[-2:])


def _one_each(values: Sequence[Any], count: int, what: str, of: str) -> list[Any]:
    if len(values) not in (0, 1, count) or (not values and what == "conditioning"):
        raise UserError(f"{what}: {len(values)} for {count} {of}; give one for each, or one for all.")
    return [*values] * (count if len(values) == 1 else 1)
