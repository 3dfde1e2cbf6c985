"""The encoding of a set of images, once: all images with the VAE, then all captions with the text encoders.

The one rule: a cache key covers everything that changes the tensor and nothing else. So an edit encodes again
only what it must, and runs with the same cache folder share the work. VAE and text encoders are never needed
at the same time, images are read a few ahead of the VAE, and a killed run goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..log import log
from ..model import Conditioning, Encoder, OnProgress, no_progress, tensors_in
from ..user_error import UserError
from .bad_files import Skipped, bad_files_error
from .batch import EncodedDataset
from .caption import preserved_texts
from .conditioning import pack
from .config import DatasetConfig
from .encoding import DTYPES, Encoding, References
from .hashes import ContentHashes, file_digest
from .image_file import BadImage
from .index import NO_KEY, Index, IndexBuilder, SourceRules, mirror_key
from .load_views import load_views, views_of
from .open_sample import (
    content_of,
    open_references,
    reference_contents,
)
from .read_ahead import load_ahead
from .samples import ImageSet, Sample
from .store import Store

NOTHING: Conditioning = {}


def encode(
    images: ImageSet,
    encoder: Encoder,
    cache_dir: str | os.PathLike[str],
    *,
    recache: bool = False,
    on_progress: OnProgress = no_progress,
) -> EncodedDataset:
    """Encode what the cache lacks and return the dataset. `on_progress` may raise to cancel.

    `recache` encodes everything again. Raises UserError if the cache folder cannot be written to, and one
    that names every unusable image, unless its source allows skipping; then it is in `skipped`.
    """
    work = Encoding(images, encoder, Store(cache_dir), recache)
    with torch.no_grad():
        index, unseen, unread, bad = _plan(work, on_progress)
        total = len(unseen) + len(unread)
        for position, error in _encode_images(
            work, index, unseen, lambda done: on_progress(done, total, "Encoding images")
        ):
            if error:
                bad[position] = error
                log.warning("%s: %s", images.samples.names[position], error)
        _require_usable(images, bad)
        for done, position in enumerate(unread, len(unseen) + 1):
            sample = images.samples[position]
            if position not in bad:
                _encode_texts(work, sample)
            on_progress(done, total, "Encoding captions")
        for config in {source.config for source in images.sources}:
            _encode_text(work, "", config)  # for caption dropout and preservation
        for text in images.words.texts if images.words else ():
            _encode_text(work, text, images.sources[0].config)
    skipped = [
        *images.skipped,
        *(Skipped(images.samples.names[position], reason) for position, reason in bad.items()),
    ]
    left_out = set(bad)
    if images.pairs:  # an image goes with its other end, which is no entry of its own
        left_out |= {position - images.pairs for position in bad}
        left_out |= set(range(images.pairs, 2 * images.pairs))
    usable = np.flatnonzero(~np.isin(index.sample, list(left_out))).astype(np.int32)
    return EncodedDataset(index, work.store, images, entries=usable, skipped=skipped)


def _plan(work: Encoding, on_progress: OnProgress) -> tuple[Index, list[int], list[int], dict[int, str]]:
    """Give every view and text its key, and find what is not in the cache.

    Returns the index; the samples with a view or mask to encode; those with a text to encode; and the
    unusable ones with the reason.
    """
    samples, sources = work.images.samples, work.images.sources
    # What all samples of a source share, the key of its empty caption included.
    configs = [source.config for source in sources]
    empty = [work.text_key("", c) for c in configs]
    rules = [
        SourceRules(
            c.weight, c.mask.outside, c.caption.dropout, e, c.reference_dropout, work.first_frame_share(c)
        )
        for c, e in zip(configs, empty, strict=True)
    ]
    words = work.images.words
    slider = [work.text_key(text, configs[0]) for text in (words.texts if words else ())]
    builder = IndexBuilder(rules, slider=slider)
    unseen, unread, bad = [], [], {}
    with ContentHashes(work.store.folder) as hashes:
        for position, sample in enumerate(samples):
            check = partial(on_progress, position, len(samples), "Checking the cache")
            check()
            source, size = sources[sample.source], (sample.width, sample.height)
            pairs = preserved_texts(sample.captions, source.config, check)
            swapped = [] if source.config.regularisation else pairs.values()
            preserved = [work.text_key(text, source.config) if text else NO_KEY for text in swapped]
            # Views follow from the content's digest, which is remembered: no unchanged file is opened.
            content, buckets = bytes(16), []
            references: References = []
            try:
                references = reference_contents(source, sample, partial(hashes.of, check=check), work.step)
                content, mask = content_of(source, sample, partial(hashes.of, check=check))
                buckets = views_of(work, source, sample, content[:8].hex())
            except UserError as error:  # BadImage, or no bucket for this size
                bad[position] = str(error)
            # Unusable images are indexed too, without entries, so that positions match the ImageSet.
            texts, bare, own_empty = work.keys_of(list(pairs), references, source.config)
            mirrors = bool(references) and source.config.augment.flip
            mirrored = [mirror_key(key) for key in (*texts, own_empty) if mirrors and key != NO_KEY]
            keys = (*texts, *mirrored, *bare, *preserved, own_empty)
            builder.add_sample(
                size, sample.source, content, texts, bare=bare, empty=own_empty, preserved=preserved
            )
            missing, frames = False, work.frames(sample)
            if sample.is_sound and position not in bad:
                key, piece = (
                    work.sound_key(sample, content, source.config),
                    round(1000 * source.config.seconds),
                )
                builder.add_entry(position, (piece,), sample.repeats, [key], [NO_KEY], [(0, 0)])
                missing = work.lacks("latents", key)
            for views in buckets:
                latent_keys = [work.latent_key(v, sample, content, mask, source.config) for v in views]
                mask_keys = [work.mask_key(view, sample, mask) for view in views]
                offsets = [view.offset(*size) for view in views]
                bucket = (*views[0].crop.bucket, *([frames] if frames > 1 else []))
                builder.add_entry(position, bucket, sample.repeats, latent_keys, mask_keys, offsets)
                missing = missing or any(work.lacks("latents", key) for key in latent_keys)
                missing = missing or any(work.lacks("masks", key) for key in mask_keys)
            # One missing view is enough to open the image; `load_views` skips those that are there.
            if missing:
                unseen.append(position)
            if any(work.lacks("text", key) for key in keys if key not in empty):
                unread.append(position)
    return builder.build(), unseen, unread, bad


def _encode_images(
    work: Encoding, index: Index, positions: Sequence[int], report: Callable[[int], None]
) -> Iterator[tuple[int, str]]:
    """Encode the missing views of the samples; yield each position with "" or the reason it is unusable."""
    for position, loaded in zip(
        positions, load_ahead(partial(load_views, work, index), positions, report), strict=True
    ):
        if isinstance(loaded, str):
            yield position, loaded
            continue
        sample = work.images.samples[position]
        for item in loaded:
            if item.mask is not None and work.lacks("masks", item.mask_key):
                work.write("masks", item.mask_key, {"mask": item.mask})
            latents, given = item.latents, NOTHING
            if item.sound is not None and work.lacks("latents", item.latent_key):
                latents = work.encoder.encode_sound(*item.sound)[0].float()
                _require_finite(latents, sample)
            if item.pixels is not None and work.lacks("latents", item.latent_key):
                latents, given = _encode_pixels(work, item.pixels, sample)
                if item.hole is not None:
                    given = work.encoder.encode_masked(item.pixels[None], item.hole[None])
            if latents is not None:
                dtype = DTYPES[work.images.source(sample).config.dtype]
                work.write("latents", item.latent_key, {"latents": latents.to(dtype), **pack(given, dtype)})
        yield position, ""


def _encode_pixels(work: Encoding, pixels: Tensor, sample: Sample) -> tuple[Tensor, Conditioning]:
    """Return the latents of an image or clip, and what of it the model is given."""
    given = NOTHING
    if pixels.ndim == 4:  # a clip; most wait for the VAE in 8 bits
        frames = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
        latents = work.encoder.encode_clip(frames)[0].float()
        given = work.encoder.encode_first_frame(frames) if work.gives_first_frame(sample) else NOTHING
    else:
        latents = work.encoder.encode_image(pixels[None])[0].float()
    height, width = (side // work.reduction for side in pixels.shape[-3:-1])
    assert latents.shape[-2:] == (height, width), (
        f"latents {tuple(latents.shape)}, expected (..., {height}, {width})"
    )
    _require_finite(latents, sample)
    return latents, given


def _require_finite(latents: Tensor, sample: Sample) -> None:
    if not torch.isfinite(latents).all():
        raise UserError(
            f"{sample.name}: the VAE returned NaN or infinite values. Half precision is too coarse for some "
            "VAEs: start ComfyUI with --fp32-vae or --bf16-vae, or load another VAE."
        )


def _encode_texts(work: Encoding, sample: Sample) -> None:
    """Encode what the cache lacks of a sample's texts, with its references and without."""
    source = work.images.source(sample)
    config, pairs = source.config, preserved_texts(sample.captions, source.config)
    with _named(sample):
        references = reference_contents(source, sample, file_digest, work.step)
        pixels = open_references(source, sample, work.step)
    for text in (*pairs, "") if references and config.caption.dropout else pairs:
        _encode_text(work, text, config, references, pixels)
        if references and config.augment.flip:
            _encode_text(work, text, config, references, [each.flip(2) for each in pixels], mirrored=True)
    bare = pairs if references and config.reference_dropout else ()
    for text in (*pairs.values(), *bare):
        _encode_text(work, text, config)


