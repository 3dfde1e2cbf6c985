"""What a queued graph asks of a run: a digest of a node's settings and of all that comes before it.

A run's folder keeps the digests that it was queued with. They tell which run is a graph's own, also to a
server that was started later. The id of the workflow does not: the graph in a picture has the same one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import digest
from ..user_error import UserError
from .saved_state import read_object, write_text

OF_ANY_RUN = ("steps", "sample_prompts", "checkpoint_settings", "gpus")
"""Inputs of Train Steps that make no other run."""
QUEUED = "queued.json"
"""File in a run's folder: digests of the settings that it was queued with, and the last step asked for."""
MOST_QUEUED = 20

Added = Callable[[str], Mapping[str, Any]]
"""Return {input: default} of the inputs that a class of nodes got later: at their default digests leave them
out, as settings that are `config.added`."""


def none_added(kind: str) -> Mapping[str, Any]:
    """Return no input."""
    return {}


def settings_of(graph: Any, added: Added = none_added) -> dict[str, str]:
    """Return a digest of each node of a graph in API form: its class, its inputs, and where they come from.

    Raises UserError for what is no graph.
    """
    known: dict[str, str] = {}
    return {node: _digest(nodes_of(graph), node, known, added) for node in graph}


def run_settings(graph: Any, node: str | None, added: Added = none_added) -> str:
    """Return the digest of what makes the run of a Train Steps, "" for a node that is in no graph."""
    with suppress(ValueError, KeyError):
        return _digest(nodes_of(graph), str(node), {}, added, OF_ANY_RUN)
    return ""


def note_queued(folder: Path, settings: str, last: int) -> None:
    """Note in a run's folder that it was queued to step `last` with these settings."""
    newest = [*read_queued(folder).items(), (settings, last)][-MOST_QUEUED:]
    with suppress(OSError):
        write_text(folder / QUEUED, json.dumps(dict(newest), indent=1))


def read_queued(folder: Path) -> dict[str, int]:
    """Return the digests that the run in `folder` was queued with, each with the last step asked for."""
    with suppress(OSError, ValueError):
        return {
            settings: last for settings, last in read_object(folder / QUEUED).items() if type(last) is int
        }
    return {}


def nodes_of(graph: Any) -> Mapping[str, Any]:
    """Return the nodes of a graph in API form. Raises UserError for what is none."""
    if not isinstance(graph, dict) or not all(
        isinstance(node, dict) and isinstance(node.get("inputs"), dict) for node in graph.values()
    ):
        raise UserError("no graph in API form")
    return graph


def _digest(
    graph: Mapping[str, Any],
    node: str,
    known: dict[str, str],
    added: Added,
    left_out: Collection[str] = (),
) -> str:
    def of(node: str, left_out: Collection[str] = ()) -> str:
        if node not in known:
            known[node] = ""  # where the graph is a circle
            kind, given = graph[node].get("class_type"), graph[node]["inputs"]
            later = added(str(kind))
            inputs = {name: value(given[name]) for name in given if name not in left_out}
            inputs = {name: v for name, v in inputs.items() if name not in later or v != later[name]}
            known[node] = digest(kind, inputs)
        return known[node]

    def value(given: Any) -> Any:
        if isinstance(given, list) and len(given) == 2 and isinstance(given[0], str) and given[0] in graph:
            return [of(given[0]), given[1]]
        whole = isinstance(given, float) and given.is_integer()
        return int(given) if whole else given  # a browser sends 1 for 1.0

    try:
        return of(node, left_out)
    except RecursionError as error:
        raise UserError("no graph in API form: it is nested too deeply") from error
