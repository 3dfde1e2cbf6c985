"""The encoding of a set of images, once: all images with the VAE, then all captions with the text encoders.

The one rule: a cache key covers everything that changes the tensor and nothing else. So an edit encodes again
only what it must, and runs with the same cache folder share the work. VAE and text encoders are never needed
at the same time, images are read a few ahead of the VAE, and a killed run goes on where it was.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from ..log import log
from ..model import Conditioning, Encoder, OnProgress, no_progress, tensors_in
from ..user_error import UserError
from .augment import View, render, views_for
from .batch import EncodedDataset
from .bucket import Crop, Size
from .caption import preserved_texts
from .conditioning import pack
from .config import DatasetConfig
from .hashes import ContentHashes
from .image import crop_mask
from .image_file import BadImage
from .index import KEY_BYTES, NO_KEY, Index, IndexBuilder, SourceRules
from .latent_file import architecture_of
from .open_sample import content_of, mask_file, open_clip, open_latents, open_sample, open_sound
from .read_ahead import load_ahead
from .samples import ImageSet, Sample, Skipped, Source, bad_files_error
from .store import Store

VERSION = 1
"""Part of every key; raised whenever encoded tensors change. A part that is new to keys is left out of
them at its default."""
NOTHING: Conditioning = {}
SOUND = View(Crop((0, 0), (0.0, 0.0, 0.0, 0.0)))
"""What stands for the view of a sound, which has none."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


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
    work = _Work(images, encoder, Store(cache_dir), recache)
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
            config = images.source(sample).config
            for pair in preserved_texts(sample.captions, config).items() if position not in bad else ():
                for text in pair:
                    _encode_text(work, text, config)
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


class _Work:
    """One encoding: its images, encoder and store, and their keys."""

    def __init__(self, images: ImageSet, encoder: Encoder, store: Store, recache: bool) -> None:
        self.images, self.encoder, self.store, self.recache = images, encoder, store, recache
        self.image_fingerprint, self.text_fingerprint = encoder.image_fingerprint, encoder.text_fingerprint
        self.step, self.reduction = encoder.bucket_step, encoder.reduction
        self._written: set[tuple[str, bytes]] = set()

    def lacks(self, kind: str, key: bytes) -> bool:
        """Return whether an entry must be encoded."""
        if key == NO_KEY:
            return False
        return (self.recache and (kind, key) not in self._written) or not self.store.has(kind, key)

    def write(self, kind: str, key: bytes, tensors: Mapping[str, Tensor]) -> None:
        self.store.write(kind, key, tensors)
        if self.recache:
            self._written.add((kind, key))

    def frames(self, sample: Sample) -> int:
        """Return the number of frames of a clip that the VAE takes; 0 for an image."""
        return self.encoder.clip_frames(sample.frames) if sample.frames else 0

    def first_frame_share(self, config: DatasetConfig) -> float:
        """Return the share of clips to give the first frame of, among those that have it in the cache."""
        always = not config.frames or not self.encoder.first_frame or self.encoder.needs_first_frame
        return 1.0 if always else config.first_frame or 1.0

    def text_key(self, text: str, config: DatasetConfig) -> bytes:
        return cache_key("text", self.text_fingerprint, text, config.dtype)

    def latent_key(self, view: View, sample: Sample, content: bytes, config: DatasetConfig) -> bytes:
        if sample.encoded:
            read_as = architecture_of(sample.name)  # decides how the file's numbers are scaled
        else:
            read_as = config.background.lower() if sample.has_alpha else ""
        return cache_key(
            "latents",
            self.image_fingerprint,
            content.hex(),
            *_geometry(view),
            view.jitter,
            read_as,
            config.dtype,
            *self._clip_parts(sample, config),
        )

    def sound_key(self, sample: Sample, content: bytes, config: DatasetConfig) -> bytes:
        piece = (sample.start, config.seconds)
        return cache_key("sound", self.image_fingerprint, content.hex(), *piece, config.dtype)

    def _clip_parts(self, sample: Sample, config: DatasetConfig) -> tuple[object, ...]:
        """Return what a clip's key has beside an image's: which of its frames."""
        frames = self.frames(sample)
        given = [self.encoder.first_frame] if self.gives_first_frame(sample) else []
        return ("clip", frames, sample.start, config.fps, config.clips, *given) if frames else ()

    def gives_first_frame(self, sample: Sample) -> bool:
        """Return whether a clip is trained, always or at times, with its first frame given."""
        asked = self.encoder.needs_first_frame or self.images.source(sample).config.first_frame
        return bool(asked and self.encoder.first_frame and self.frames(sample) > 1)

    def mask_key(self, view: View, sample: Sample, content: bytes) -> bytes:
        size = (sample.width, sample.height)
        return cache_key("mask", self.reduction, content.hex(), *_geometry(view), size) if content else NO_KEY


