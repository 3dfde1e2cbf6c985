"""The keys of all encoded tensors, in arrays of about 140 bytes per sample.

An entry is one image at one resolution. It has one or more views (crops, mirror images), and its image has
one or more texts. Lists of different lengths are one flat array and the positions where each list begins.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import added, to_text
from .bucket import Bucket, Size

Ints = NDArray[np.int64]
Keys = NDArray[np.uint8]
KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
"""In place of a key: there is no such entry."""


@dataclass(frozen=True, repr=False)
class SourceRules:
    """Settings shared by all samples of one source."""

    weight: float
    outside: float
    """Loss weight where the mask is black."""
    dropout: float
    """Chance of the empty caption."""
    empty: bytes
    """Key of the empty caption."""
    reference_dropout: float = added(0.0)
    """Chance of training without the references."""
    first_frame: float = added(1.0)
    """Share of the clips with a first frame to give that are trained with it."""
    __repr__ = to_text  # part of the dataset's fingerprint


@dataclass(frozen=True)
class Index:
    """All entries. Arrays are (entries,), (views, ...), (samples, ...) or (texts, 16)."""

    buckets: tuple[Bucket, ...]
    """Sizes in pixels, with the frames of clips; of latents from the graph: width, height, ... in cells."""
    rules: tuple[SourceRules, ...]
    sample: NDArray[np.int32]
    """(entries,): position in the ImageSet."""
    bucket: NDArray[np.int32]
    repeats: NDArray[np.int32]
    view_start: Ints
    """(entries + 1,): the views of entry i are view_start[i] to view_start[i + 1]."""
    latent_keys: Keys
    """(views, 16)"""
    mask_keys: Keys
    """(views, 16), zero where an image has no mask; (0, 16) if none has one."""
    offsets: NDArray[np.int32]
    """(views, 2): left and top of the crop in pixels of the resized image."""
    sizes: NDArray[np.int32]
    """(samples, 2): width, height of the original in pixels."""
    source: NDArray[np.int16]
    """(samples,)"""
    content: NDArray[np.uint64]
    """(samples,): the start of the content's digest."""
    text_start: Ints
    """(samples + 1,)"""
    text_keys: Keys
    """(texts, 16): of captions with the sample's references, if it has any."""
    bare_keys: Keys
    """(texts, 16): of the same captions without references, zero where none are dropped; (0, 16) if none."""
    empty_keys: Keys
    """(samples, 16): of the dropped caption where each sample has its own, else zero; (0, 16) if none has."""
    preserved_keys: Keys
    """(texts, 16): of the same captions with the class word in place of the trigger, zero where a source has
    none; (0, 16) if none has one."""
    slider: tuple[bytes, ...] = ()
    """For a slider from words: the keys of its positive, negative, neutral and anchor text."""

    @property
    def nbytes(self) -> int:
        values = (getattr(self, item.name) for item in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))

    def latent_key(self, view: int) -> bytes:
        return bytes(self.latent_keys[view])

    def mask_key(self, view: int) -> bytes:
        """Return the view's mask key, NO_KEY if there is none."""
        return bytes(self.mask_keys[view]) if len(self.mask_keys) else NO_KEY

    def text_key(self, sample: int, text: int, *, has_caption: bool, has_references: bool) -> bytes:
        """Return the key of a text of a sample, without its words or its references if these are dropped."""
        if not has_caption:
            own = bytes(self.empty_keys[sample]) if len(self.empty_keys) and has_references else NO_KEY
            return own if own != NO_KEY else self.rules[self.source[sample]].empty
        bare = bytes(self.bare_keys[text]) if len(self.bare_keys) and not has_references else NO_KEY
        return bare if bare != NO_KEY else bytes(self.text_keys[text])

    def digest(self, entries: NDArray[np.int32]) -> str:
        """Return 32 hex digits that change with anything that changes these entries' batches."""
        state = hashlib.blake2b(repr((self.buckets, self.rules)).encode(), digest_size=16)
        state.update(b"".join(self.slider))
        samples = self.sample[entries]
        parts: list[NDArray[Any]] = [
            self.bucket[entries],
            self.repeats[entries],
            self.source[samples],
            self.sizes[samples],
        ]
        parts += _gather(self.view_start, [self.latent_keys, self.offsets], entries)
        parts += _gather(self.view_start, [self.mask_keys] if len(self.mask_keys) else [], entries)
        parts += _gather(self.text_start, [self.text_keys], samples)
        parts += _gather(self.text_start, [self.bare_keys] if len(self.bare_keys) else [], samples)[1:]
        parts += [self.empty_keys[samples]] if len(self.empty_keys) else []
        preserved = [self.preserved_keys] if len(self.preserved_keys) else []
        parts += _gather(self.text_start, preserved, samples)[1:]
        for part in parts:
            state.update(np.ascontiguousarray(part).tobytes())
        return state.hexdigest()


