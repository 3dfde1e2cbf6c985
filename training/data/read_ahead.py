"""Items loaded ahead in threads, so that reading overlaps with computing and Cancel works at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

LOADERS = min(4, os.cpu_count() or 1)
"""Threads that load, and the most results that are ready in advance."""
_SECONDS = 0.25
"""Seconds between checks for Cancel."""

A = TypeVar("A")
B = TypeVar("B")


def load_ahead(load: Callable[[A], B], items: Sequence[A], report: Callable[[int], None]) -> Iterator[B]:
    """Yield load(item) in order, while threads load the next few.

    `report` is called with the number done: before each item, repeatedly while waiting for it, and at the
    end. It may raise to cancel; loads that have begun then finish on their own.
    """
    pool = ThreadPoolExecutor(LOADERS)
    try:
        waiting: deque[Future[B]] = deque()
        for done in range(len(items)):
            begun = done + len(waiting)
            waiting += [pool.submit(load, item) for item in items[begun : done + LOADERS + 1]]
            report(done)
            first = waiting.popleft()
            while not wait([first], _SECONDS).done:
                report(done)
            yield first.result()
        report(len(items))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
