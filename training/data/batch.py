"""The encoded dataset: batches for training, in the order of `order.py`, with tensors from the cache.

The one rule: `batch` is a pure function of its arguments, so a resumed run goes on with the next batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import digest
from ..model import Batch, Captions, Condition, Conditioning, SliderTexts, count_positions
from ..user_error import UserError
from .bad_files import Skipped
from .choice import Choice, Chooser, Entries, pick
from .conditioning import unpack
from .config import SplitConfig
from .index import NO_KEY, Index
from .order import Order
from .samples import ImageSet
from .size_and_crop import size_and_crop
from .slider import find_other_ends
from .split import held_out_entries
from .store import Store

T = TypeVar("T")

GIVEN = ("concat_latent_image", "concat_mask", "denoise_mask")
"""What the model is given for a clip whose first frame it knows."""

EMPTY_IS_MISSING = (
    "the conditioning of an empty text is missing, with which preservation and Dataset Report compare; "
    "connect it to empty_caption of Dataset From Latents."
)

MOST_LOOKED_AT = 1000
"""Most texts, and most images, searched for the longest text."""


class EncodedDataset:
    """The `Dataset` of `training.model`. It holds keys; each batch reads its tensors."""

    def __init__(
        self,
        index: Index,
        store: Store,
        images: ImageSet,
        *,
        entries: Entries,
        skipped: Sequence[Skipped] = (),
        steady: bool = False,
    ) -> None:
        """Take the entries of `index` that belong to this dataset.

        `steady` is for validation: each image once, in fixed order, first view and caption, no dropout.
        """
        self.index, self.store, self.images, self.steady = index, store, images, steady
        self.skipped = tuple(skipped)
        """Files that cannot be used, from the scan and from encoding."""
        self.entries = entries
        repeats = np.ones(len(self.entries), np.int32) if steady else index.repeats[self.entries]
        self.chooser = Chooser(index, images, steady)
        self.order = Order(index.bucket[self.entries], repeats, steady=steady)

    def __len__(self) -> int:
        """Return the number of entries: images, times the resolutions at which each is trained."""
        return len(self.entries)

    @property
    def visits(self) -> int:
        """How many images an epoch shows, repeats counted."""
        return int(self.order.visits.sum())

    @property
    def trigger(self) -> str:
        """The trigger word of the first folder that has one, or ""."""
        return next((s.config.caption.trigger for s in self.images.sources if s.config.caption.trigger), "")

    @cached_property
    def has_pixels(self) -> bool:
        """Whether buckets are in pixels; those of latents from the graph are in cells."""
        return not any(source.is_encoded for source in self.images.sources)

    @cached_property
    def is_captioned(self) -> bool:
        """Whether the texts are known, and not only what a text encoder made of them."""
        return all(source.is_captioned for source in self.images.sources)

    @property
    def names(self) -> list[str]:
        """The images' paths inside their folders, each once."""
        return [self.images.samples.names[i] for i in np.unique(self.index.sample[self.entries]).tolist()]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all that decides a batch: contents, settings, encoder, order; not the files' names."""
        slider: list[str | float] = []
        if self.images.pairs:
            slider = ["pairs", self.index.digest(self._other_ends[self.entries])]
        elif self.images.words:
            slider = ["words", self.images.words.guidance]
        return digest(self.index.digest(self.entries), self.steady, *slider)

    def steps_per_epoch(self, size: int) -> int:
        """Return the number of batches in which every image is seen its repeats' number of times."""
        return self.order.steps(size)

    def batch(self, size: int, *, seed: int, index: int) -> Batch:
        """Return micro-batch number `index`, counted from the first of the run over all ranks.

        It has `size` samples of one bucket, fewer where a bucket ends.
        Raises UserError if the cache was damaged or removed meanwhile.
        """
        chosen = self.choose(size, seed=seed, index=index)
        batch = self._read(chosen, seed, index)
        if self.images.pairs:
            other = self.chooser.choose(self._other_ends[chosen.entries], seed, index)
            batch = replace(batch, opposite=self._read(other, seed, index))
        return self._with_slider(batch)

    def _read(self, chosen: Choice, seed: int, index: int) -> Batch:
        """Return a batch with its tensors from the cache."""
        views = [self._view(view) for view in chosen.views]
        for place in self.chooser.without_first_frame(chosen, seed, index):
            for name in GIVEN:
                views[place][1].pop(name, None)
        latents = torch.stack([latents for latents, _ in views])
        weights = [rules.weight for rules in chosen.rules]
        samples = self.index.sample[chosen.entries].tolist()
        return Batch(
            latents=latents,
            conditioning=[
                {**self._conditioning(key), **own} for key, (_, own) in zip(chosen.texts, views, strict=True)
            ],
            names=tuple(self.images.samples.names[i] for i in samples),
            masks=self._masks(chosen, latents),
            weights=torch.tensor(weights) if any(weight != 1 for weight in weights) else None,
            extras=[
                size_and_crop(self.index, self.images, *each) for each in zip(chosen.entries, chosen.views)
            ],
            captions=chosen.captions if self.is_captioned else (),
            given=[own for _, own in views],
        )

    def largest_batch(self, size: int) -> Batch:
        """Return a batch of the largest bucket with the longest conditioning, for planning memory.

        Its length is that of the text, and the cells of the images that the model is given as well.

        Captions are the longest ones and differ, as text encoders in training encode equal ones only once.
        """
        at = self.index
        cells = np.array([math.prod(bucket) for bucket in at.buckets])[at.bucket[self.entries]]
        entry = int(self.entries[cells.argmax()])
        view = int(at.view_start[entry])
        samples = _spread(np.unique(at.sample[self.entries]).tolist())
        texts = _spread([(s, text) for s in samples for text in range(*at.text_start[s : s + 2].tolist())])
        own_keys = [bytes(at.text_keys[text]) for _, text in texts]
        keys = own_keys + [bytes(at.preserved_keys[text]) for _, text in texts if len(at.preserved_keys)]

        def length(key: bytes) -> int:
            return count_positions(self.store.shapes("text", key))

        texts.sort(key=lambda each: -length(bytes(at.text_keys[each[1]])))
        longest = self._conditioning(max((key for key in keys if key != NO_KEY), key=length))
        latents, own = self._view(view)
        batch = Batch(
            latents=latents.expand(size, *latents.shape),
            conditioning=[{**longest, **own}] * size,
            extras=[size_and_crop(self.index, self.images, entry, view)] * size,
            captions=[self.chooser.caption(*texts[i % len(texts)]) for i in range(size * self.is_captioned)],
            given=[own] * size,
        )
        return self._with_slider(replace(batch, opposite=batch) if self.images.pairs else batch)

    def preserved_captions(self, size: int, *, seed: int, index: int) -> Captions:
        """Return the captions of micro-batch `index` with the class word in place of the trigger, or empty.

        A caption that is dropped there is not dropped here.
        """
        chosen = self.choose(size, seed=seed, index=index)
        samples = self.index.sample[chosen.entries]
        if self.images.words:
            return self._slider_captions(len(samples))[-1]
        texts = pick(self.index.text_start, samples, self.chooser.draws(len(samples), seed, index)[1])
        places = list(zip(samples.tolist(), texts.tolist(), strict=True))
        return Captions(
            [self._conditioning(self._preserved_key(*place)) for place in places],
            [self.chooser.pair(*place)[1] for place in places] if self.is_captioned else (),
        )

    def _preserved_key(self, sample: int, text: int) -> bytes:
        """Return the key of what is preserved beside a text of a sample.

        Raises UserError where that is the empty caption, and nothing says how it is encoded.
        """
        at = self.index
        if self.images.sources[at.source[sample]].config.regularisation:
            return bytes(at.text_keys[text])
        own = bytes(at.preserved_keys[text]) if len(at.preserved_keys) else NO_KEY
        key = own if own != NO_KEY else at.text_key(sample, text, has_caption=False, has_references=True)
        if key == NO_KEY:
            raise UserError(EMPTY_IS_MISSING)
        return key

    def choose(self, size: int, *, seed: int, index: int) -> Choice:
        """Return the parts of micro-batch `index`, without reading its tensors."""
        entries = self.entries[self.order.choose(size, seed=seed, index=index)]
        return self.chooser.choose(entries, seed, index)

    def split(self, config: SplitConfig) -> tuple[EncodedDataset, EncodedDataset]:
        """Return (training set, validation set). Which image goes where depends on its name or content alone.

        Regularisation images stay in training. Raises UserError if one of the two would be empty.
        """
        held_out = held_out_entries(self.index, self.images, self.entries, config)
        if held_out.all() or not held_out.any():
            side = "training" if held_out.all() else "validation"
            raise UserError(
                f"the validation split (fraction {config.fraction}, names {list(config.names)}) leaves no "
                f"image for {side}, out of {len(self.names)}; change the fraction or the names."
            )
        return self._part(~held_out, self.steady), self._part(held_out, True)

    def validation(self) -> EncodedDataset:
        """Return the same images as a validation set: each once, always alike, in the same order."""
        return self._part(np.ones(len(self.entries), bool), True)

    def sample(self, index: int) -> Batch:
        """Return entry `index` as a batch of one: first view and caption, nothing dropped, always alike.

        With it and `len`, a dataset is the `Samples` of `training.model`.
        """
        return self._as_validation.batch(1, seed=0, index=index)

    @property
    def positions(self) -> list[int]:
        """The position in the image set of what `sample` returns for each index."""
        chosen = (self._as_validation.choose(1, seed=0, index=index) for index in range(len(self)))
        return [int(self.index.sample[each.entries[0]]) for each in chosen]

    def sample_without_caption(self, index: int) -> Batch:
        """Return entry `index` as `sample` does, with the empty caption.

        Raises UserError where nothing says how that is encoded.
        """
        chosen = self._as_validation.choose(1, seed=0, index=index)
        sample = int(self.index.sample[chosen.entries[0]])
        text = int(self.index.text_start[sample])
        key = self.index.text_key(sample, text, has_caption=False, has_references=True)
        if key == NO_KEY:
            raise UserError(EMPTY_IS_MISSING)
        return self._read(replace(chosen, texts=[key], captions=[""]), seed=0, index=index)

    @cached_property
    def _as_validation(self) -> EncodedDataset:
        return self if self.steady else self.validation()

    def _part(self, mask: NDArray[np.bool_], steady: bool) -> EncodedDataset:
        """Return some of the entries as a dataset of their own, by a mask (entries,)."""
        return EncodedDataset(
            self.index,
            self.store,
            self.images,
            entries=self.entries[mask],
            skipped=self.skipped,
            steady=steady,
        )

    @cached_property
    def _other_ends(self) -> Entries:
        """(entries,): for a slider from pairs, the entry of the other end; 0 where there is none."""
        return find_other_ends(self.index, self.images)

    def _with_slider(self, batch: Batch) -> Batch:
        """Return the batch with the texts of a slider from words, if it is for one."""
        words = self.images.words
        if words is None:
            return batch
        positive, negative, neutral, _ = self._slider_captions(len(batch.latents))
        return replace(batch, slider=SliderTexts(positive, negative, neutral, words.guidance))

    def _slider_captions(self, count: int) -> list[Captions]:
        """Return the positive, negative, neutral and anchor text as the captions of `count` samples."""
        assert self.images.words is not None
        pairs = zip(self._slider_conditioning, self.images.words.texts, strict=True)
        return [Captions([conditioning] * count, [text] * count) for conditioning, text in pairs]

    @cached_property
    def _slider_conditioning(self) -> list[Conditioning]:
        return [self._conditioning(key) for key in self.index.slider]

    def _view(self, view: int) -> tuple[Tensor, dict[str, Condition]]:
        """Return a view's latents and its own conditioning, such as what of it the model is given."""
        entry = self.store.read("latents", self.index.latent_key(view))
        return entry.pop("latents").float(), dict(unpack(entry))

    def _conditioning(self, key: bytes) -> Conditioning:
        return unpack(self.store.read("text", key))

    def _masks(self, chosen: Choice, latents: Tensor) -> Tensor | None:
        """Return (B, 1, H, W) loss weights, or None if no image of the batch has a mask."""
        keys = [self.index.mask_key(view) for view in chosen.views]
        if all(key == NO_KEY for key in keys):
            return None
        masks = torch.ones(len(keys), 1, *latents.shape[-2:])
        for mask, key, rule in zip(masks, keys, chosen.rules):
            if key != NO_KEY:
                inside = self.store.read("masks", key)["mask"].float() / 255
                mask[0] = rule.outside + (1 - rule.outside) * inside
        return masks


def _spread(items: list[T]) -> list[T]:
    """Return at most `MOST_LOOKED_AT` of the items, evenly spread."""
    return items[:: -(-len(items) // MOST_LOOKED_AT)]