def mirror_key(key: bytes) -> bytes:
    """Return the key of a text with mirrored references, from that of the text with its references."""
    return hashlib.blake2b(key + b"mirrored", digest_size=KEY_BYTES).digest()


class IndexBuilder:
    """Collects samples one by one, in compact columns."""

    def __init__(self, rules: Iterable[SourceRules], *, slider: Iterable[bytes] = ()) -> None:
        self._rules, self._slider = tuple(rules), tuple(slider)
        self._buckets: dict[Bucket, int] = {}
        self._entries = array("i")  # sample, bucket, repeats
        self._view_start, self._text_start = array("q", [0]), array("q", [0])
        self._latents, self._masks, self._texts = bytearray(), bytearray(), bytearray()
        self._bare, self._empty, self._preserved = bytearray(), bytearray(), bytearray()
        self._offsets = array("i")
        self._samples = array("i")  # width, height, source
        self._content = array("Q")

    def add_sample(
        self,
        size: Size,
        source: int,
        content: bytes,
        texts: Sequence[bytes],
        *,
        bare: Sequence[bytes] = (),
        empty: bytes = NO_KEY,
        preserved: Sequence[bytes] = (),
    ) -> None:
        """Add the next image, with the digest of its content and the keys of its texts.

        `bare` are those of the same texts without references, `empty` that of its own dropped caption,
        `preserved` those of the texts with the class word in place of the trigger.
        """
        self._samples.extend((*size, source))
        self._content.append(int.from_bytes(content[:8], "little"))
        self._texts += b"".join(texts)
        self._bare += b"".join(bare or [NO_KEY] * len(texts))
        self._empty += empty
        self._preserved += b"".join(preserved or [NO_KEY] * len(texts))
        self._text_start.append(len(self._texts) // KEY_BYTES)

    def add_entry(
        self,
        sample: int,
        bucket: Bucket,
        repeats: int,
        latents: Sequence[bytes],
        masks: Sequence[bytes],
        offsets: Sequence[tuple[int, int]],
    ) -> None:
        """Add an image at one resolution.

        For each of its views a latent key, a mask key or NO_KEY, and the crop's offset.
        """
        bucket_index = self._buckets.setdefault(bucket, len(self._buckets))
        self._entries.extend((sample, bucket_index, repeats))
        self._latents += b"".join(latents)
        self._masks += b"".join(masks)
        for offset in offsets:
            self._offsets.extend(offset)
        self._view_start.append(len(self._latents) // KEY_BYTES)

    def build(self) -> Index:
        """Return the index. The builder must not be used again: the arrays share its memory."""
        entries = np.frombuffer(self._entries, np.int32).reshape(-1, 3)
        samples = np.frombuffer(self._samples, np.int32).reshape(-1, 3)
        return Index(
            buckets=tuple(self._buckets),
            rules=self._rules,
            sample=entries[:, 0].copy(),
            bucket=entries[:, 1].copy(),
            repeats=entries[:, 2].copy(),
            view_start=np.frombuffer(self._view_start, np.int64),
            latent_keys=_keys(self._latents),
            mask_keys=_keys_if_any(self._masks),
            offsets=np.frombuffer(self._offsets, np.int32).reshape(-1, 2),
            sizes=samples[:, :2].copy(),
            source=samples[:, 2].astype(np.int16),
            content=np.frombuffer(self._content, np.uint64),
            text_start=np.frombuffer(self._text_start, np.int64),
            text_keys=_keys(self._texts),
            bare_keys=_keys_if_any(self._bare),
            empty_keys=_keys_if_any(self._empty),
            preserved_keys=_keys_if_any(self._preserved),
            slider=self._slider,
        )


def _keys(block: bytearray) -> Keys:
    return np.frombuffer(block, np.uint8).reshape(-1, KEY_BYTES)


def _keys_if_any(block: bytearray) -> Keys:
    keys = _keys(block)
    return keys if keys.any() else np.zeros((0, KEY_BYTES), np.uint8)


def _gather(start: Ints, flats: Sequence[NDArray[Any]], rows: NDArray[np.int32]) -> list[NDArray[Any]]:
    """Return the lengths of the chosen rows, and their items from each flat array."""
    lengths = start[rows + 1] - start[rows]
    before = np.cumsum(lengths) - lengths
    places = np.repeat(start[rows] - before, lengths) + np.arange(int(lengths.sum()))
    return [lengths, *(flat[places] for flat in flats)]
