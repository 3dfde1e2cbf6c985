"""The order of samples: a pure function of (seed, index), so there is no sampler state to save.

The one rule: an epoch shows every entry exactly `repeats` times. Each bucket is shuffled and cut into batches
(the last one may be smaller); then the batches of all buckets are shuffled. So every bucket is seen as often
as its images require, and no image is dropped.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..rng import generator

Ints = NDArray[np.int64]


class Order:
    """The batches of a set of entries.

    `steady` keeps the entries' own order in every epoch, for validation.
    """

    def __init__(
        self, buckets: NDArray[np.int32], repeats: NDArray[np.int32], *, steady: bool = False
    ) -> None:
        """Take the bucket number and the repeats of every entry, both (entries,)."""
        assert len(buckets) and len(buckets) == len(repeats), "an order needs entries"
        self._steady = steady
        self._repeats = repeats
        self._by_bucket = np.argsort(buckets, kind="stable").astype(np.int32)
        self.visits: Ints = np.bincount(buckets, repeats).astype(np.int64)
        """(buckets,): samples of each that an epoch shows."""
        # The order of one epoch: 4 bytes per visit. A new one takes a few hundredths of a second at a million
        # samples.
        self._cached: tuple[tuple[int, int, int], NDArray[np.int32], Ints] | None = None

    def steps(self, size: int) -> int:
        """Return the number of batches in an epoch."""
        return int(self._batches(size).sum())

    def choose(self, size: int, *, seed: int, index: int) -> NDArray[np.int32]:
        """Return the positions of the entries in batch `index`: at most `size`, all of one bucket."""
        assert size >= 1 and index >= 0, f"batch size {size}, index {index}"
        counts = self._batches(size)
        epoch, position = divmod(index, int(counts.sum()))
        entries, batches = self._epoch(size, seed, epoch)
        batch = int(batches[position])
        ends = np.cumsum(counts)
        bucket = int(np.searchsorted(ends, batch, side="right"))
        start = int(self.visits[:bucket].sum()) + size * (batch - int(ends[bucket] - counts[bucket]))
        return entries[start : min(start + size, int(self.visits[: bucket + 1].sum()))]

    def _batches(self, size: int) -> Ints:
        """Return (buckets,): batches of each in an epoch."""
        return -(-self.visits // size)

    def _epoch(self, size: int, seed: int, epoch: int) -> tuple[NDArray[np.int32], Ints]:
        """Return the entries, bucket by bucket in shuffled order, and the order of the batches."""
        key = (size, 0, 0) if self._steady else (size, seed, epoch)
        if self._cached is None or self._cached[0] != key:
            entries = np.repeat(self._by_bucket, self._repeats[self._by_bucket])
            steps = self.steps(size)
            if self._steady:
                batches: Ints = np.arange(steps)
            else:
                start = 0
                for bucket, count in enumerate(self.visits.tolist()):
                    shuffle = torch.randperm(count, generator=generator(seed, "order", epoch, bucket)).numpy()
                    entries[start : start + count] = entries[start : start + count][shuffle]
                    start += count
                batches = torch.randperm(steps, generator=generator(seed, "batches", epoch)).numpy()
            self._cached = (key, entries, batches)
        return self._cached[1], self._cached[2]
