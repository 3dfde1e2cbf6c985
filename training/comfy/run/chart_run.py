"""The run that a Train Steps charts in the editor: the one queued with its present settings."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import nodes

from ...config import ADDED
from ...run.queued import QUEUED, nodes_of, read_queued, run_settings
from .. import paths
from .session import known_runs

TRAIN_STEPS = "GraftTrainSteps"


def chart_runs(graph: Any, workflow: Any) -> dict[str, dict[str, Any]]:
    """Return the run that each Train Steps of a graph shows, by node id.

    "same" is true if the run was queued with the node's settings; otherwise it is the node's latest run.
    Raises UserError if `graph` is not a graph.
    """
    shown = {}
    for node_id, values in nodes_of(graph).items():
        if values.get("class_type") == TRAIN_STEPS:
            settings = run_settings(graph, node_id, added_inputs)
            same = _latest_known(settings=settings) or _latest_saved(values["inputs"].get("name"), settings)
            if run := same or _latest_known(node=node_id, workflow=workflow or ""):
                shown[node_id] = {**run, "same": same is not None}
    return shown


def added_inputs(kind: str) -> dict[str, Any]:
    """Return {input: default} of the inputs that a class of nodes got later (`nodes.widgets.added`)."""
    schema = getattr(nodes.NODE_CLASS_MAPPINGS.get(kind), "SCHEMA", None)  # None for nodes of the old kind
    inputs = schema.inputs if schema else ()
    return {entry.id: entry.default for entry in inputs if ADDED in (entry.extra_dict or {})}


def _latest_known(**wanted: Any) -> dict[str, Any] | None:
    """Return the latest run of this server with these values."""
    runs = reversed(known_runs())
    return next((run for run in runs if all(run[name] == value for name, value in wanted.items())), None)


def _latest_saved(name: Any, settings: str) -> dict[str, Any] | None:
    """Return the latest run of this name in output/graft that was queued with `settings`."""
    saved = []
    with suppress(OSError, ValueError):  # the name is not usable
        pattern = paths.run_folder(str(name), "")
        for folder in pattern.parent.glob("*"):
            key = folder.name.removeprefix(pattern.name)
            if folder.name.startswith(pattern.name) and re.fullmatch("[0-9a-f]{16}", key):
                last = read_queued(folder).get(settings)
                if last is not None:
                    saved.append(((folder / QUEUED).stat().st_mtime, folder, last))
    if not saved:
        return None
    _, folder, last = max(saved)
    return {"run": paths.run_name(folder), "last": last, "running": False, "finishing": False}
