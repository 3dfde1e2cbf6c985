"""Several sets of samples as one: the output of Join Datasets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..user_error import UserError
from .samples import ImageSet, SampleTable, Source


def join(sets: Sequence[ImageSet], *, shares: Sequence[float] = ()) -> ImageSet:
    """Return several sets as one; each keeps its own settings, repeats and loss weight.

    `shares` are the sets' parts of an epoch, whatever their numbers of images: (1, 1) is half and half.
    Repeats are multiplied by whole numbers up to about sixteen, to within 5 % if possible. Raises UserError
    if there is no set, or not one positive share for each.
    """
    if not sets:
        raise UserError("no datasets to join; connect at least one.")
    if any(images.words or images.pairs for images in sets):
        raise UserError("the dataset of a slider cannot be joined; connect Join Datasets before it.")
    visits = [int(images.samples.column("repeats").sum()) for images in sets]
    times = _multipliers(visits, shares) if shares else [1] * len(sets)
    sources: list[Source] = []
    table = SampleTable()
    ignored: Counter[str] = Counter()
    for images, factor in zip(sets, times, strict=True):
        for sample in images.samples:
            table.append(
                replace(sample, source=sample.source + len(sources), repeats=sample.repeats * factor)
            )
        sources.extend(images.sources)
        ignored.update(dict(images.ignored))
    skipped = tuple(bad for images in sets for bad in images.skipped)
    unread = sum(images.unread for images in sets)
    left_out = tuple(name for images in sets for name in images.left_out)
    return ImageSet(table, tuple(sources), skipped, tuple(sorted(ignored.items())), unread, left_out=left_out)


def _multipliers(visits: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return a whole factor for each set, so that visits x factor is about proportional to the shares."""
    if len(shares) != len(visits) or not all(0 < share < math.inf for share in shares):
        raise UserError(f"{len(visits)} datasets need {len(visits)} positive shares, got {list(shares)}.")
    wanted = [share / count for share, count in zip(shares, visits, strict=True)]
    tried = []
    for base in range(1, 17):
        times = [max(1, round(base * ratio / min(wanted))) for ratio in wanted]
        rates = [count / ratio for count, ratio in zip(times, wanted, strict=True)]
        tried.append((max(rates) / min(rates), times))
    return next((times for error, times in tried if error <= 1.05), min(tried)[1])
