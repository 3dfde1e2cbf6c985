"""SIGTERM and Ctrl-C let a run finish its step and save itself before they end the process.

Python delivers signals to the main thread only. A run in the main thread (the command line) handles them
itself; for others (ComfyUI's) the main thread calls `save_at_exit` once, when the extension is loaded.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .log import log

GRACE = 60.0
"""Seconds that the runs of other threads get to finish their step and save."""

_asked: list[int] = []
"""Signals that came and no run has acted on."""
_running = 0
_lock = threading.Lock()


class Terminated(BaseException):
    """The process was asked to end; what was trained is saved."""


@contextmanager
def defer_signals() -> Iterator[None]:
    """Mark a run as under way; in the main thread, put signals off until `raise_if_asked`."""
    global _running
    with _lock:
        _running += 1
    try:
        with handle_signals(_put_off, signal.SIGTERM, signal.SIGINT):
            yield
    finally:
        with _lock:
            _running -= 1


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """In the main thread, let `handler` answer these signals for the duration of the context."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def raise_if_asked() -> None:
    """Raise if a signal came since the last call: KeyboardInterrupt for Ctrl-C, SystemExit or Terminated."""
    if not _asked:
        return
    if threading.current_thread() is not threading.main_thread():
        raise Terminated("the server is being stopped; the run is saved and goes on when it is queued again.")
    number = _asked.pop()
    _asked.clear()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def save_at_exit() -> None:
    """From the main thread: let runs of other threads save before SIGTERM, or Ctrl-C, ends the process."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        _let_runs_save(number)
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
    atexit.register(_let_runs_save, signal.SIGINT)  # where ComfyUI's own answer to Ctrl-C leads


def _let_runs_save(number: int) -> None:
    if not _running:
        return
    log.info("saving what was trained before the process ends.")
    _asked.append(number)
    deadline = time.monotonic() + GRACE
    while _running and time.monotonic() < deadline:
        time.sleep(0.05)


def _put_off(number: int, frame: Any) -> None:
    if _asked and number == signal.SIGINT:  # asked twice: now
        _asked.clear()
        raise KeyboardInterrupt
    _asked.append(number)
