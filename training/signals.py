"""SIGTERM and Ctrl-C during a run: the step finishes and is saved before the process ends.

Python delivers signals to the main thread only. A run in the main thread (the command line) handles them
itself. For runs in other threads (ComfyUI's), the main thread calls `save_at_exit` once, when the extension
is loaded.
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
"""Seconds that runs in other threads have to finish their step and save."""

_pending: list[int] = []
"""Signals that no run has acted on yet."""
_running = 0
_lock = threading.Lock()


class Terminated(BaseException):
    """The process was asked to end. What was trained is saved."""


@contextmanager
def defer_signals() -> Iterator[None]:
    """Count a run as under way; in the main thread, also defer signals until `raise_if_asked`."""
    global _running
    with _lock:
        _running += 1
    try:
        with handle_signals(_defer, signal.SIGTERM, signal.SIGINT):
            yield
    finally:
        with _lock:
            _running -= 1


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None], *signals: int) -> Iterator[None]:
    """In the main thread, let `handler` handle these signals during the context."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.signal(signum, handler) for signum in signals if is_main}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


def raise_if_asked() -> None:
    """Raise if a signal came since the last call: KeyboardInterrupt for Ctrl-C, SystemExit for SIGTERM, and
    Terminated outside the main thread."""
    if not _pending:
        return
    if threading.current_thread() is not threading.main_thread():
        raise Terminated("the server is being stopped. The run is saved; queue it again to go on.")
    signum = _pending.pop()
    _pending.clear()
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


def save_at_exit() -> None:
    """Let runs in other threads save before SIGTERM or Ctrl-C ends the process. Called by the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    def handle(signum: int, frame: FrameType | None) -> None:
        _let_runs_save(signum)
        if callable(before):
            before(signum, frame)
        else:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, handle)
    atexit.register(_let_runs_save, signal.SIGINT)  # ComfyUI answers Ctrl-C by exiting


def _let_runs_save(signum: int) -> None:
    if not _running:
        return
    log.info("saving what was trained, before the process ends.")
    _pending.append(signum)
    deadline = time.monotonic() + GRACE
    while _running and time.monotonic() < deadline:
        time.sleep(0.05)


def _defer(signum: int, frame: Any) -> None:
    if _pending and signum == signal.SIGINT:  # the second Ctrl-C ends it at once
        _pending.clear()
        raise KeyboardInterrupt
    _pending.append(signum)
