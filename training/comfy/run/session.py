"""A run as ComfyUI shows it: progress on the node, Cancel and Finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import comfy.model_management
import comfy.utils

from ...log import log
from ...loop import STOP, Progress
from ...run.run_log import describe
from ...user_error import UserError
from ..progress import EVENTS_A_SECOND
from ..versions import running_server

CANNOT = {
    "draw": "This run has no Sample Prompts: connect them to Train Steps, Cancel and run the graph again.",
    "save": "This run is trained by several processes, which save as Checkpoint Settings say.",
}
"""Why a run does not do what it is asked for."""

Show = Callable[[Progress], str | None]
"""Shows a step that was done, here or in another process; returns STOP to end the run."""


@dataclass
class LiveRun:
    """The state of a run for the editor: its node and its progress. The log has the rest."""

    run: str
    """Its folder under output/graft."""
    node: str | None
    """The node that trains it; inside subgraphs "12:3"."""
    workflow: str | None
    """Id of the workflow that was queued; None if the prompt came without one."""
    first: int
    last: int
    step: int
    settings: str = ""
    """Digest of the settings it was queued with."""
    running: bool = True
    finishing: bool = False
    can: list[str] = field(default_factory=list)
    """What it does on request before its next step: "draw" samples, "save"."""
    asked: list[str] = field(default_factory=list)
    """What of that it was asked for and has not begun."""


_runs: dict[str, LiveRun] = {}
"""Runs of this process by name, the latest last."""


def known_runs() -> list[dict[str, Any]]:
    """Return what the editor knows of each run of this process."""
    return [asdict(run) for run in list(_runs.values())]


def request_finish(run: str) -> bool:
    """Ask the run in output/graft/<run> to end after its current step; return False if it is not training."""
    live = _runs.get(run)
    if live is None or not live.running:
        return False
    live.finishing = True
    return True


def request_now(run: str, what: str) -> None:
    """Ask the run in output/graft/<run> to "draw" or "save" after its current step. Raises UserError if it is
    not training, or cannot.
    """
    live = _runs.get(run)
    if live is None or not live.running:
        raise UserError(f"{run} is not being trained now.")
    if what not in live.can:
        raise UserError(CANNOT.get(what, f"a run cannot {what}."))
    live.asked.append(what)


def take_request(run: str, what: str) -> bool:
    """Return whether the run was asked for this since the last call."""
    asked = _runs[run].asked
    if what not in asked:
        return False
    asked[:] = [each for each in asked if each != what]
    return True


@contextmanager
def show_run(
    run: str,
    *,
    first: int,
    last: int,
    node_id: str | None = None,
    workflow: str | None = None,
    settings: str = "",
    can: Sequence[str] = (),
) -> Iterator[Show]:
    """Yield the function that shows each step of a run from step `first` to step `last`.

    It moves the node's progress bar, sends the editor how far the run is (another client gets that as the
    node's text), raises ComfyUI's interrupt on Cancel, and returns STOP after Finish.
    """
    bar = comfy.utils.ProgressBar(last - first, node_id=node_id)
    _runs.pop(run, None)
    live = _runs[run] = LiveRun(run, node_id, workflow, first, last, first, settings, can=list(can))
    logged = sent = 0.0

    def show(progress: Progress) -> str | None:
        nonlocal logged, sent
        bar.update_absolute(progress.step - first, last - first)
        live.step = progress.step
        now = time.monotonic()
        if now - sent > 1 / EVENTS_A_SECOND:
            sent = now
            _send_run(live)
        if now - logged > 0.5 or progress.step == last:
            logged = now
            if workflow is None:  # with one, the editor shows a chart
                _send_text(describe(progress), node_id)
            log.info("%s", describe(progress))
        comfy.model_management.throw_exception_if_processing_interrupted()
        return STOP if live.finishing else None

    _send_run(live)
    try:
        yield show
    finally:
        live.running = live.finishing = False
        live.asked.clear()
        _send_run(live)


def _send_text(text: str, node_id: str | None) -> None:
    """Show a line on the node, if a server is running and its version can."""
    server = running_server()
    if server is not None and node_id is not None and hasattr(server, "send_progress_text"):
        server.send_progress_text(text, node_id)


def _send_run(live: LiveRun) -> None:
    """Send the event graft.run to every page, if a server is running."""
    server = running_server()
    if server is not None:
        server.send_sync("graft.run", asdict(live))