def _plan(work: _Work, on_progress: OnProgress) -> tuple[Index, list[int], list[int], dict[int, str]]:
    """Give every view and text its key, and find what is not in the cache.

    Returns the index; the samples with a view or mask to encode; those with a text to encode; and the
    unusable ones with the reason.
    """
    samples, sources = work.images.samples, work.images.sources
    # What all samples of a source share, the key of its empty caption included.
    configs = [source.config for source in sources]
    empty = [work.text_key("", c) for c in configs]
    rules = [
        SourceRules(c.weight, c.mask.outside, c.caption.dropout, e, 0.0, work.first_frame_share(c))
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
            # Texts first: they need no file, so an unusable image is still indexed with its texts.
            source, size = sources[sample.source], (sample.width, sample.height)
            pairs = preserved_texts(sample.captions, source.config, check)
            texts = [work.text_key(text, source.config) for text in pairs]
            swapped = [] if source.config.regularisation else pairs.values()
            preserved = [work.text_key(text, source.config) if text else NO_KEY for text in swapped]
            # Views follow from the content's digest, which is remembered: no unchanged file is opened.
            content, buckets = bytes(16), []
            try:
                content, mask = content_of(source, sample, partial(hashes.of, check=check))
                buckets = _views(work, source, sample, content[:8].hex())
            except UserError as error:  # BadImage, or no bucket for this size
                bad[position] = str(error)
            # Unusable images are indexed too, without entries, so that positions match the ImageSet.
            builder.add_sample(size, sample.source, content, texts, preserved=preserved)
            missing, frames = False, work.frames(sample)
            if sample.is_sound and position not in bad:
                key, piece = (
                    work.sound_key(sample, content, source.config),
                    round(1000 * source.config.seconds),
                )
                builder.add_entry(position, (piece,), sample.repeats, [key], [NO_KEY], [(0, 0)])
                missing = work.lacks("latents", key)
            for views in buckets:
                latent_keys = [work.latent_key(view, sample, content, source.config) for view in views]
                mask_keys = [work.mask_key(view, sample, mask) for view in views]
                offsets = [view.offset(*size) for view in views]
                bucket = (*views[0].crop.bucket, *([frames] if frames > 1 else []))
                builder.add_entry(position, bucket, sample.repeats, latent_keys, mask_keys, offsets)
                missing = missing or any(work.lacks("latents", key) for key in latent_keys)
                missing = missing or any(work.lacks("masks", key) for key in mask_keys)
            # One missing view is enough to open the image; `_load` skips those that are there.
            if missing:
                unseen.append(position)
            if any(work.lacks("text", key) for key in (*texts, *preserved) if key not in empty):
                unread.append(position)
    return builder.build(), unseen, unread, bad


def _views(work: _Work, source: Source, sample: Sample, content: str) -> list[list[View]]:
    """Return the views of an image or clip at each of its resolutions; none of a sound."""
    if sample.is_sound:
        return []
    size = (sample.width, sample.height)
    return views_for(*size, content, source.config, step=work.step, encoded=sample.encoded)


@dataclass(frozen=True)
class _Loaded:
    """A view on its way to the VAE. `pixels`, `latents` or `mask` is None if it is in the cache."""

    view: View
    latent_key: bytes
    mask_key: bytes
    pixels: Tensor | None = None
    latents: Tensor | None = None
    """From a latent file, in place of pixels."""
    sound: tuple[Tensor, int] | None = None
    """(2, samples) and their rate, in place of pixels."""
    mask: Tensor | None = None


def _encode_images(
    work: _Work, index: Index, positions: Sequence[int], report: Callable[[int], None]
) -> Iterator[tuple[int, str]]:
    """Encode the missing views of the samples; yield each position with "" or the reason it is unusable."""
    for position, loaded in zip(
        positions, load_ahead(partial(_load, work, index), positions, report), strict=True
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
            if latents is not None:
                dtype = DTYPES[work.images.source(sample).config.dtype]
                work.write("latents", item.latent_key, {"latents": latents.to(dtype), **pack(given, dtype)})
        yield position, ""


def _encode_pixels(work: _Work, pixels: Tensor, sample: Sample) -> tuple[Tensor, Conditioning]:
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


def _encode_text(work: _Work, text: str, config: DatasetConfig) -> None:
    key = work.text_key(text, config)
    if not work.lacks("text", key):
        return
    conditioning = work.encoder.encode_text(text)
    if not all(torch.isfinite(tensor).all() for tensor in tensors_in(conditioning)):
        raise UserError(
            f"the text encoder returned NaN or infinite values for the caption {text!r}; load an "
            "fp16 file instead of fp8, or start ComfyUI with --fp32-text-enc."
        )
    work.write("text", key, pack(conditioning, DTYPES[config.dtype]))


def _load(work: _Work, index: Index, position: int) -> list[_Loaded] | str:
    """Return the missing views of a sample, or why it is unusable. Runs in a thread beside the VAE."""
    sample = work.images.samples[position]
    source = work.images.source(sample)
    content = int(index.content[position]).to_bytes(8, "little").hex()
    views = [view for bucket in _views(work, source, sample, content) for view in bucket]
    views = [SOUND] if sample.is_sound else views
    first = int(index.view_start[np.searchsorted(index.sample, position)])
    wanted = [
        _Loaded(view, index.latent_key(place), index.mask_key(place))
        for place, view in enumerate(views, first)
    ]
    try:
        if sample.is_sound:
            return [replace(wanted[0], sound=open_sound(source, sample))]
        load = _with_latents if sample.encoded else _with_frames if sample.frames else _with_pixels
        return load(work, source, sample, wanted)
    except BadImage as error:
        return str(error)


def _with_pixels(work: _Work, source: Source, sample: Sample, wanted: Sequence[_Loaded]) -> list[_Loaded]:
    image, mask = open_sample(source, sample)
    loaded = []
    for item in wanted:
        lacks = work.lacks("latents", item.latent_key)
        pixels = torch.from_numpy(render(image, item.view)) if lacks else None
        weights = _weights(work, source, mask, image.size, item.view, item.mask_key)
        loaded.append(replace(item, pixels=pixels, mask=weights))
    return loaded


def _with_frames(work: _Work, source: Source, sample: Sample, wanted: Sequence[_Loaded]) -> list[_Loaded]:
    """Return the views of a clip, (frames, H, W, 3), in 8 bits where the clip has no more."""
    size = (sample.width, sample.height)
    mask = mask_file(source, sample) if source.root is not None else None
    missing = [item for item in wanted if work.lacks("latents", item.latent_key)]
    rendered: dict[bytes, list[Tensor]] = {item.latent_key: [] for item in missing}
    # One decoded frame at a time: a clip in full size may be larger than memory.
    for image in open_clip(source, sample, work.frames(sample)) if missing else ():
        for key, view in {item.latent_key: item.view for item in missing}.items():
            pixels = torch.from_numpy(render(image, view))
            exact = image.planes[0].mode == "RGB" and view.jitter is None
            rendered[key].append((pixels * 255).round().to(torch.uint8) if exact else pixels)
    stacked = {key: torch.stack(frames) for key, frames in rendered.items()}
    return [
        replace(
            item,
            pixels=stacked.get(item.latent_key),
            mask=_weights(work, source, mask, size, item.view, item.mask_key),
        )
        for item in wanted
    ]


def _with_latents(work: _Work, source: Source, sample: Sample, wanted: Sequence[_Loaded]) -> list[_Loaded]:
    whole, loaded = mask_file(source, sample), []
    for item in wanted:
        bucket = item.view.crop.bucket
        latents, alpha = open_latents(source, sample, bucket, work.encoder.latent_shape(*bucket))
        mask, size, view = whole, (sample.width, sample.height), item.view
        if mask is None:
            mask, size, view = alpha, bucket, View(Crop(bucket, (0, 0, *bucket)))
        weights = _weights(work, source, mask, size, view, item.mask_key)
        lacks = work.lacks("latents", item.latent_key)
        loaded.append(replace(item, latents=latents if lacks else None, mask=weights))
    return loaded


def _weights(
    work: _Work, source: Source, mask: Image | None, image_size: Size, view: View, key: bytes
) -> Tensor | None:
    """Return the mask under a view; None if the image has none or it is in the cache.

    Raises BadImage if it leaves nothing of the view.
    """
    if mask is None or not work.lacks("masks", key):
        return None
    weights = _mask_at(mask, image_size, view, work.reduction)
    if not weights.any() and not source.config.mask.outside:
        raise BadImage("its mask is black over the whole crop, so nothing would be learned from it")
    return weights


def _mask_at(mask: Image, image_size: Size, view: View, reduction: int) -> Tensor:
    """Return the mask under a view at latent resolution, (H, W) uint8."""
    width, height = view.crop.bucket
    values = crop_mask(mask, image_size, view.crop.box, (width // reduction, height // reduction))
    return torch.from_numpy(values[:, ::-1].copy() if view.flip else values.copy())


def _require_usable(images: ImageSet, bad: Mapping[int, str]) -> None:
    unusable = [(images.samples[position], reason) for position, reason in bad.items()]
    fatal = [Skipped(s.name, reason) for s, reason in unusable if not images.source(s).config.skip_bad]
    if fatal or len(bad) == len(images.samples):
        listed = fatal or [Skipped(sample.name, reason) for sample, reason in unusable]
        titles = ", ".join(source.title for source in images.sources)
        raise bad_files_error(listed, titles, len(images.samples) - len(bad))


def _geometry(view: View) -> tuple[object, ...]:
    return view.crop.bucket, tuple(round(side, 3) for side in view.crop.box), view.flip


def cache_key(*parts: object) -> bytes:
    """Return the key of an entry that is a function of `parts`."""
    return hashlib.blake2b(
        repr((VERSION, *parts)).encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES
    ).digest()
