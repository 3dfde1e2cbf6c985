"""A running training as ComfyUI sees it: progress on the node, Cancel, and Finish."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import comfy.model_management
import comfy.utils

from ..loop import STOP, OnStep, Progress
from ..model import OnProgress
from .versions import running_server

log = logging.getLogger(__name__)

_finish: dict[str, bool] = {}
"""Runs under way by folder name -> whether Finish was asked for."""


def request_finish(run: str) -> bool:
    """Ask the run in output/graft/<run> to end after its current step; False when no such run is under way."""
    if run not in _finish:
        return False
    _finish[run] = True
    return True


@contextmanager
def session(run: str, *, first: int, last: int, node_id: str | None = None) -> Iterator[OnStep]:
    """Yield the `on_step` of a run from step `first` to step `last`.

    It moves the node's progress bar and text, raises ComfyUI's interrupt on Cancel, and returns STOP after Finish.
    """
    bar = comfy.utils.ProgressBar(last - first, node_id=node_id)
    smooth = _Smooth()
    began, told = time.monotonic(), 0.0
    start: list[int] = []
    _finish[run] = False

    def on_step(progress: Progress) -> str | None:
        nonlocal told
        start.append(progress.step - 1) if not start else None
        loss = smooth(progress.loss)
        bar.update_absolute(progress.step - first, last - first)
        now = time.monotonic()
        if now - told > 0.5 or progress.step == last:
            told = now
            left = (last - progress.step) * (now - began) / (progress.step - start[0])
            text = f"step {progress.step}/{last}  loss {loss:.4f}  {progress.seconds:.2f} s/step  {clock(left)} left"
            _send_text(text, node_id)
            log.info("Graft: %s", text)
        comfy.model_management.throw_exception_if_processing_interrupted()
        return STOP if _finish[run] else None

    try:
        yield on_step
    finally:
        del _finish[run]


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """Yield an `on_progress` that moves the node's bar and raises ComfyUI's interrupt on Cancel."""
    bar = comfy.utils.ProgressBar(1)

    def on_progress(done: int, total: int, message: str) -> None:
        bar.update_absolute(done, max(total, 1))
        comfy.model_management.throw_exception_if_processing_interrupted()

    yield on_progress


def clock(seconds: float) -> str:
    """Return a duration as people read it: 0:42, 12:05, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Smooth:
    """Exponential mean over about 50 steps, unbiased from the first."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def __call__(self, value: float) -> float:
        self.total, self.weight = 0.98 * self.total + value, 0.98 * self.weight + 1.0
        return self.total / self.weight


def _send_text(text: str, node_id: str | None) -> None:
    """Show a line on the node, where a server is running and its version can."""
    server = running_server()
    if server is not None and node_id is not None and hasattr(server, "send_progress_text"):
        server.send_progress_text(text, node_id)
