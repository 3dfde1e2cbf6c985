"""Which entries of a dataset are held out for validation."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from .config import SplitConfig
from .index import Index
from .samples import ImageSet


def held_out_entries(
    index: Index, images: ImageSet, entries: NDArray[np.int32], config: SplitConfig
) -> NDArray[np.bool_]:
    """Return a mask (entries,) of those for validation."""
    samples = index.sample[entries]
    is_regular = np.array([source.config.regularisation for source in images.sources])
    regular, names = is_regular[index.source[samples]], images.samples.names
    named = np.array([any(fnmatchcase(names[i], glob) for glob in config.names) for i in samples], bool)
    # By the smallest digests: equal images stay together, and adding an image moves at most one other.
    digests = np.unique(index.content[samples[~regular]])
    count = max(1, round(config.fraction * len(digests))) if config.fraction else 0
    named |= np.isin(index.content[samples], digests[:count])
    held_out: NDArray[np.bool_] = named & ~regular
    return held_out
