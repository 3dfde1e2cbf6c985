"""Reading ahead in threads, so that reading overlaps with what is done with it, and Cancel need not wait."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

LOADERS = min(4, os.cpu_count() or 1)
"""Threads that read, and how many results at most are ready before they are asked for."""
_SECONDS = 0.25
"""Between two looks at whether Cancel was pressed."""

A = TypeVar("A")
B = TypeVar("B")


def load_ahead(load: Callable[[A], B], items: Sequence[A], report: Callable[[int], None]) -> Iterator[B]:
    """Yield load(item) in order; threads load the next few meanwhile, outside Python's lock.

    `report` gets how many are done, before each, in the end, and again and again while one is waited for; it
    may raise to cancel. What the threads have begun then ends by itself.
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
