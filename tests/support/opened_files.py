"""Which files this process opens."""

from __future__ import annotations

import contextlib
import functools
import sys

_watching: list[list[tuple[str, bool]]] = []


@contextlib.contextmanager
def watched():
    """Yield a list that grows by (name, whether to write) of every file that is opened."""
    _install()
    opened: list[tuple[str, bool]] = []
    _watching.append(opened)
    try:
        yield opened
    finally:
        _watching.remove(opened)


@functools.cache
def _install() -> None:
    sys.addaudithook(_note)  # cannot be taken back


def _note(event, arguments):
    if event == "open" and _watching and isinstance(arguments[0], str):
        name, mode, flags = arguments
        writes = any(letter in mode for letter in "wax+") if mode else bool(flags & 3)
        for opened in _watching:
            opened.append((name, writes))
