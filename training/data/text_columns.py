"""Columns of strings for a million samples, in far less memory than as many Python strings."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import overload


class Column(Sequence[str]):
    """Strings that are made when they are asked for."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._read(i) for i in range(*index.indices(len(self)))]
        return self._read(range(len(self))[index])

    def _read(self, index: int) -> str:
        """Return the string at `index`, which is not negative and within the column."""
        raise NotImplementedError


class Strings(Column):
    """A list of strings in one block of UTF-8, with about 8 bytes per string on top of its text."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._text = bytearray()
        self._ends = array("q")
        for string in strings:
            self.append(string)

    def append(self, string: str) -> None:
        # File names may have bytes that are not valid UTF-8; Python represents them as lone surrogates.
        self._text += string.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends)

    def _read(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return self._text[start : self._ends[index]].decode("utf-8", "surrogatepass")

    @property
    def nbytes(self) -> int:
        return len(self._text) + self._ends.itemsize * len(self._ends)


class Texts(Column):
    """A list of longer strings, compressed in blocks: fast to iterate, slower (0.1 ms) to index."""

    _BLOCK = 256

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._last: list[str] = []
        self._decompressed: tuple[int, list[str]] = (-1, [])

    def append(self, text: str) -> None:
        self._last.append(text)
        if len(self._last) == self._BLOCK:
            self._blocks.append(zlib.compress(json.dumps(self._last).encode(), 1))
            self._last = []

    def __len__(self) -> int:
        return len(self._blocks) * self._BLOCK + len(self._last)

    def _read(self, index: int) -> str:
        block, place = divmod(index, self._BLOCK)
        if block == len(self._blocks):
            return self._last[place]
        cached, texts = self._decompressed
        if cached != block:
            texts = json.loads(zlib.decompress(self._blocks[block]))
            self._decompressed = (block, texts)  # one assignment: threads may read at the same time
        return texts[place]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._blocks)) + sum(map(len, self._last))
