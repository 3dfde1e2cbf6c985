"""Which parts a batch has: a view and a text of each entry, drawn anew each time, and what is left out.

The one rule: a choice is a pure function of its arguments, and reads no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..rng import generator
from .caption import preserved_texts
from .index import Index, SourceRules, mirror_key
from .samples import ImageSet

Entries = NDArray[np.int32]


@dataclass(frozen=True)
class Choice:
    """The parts of one batch."""

    entries: Entries
    views: NDArray[np.int64]
    texts: list[bytes]
    """Keys of the captions, that of the empty one where a caption was dropped."""
    rules: list[SourceRules]
    captions: list[str]


@dataclass(frozen=True)
class Chooser:
    """Chooses the parts of the batches of one dataset."""

    index: Index
    images: ImageSet
    steady: bool
    """Whether it is for validation: always the first view and caption, nothing dropped."""

    def choose(self, entries: Entries, seed: int, index: int) -> Choice:
        """Return entries of micro-batch `index` with its choice of views and captions."""
        at = self.index
        samples = at.sample[entries]
        view_draws, text_draws, drop_draws = self.draws(len(entries), seed, index)
        texts = pick(at.text_start, samples, text_draws)
        rules = [at.rules[i] for i in at.source[samples]]
        has_caption = [bool(drop >= rule.dropout) for rule, drop in zip(rules, drop_draws)]
        has_references = self._has_references(rules, seed, index)
        places = list(zip(samples.tolist(), texts.tolist(), has_caption, has_references))
        keys = [at.text_key(s, t, has_caption=c, has_references=r) for s, t, c, r in places]
        captions = [self.caption(s, t) if c else "" for s, t, c, _ in places]
        views = pick(at.view_start, entries, view_draws)
        mirrored = self._has_mirrored_references(entries, views)
        keys = [
            mirror_key(key) if mirror and pair else key
            for key, mirror, pair in zip(keys, mirrored, has_references, strict=True)
        ]
        return Choice(entries, views, keys, rules, captions)

    def _has_mirrored_references(self, entries: Entries, views: NDArray[np.int64]) -> list[bool]:
        """Return for each sample whether its view, and so its references, are mirrored: every second one."""
        sources = [self.images.sources[i] for i in self.index.source[self.index.sample[entries]]]
        places = (views - self.index.view_start[entries]).tolist()
        return [
            bool(place % 2 and source.config.augment.flip and (source.references or source.reference_pixels))
            for place, source in zip(places, sources, strict=True)
        ]

    def without_first_frame(self, chosen: Choice, seed: int, index: int) -> list[int]:
        """Return the places in a batch of clips that are trained without their first frame given."""
        shares = [rules.first_frame for rules in chosen.rules]
        clips = [len(self.index.buckets[self.index.bucket[entry]]) > 2 for entry in chosen.entries]
        if not any(clip and share < 1 for clip, share in zip(clips, shares)):
            return []
        draws = torch.rand(len(shares), generator=generator(seed, "first frame", index)).tolist()
        draws = [0.5] * len(shares) if self.steady else draws
        return [place for place, share in enumerate(shares) if clips[place] and draws[place] >= share]

    def draws(self, count: int, seed: int, index: int) -> NDArray[np.float64]:
        """Return (3, count) numbers in [0, 1) that pick view, text and dropout of each sample of a batch."""
        if self.steady:
            return np.array([[0.0], [0.0], [1.0]]).repeat(count, axis=1)
        draws = torch.rand(3, count, generator=generator(seed, "data", index), dtype=torch.float64)
        return np.asarray(draws)

    def _has_references(self, rules: Sequence[SourceRules], seed: int, index: int) -> list[bool]:
        """Return for each sample of a batch whether it is trained with its references, if it has any."""
        if self.steady or not any(rule.reference_dropout for rule in rules):
            return [True] * len(rules)
        draws = torch.rand(len(rules), generator=generator(seed, "references", index), dtype=torch.float64)
        return [draw >= rule.reference_dropout for rule, draw in zip(rules, draws.tolist())]

    def caption(self, index: int, text_index: int) -> str:
        """Return the text with key `text_index` of a sample."""
        return self.pair(index, text_index)[0]

    def pair(self, index: int, text_index: int) -> tuple[str, str]:
        """Return a text of a sample and the one to preserve; only keys are stored, so both are made again."""
        sample = self.images.samples[index]
        texts = preserved_texts(sample.captions, self.images.source(sample).config)
        return list(texts.items())[text_index - int(self.index.text_start[index])]


def pick(start: NDArray[np.int64], rows: NDArray[np.int32], draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the index of one item of each row, picked by draws in [0, 1)."""
    places: NDArray[np.int64] = start[rows] + (draws * (start[rows + 1] - start[rows])).astype(np.int64)
    return places
