"""The graphs that a run was queued from: digests of a Train Steps' settings and of everything before it.

A run's folder keeps the digests it was queued with. They tell which run belongs to a graph, also after the
server was restarted. The id of the workflow does not: a graph that is opened from an image has the same one.
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
"""Inputs of Train Steps that do not make it another run."""
QUEUED = "queued.json"
"""File in a run's folder: digests of the settings it was queued with, each with its target step."""
MOST_QUEUED = 20

Added = Callable[[str], Mapping[str, Any]]
"""Return {input: default} of the inputs that a class of nodes got later: at their default digests leave them
out, as settings that are `config.added`."""


def none_added(kind: str) -> Mapping[str, Any]:
    """Return no input."""
    return {}


def settings_of(graph: Any, added: Added = none_added) -> dict[str, str]:
    """Return a digest of each node of a graph in API form: its class, its inputs, and where they come from.

    Raises UserError if `graph` is not a graph.
    """
    nodes, known = nodes_of(graph), dict[str, str]()
    return {node: _digest(nodes, node, known, added) for node in nodes}


def run_settings(graph: Any, node: str | None, added: Added = none_added) -> str:
    """Return the digest of what decides the run of a Train Steps; "" if the graph has no such node."""
    with suppress(ValueError, KeyError):
        return _digest(nodes_of(graph), str(node), {}, added, OF_ANY_RUN)
    return ""


def note_queued(folder: Path, settings: str, last: int) -> None:
    """Record in a run's folder that it was queued with these settings, to step `last`."""
    newest = [*read_queued(folder).items(), (settings, last)][-MOST_QUEUED:]
    with suppress(OSError):
        write_text(folder / QUEUED, json.dumps(dict(newest), indent=1))


def read_queued(folder: Path) -> dict[str, int]:
    """Return the digests that the run in `folder` was queued with, each with its target step."""
    with suppress(OSError, ValueError):
        return {
            settings: last for settings, last in read_object(folder / QUEUED).items() if type(last) is int
        }
    return {}


def nodes_of(graph: Any) -> Mapping[str, Any]:
    """Return the nodes of a graph in API form. Raises UserError if `graph` is not one."""
    if not isinstance(graph, dict) or not all(
        isinstance(node, dict) and isinstance(node.get("inputs"), dict) for node in graph.values()
    ):
        raise UserError("not a graph in API form")
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
            known[node] = ""  # in case the graph has a circle
            kind, values = graph[node].get("class_type"), graph[node]["inputs"]
            later = added(str(kind))
            inputs = {name: settle(values[name]) for name in values if name not in left_out}
            inputs = {name: v for name, v in inputs.items() if name not in later or v != later[name]}
            known[node] = digest(kind, inputs)
        return known[node]

    def settle(value: Any) -> Any:
        """Return the value of an input, or the digest of the node on its wire."""
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and value[0] in graph:
            return [of(value[0]), value[1]]
        whole = isinstance(value, float) and value.is_integer()
        return int(value) if whole else value  # a browser sends 1 for 1.0

    try:
        return of(node, left_out)
    except RecursionError as error:
        raise UserError("not a graph in API form: it is nested too deeply") from error
