"""Datasets of images that a graph made, for as long as ComfyUI keeps what the graph put out."""

from __future__ import annotations

import uuid
from weakref import WeakValueDictionary

from ...data.samples import ImageSet

_sets: WeakValueDictionary[str, ImageSet] = WeakValueDictionary()


def remember_set(images: ImageSet) -> str:
    """Return a word by which `known_set` finds this dataset."""
    word = uuid.uuid4().hex
    _sets[word] = images
    return word


def known_set(word: str) -> ImageSet | None:
    return _sets.get(word)