@contextmanager
def _named(sample: Sample) -> Iterator[None]:
    try:
        yield
    except BadImage as error:
        raise UserError(f"{sample.name}: {error}.") from error


def _encode_text(
    work: Encoding,
    text: str,
    config: DatasetConfig,
    references: References = (),
    pixels: Sequence[Tensor] = (),
    *,
    mirrored: bool = False,
) -> None:
    key = work.edit_key(text, references, config)
    key = mirror_key(key) if mirrored else key
    if not work.lacks("text", key):
        return
    encoder = work.encoder
    conditioning = encoder.encode_edit(text, pixels) if references else encoder.encode_text(text)
    if not all(torch.isfinite(tensor).all() for tensor in tensors_in(conditioning)):
        raise UserError(
            f"the text encoder returned NaN or infinite values for the caption {text!r}; load an "
            "fp16 file instead of fp8, or start ComfyUI with --fp32-text-enc."
        )
    work.write("text", key, pack(conditioning, DTYPES[config.dtype]))


def _require_usable(images: ImageSet, bad: Mapping[int, str]) -> None:
    unusable = [(images.samples[position], reason) for position, reason in bad.items()]
    fatal = [Skipped(s.name, reason) for s, reason in unusable if not images.source(s).config.skip_bad]
    if fatal or len(bad) == len(images.samples):
        listed = fatal or [Skipped(sample.name, reason) for sample, reason in unusable]
        titles = ", ".join(source.title for source in images.sources)
        raise bad_files_error(listed, titles, len(images.samples) - len(bad))
