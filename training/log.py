"""Graft's one logger. Each of its lines begins with "Graft:" and can be written to any log."""

from __future__ import annotations

import logging

from .files.text import make_readable, readable

log = logging.getLogger("graft")


def _prepare(record: logging.LogRecord) -> bool:
    record.msg, record.args = f"Graft: {readable(record.getMessage())}", ()
    if record.exc_info and record.exc_info[1] is not None:
        make_readable(record.exc_info[1])
    return True


if not log.filters:  # loaded under a second name, as by tests
    log.addFilter(_prepare)
