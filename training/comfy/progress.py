"""A node's progress bar, and Cancel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import comfy.model_management
import comfy.utils

from ..model import OnProgress

EVENTS_A_SECOND = 4
"""At most so many messages a second about a run, or a node's progress, go to the editor."""


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """Yield an `on_progress` that moves the node's bar and raises ComfyUI's interrupt on Cancel."""
    bar, sent = comfy.utils.ProgressBar(1), 0.0

    def on_progress(done: int, total: int, message: str) -> None:
        nonlocal sent
        if done == total or time.monotonic() - sent > 1 / EVENTS_A_SECOND:
            sent = time.monotonic()
            bar.update_absolute(done, max(total, 1))
        comfy.model_management.throw_exception_if_processing_interrupted()

    yield on_progress


def raise_if_cancelled() -> None:
    """Raise RuntimeError after Cancel. ComfyUI then interrupts the prompt itself; where it asks for
    fingerprints, before the first node, its own interrupt would end the whole queue.
    """
    if comfy.model_management.processing_interrupted():
        raise RuntimeError("Cancel was pressed.")
