"""One encoding: its images, encoder and store, and the keys of what it writes.

The one rule: a key covers everything that changes the tensor and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..model import Encoder
from .augment import View
from .config import DatasetConfig
from .index import KEY_BYTES, NO_KEY
from .latent_file import architecture_of
from .samples import ImageSet, Sample
from .store import Store

References = Sequence[tuple[object, ...]]
"""What decides the pixels of each reference of a sample."""
VERSION = 1
"""Part of every key; raised whenever encoded tensors change. A part that is new to keys is left out of
them at its default."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Encoding:
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

    def edit_key(self, text: str, references: References, config: DatasetConfig) -> bytes:
        """Return the key of a text with its references; that of the text alone where there are none."""
        if not references:
            return self.text_key(text, config)
        encoders = (self.text_fingerprint, self.image_fingerprint, self.encoder.edit_node)
        return cache_key("edit", *encoders, text, config.dtype, *references)

    def latent_key(
        self, view: View, sample: Sample, content: bytes, mask: bytes, config: DatasetConfig
    ) -> bytes:
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
            *(["inpaint", mask.hex()] if self.is_given_mask(sample, mask) else []),
        )

    def sound_key(self, sample: Sample, content: bytes, config: DatasetConfig) -> bytes:
        piece = (sample.start, config.seconds)
        return cache_key("sound", self.image_fingerprint, content.hex(), *piece, config.dtype)

    def is_given_mask(self, sample: Sample, mask: bytes) -> bool:
        """Return whether the model is given this image's mask."""
        return self.encoder.inpaints and bool(mask) and not sample.encoded and not sample.frames

    def keys_of(
        self, texts: Sequence[str], references: References, config: DatasetConfig
    ) -> tuple[list[bytes], list[bytes], bytes]:
        """Return the keys of a sample's texts, of the same without references where these may be dropped, and
        of its references without a text where that may be dropped."""
        keys = [self.edit_key(text, references, config) for text in texts]
        may_be_bare, may_be_empty = config.reference_dropout > 0, config.caption.dropout > 0
        bare = [self.text_key(text, config) for text in texts] if references and may_be_bare else []
        empty = self.edit_key("", references, config) if references and may_be_empty else NO_KEY
        return keys, bare, empty

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


def _geometry(view: View) -> tuple[object, ...]:
    return view.crop.bucket, tuple(round(side, 3) for side in view.crop.box), view.flip


def cache_key(*parts: object) -> bytes:
    """Return the key of an entry that is a function of `parts`."""
    return hashlib.blake2b(
        repr((VERSION, *parts)).encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES
    ).digest()
