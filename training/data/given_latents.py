"""Latents and conditionings that the graph made, as an encoded dataset.

They are written into the cache under a key of their content: equal ones are the same run, in any session.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..model import Conditioning, OnProgress, no_progress, tensors_in
from ..user_error import UserError
from .batch import EncodedDataset
from .conditioning import pack
from .config import DatasetConfig
from .encoding import DTYPES, cache_key
from .index import NO_KEY, IndexBuilder, SourceRules
from .samples import ImageSet, Sample, SampleTable, Source
from .store import Store


@dataclass(frozen=True)
class GivenSample:
    """What is trained of one sample."""

    name: str
    latents: Tensor
    """(C, ..., H, W) or (C, length) float32, as the VAE made them."""
    conditioning: Conditioning
    caption: str | None = None
    mask: Tensor | None = None
    """(H, W) loss weights in 0..1 at the latents' resolution."""


def from_latents(
    samples: Sequence[GivenSample],
    cache_dir: str | os.PathLike[str],
    config: DatasetConfig | None = None,
    *,
    dropped: Conditioning | None = None,
    on_progress: OnProgress = no_progress,
) -> EncodedDataset:
    """Return the dataset of these samples. `on_progress` may raise to cancel.

    `dropped` is the conditioning of the empty caption: what it has replaces that of a sample whose caption is
    dropped or preserved, and the rest, such as references, stays. Raises UserError for latents or masks that
    cannot be trained, each by its name, and if captions are to be dropped without it.
    """
    config, store = config or DatasetConfig(), Store(cache_dir)
    _require_usable(samples, config, dropped)
    rules = SourceRules(config.weight, config.mask.outside, config.caption.dropout, NO_KEY)
    builder, table = IndexBuilder([rules]), SampleTable()
    for position, sample in enumerate(samples):
        on_progress(position, len(samples), "Storing latents")
        latents = _write(store, "latents", {"latents": sample.latents.to(DTYPES[config.dtype])})
        text = _write(store, "text", pack(sample.conditioning, DTYPES[config.dtype]))
        empty = NO_KEY
        if dropped is not None:
            empty = _write(store, "text", pack({**sample.conditioning, **dropped}, DTYPES[config.dtype]))
        mask = NO_KEY
        if sample.mask is not None:
            mask = _write(store, "masks", {"mask": (sample.mask * 255).round().to(torch.uint8)})
        size = tuple(reversed(sample.latents.shape[1:]))
        builder.add_sample((size[0], size[1] if size[1:] else 1), 0, latents, [text], empty=empty)
        builder.add_entry(position, size, config.repeats, [latents], [mask], [(0, 0)])
        caption = (sample.caption or "",)
        table.append(Sample(sample.name, size[0], size[1] if size[1:] else 1, caption, config.repeats))
    is_captioned = all(sample.caption is not None for sample in samples)
    source = Source(config, is_encoded=True, is_captioned=is_captioned)
    entries = np.arange(len(samples), dtype=np.int32)
    return EncodedDataset(builder.build(), store, ImageSet(table, (source,)), entries=entries)


def _write(store: Store, kind: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Write an entry under a key of its content, if the store lacks it; return the key."""
    state = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        state.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        state.update(
            tensor.contiguous().view(torch.uint8).numpy().data if tensor.ndim else repr(tensor).encode()
        )
    key = cache_key("given", kind, state.hexdigest())
    if not store.has(kind, key):
        store.write(kind, key, tensors)
    return key


def _require_usable(
    samples: Sequence[GivenSample], config: DatasetConfig, dropped: Conditioning | None
) -> None:
    if not samples:
        raise UserError("latents: the list is empty; connect at least one LATENT.")
    if config.caption.dropout and dropped is None:
        raise UserError(
            f"caption_dropout {config.caption.dropout:g}: what a dropped caption is replaced by is missing; "
            "connect the CONDITIONING of an empty text, or set caption_dropout to 0."
        )
    bad = [
        f"  {sample.name}: {reason}"
        for sample in samples
        if (reason := _unusable(sample, samples[0], config))
    ]
    if bad:
        raise UserError("\n".join(["these samples cannot be trained:", *bad[:100]]))


def _unusable(sample: GivenSample, first: GivenSample, config: DatasetConfig) -> str:
    """Return why a sample cannot be trained, "" if it can."""
    shape = tuple(sample.latents.shape)
    if len(shape) not in (2, 3, 4) or not sample.latents.numel():
        return f"its latents are {shape}; (channels, height, width) is one image."
    if len(shape) != first.latents.ndim or shape[0] != first.latents.shape[0]:
        return (
            f"its latents are {shape} and those of {first.name} {tuple(first.latents.shape)}: of another "
            "VAE. Encode all with the VAE that belongs to the model."
        )
    if not torch.isfinite(sample.latents).all():
        return "its latents have NaN or infinite values; check the node that made them."
    if not all(torch.isfinite(tensor).all() for tensor in tensors_in(sample.conditioning)):
        return "its conditioning has NaN or infinite values; check the node that made it."
    if sample.mask is not None and not sample.mask.any() and not config.mask.outside:
        return "its mask is black, so nothing would be learned from it."
    return ""
