"""The graph of a run: kept in its folder, so that a run can be continued when its workflow is long gone.

A run from before has it in its sample images; where there are none, a graph is made from its settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from ...files.input_file import parse_json
from ...run.checkpoints import Checkpoints
from ...run.folder import Run
from ...run.new_run_notes import read_settings
from ...run.queued import read_queued
from ...run.run_files import list_files
from ...run.saved_state import read_object, write_text
from .chart_run import TRAIN_STEPS

GRAPH = "graph.json"
"""File in a run's folder: {"node": its Train Steps, "prompt": the graph in API form, "workflow": as the
editor has it, or null}."""
AS_IS, MORE_STEPS, FROM_STATE = "as is", "more steps", "from state"
"""How a graph goes on with its run: queued again; with more steps, which its Train Steps then needs; or from
its newest training state, because its schedule ends with its steps."""


def note_graph(folder: Path, node: str | None, prompt: Mapping[str, Any] | None, workflow: Any) -> None:
    """Keep the graph that a run was queued from."""
    with suppress(OSError, TypeError, ValueError):
        write_text(folder / GRAPH, json.dumps({"node": node, "prompt": prompt, "workflow": workflow}))


def read_graph(folder: Path, run: str) -> dict[str, Any]:
    """Return {node, prompt, workflow, how, steps}: a graph that continues the run called `run` in `folder`.

    `steps` is the number to set for MORE_STEPS.
    """
    settings = read_settings(Run(folder))
    found = _kept(folder) or _in_samples(folder)
    if found is None:
        return {**_made(run, settings), "how": AS_IS, "steps": 0}
    checkpoints = Checkpoints(Run(folder))
    reached = max(checkpoints.steps(), default=0)
    last = next(reversed(read_queued(folder).values()), 0)
    inputs = found["prompt"][found["node"]]["inputs"]
    steps = inputs.get("steps")
    if not reached or not (reached >= last or checkpoints.is_end(reached, last)):
        how = AS_IS
    elif type(steps) is int and (settings.get("schedule.name") == "constant" or inputs.get("total_steps")):
        how = MORE_STEPS
    else:
        how = FROM_STATE
    begun_at = last - steps if type(steps) is int else 0
    return {**found, "how": how, "steps": reached - begun_at + steps if how == MORE_STEPS else 0}


def _kept(folder: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        kept = read_object(folder / GRAPH)
        return _checked(kept.get("node"), kept.get("prompt"), kept.get("workflow"))
    return None


def _in_samples(folder: Path) -> dict[str, Any] | None:
    """Return the graph in the newest sample image of a run that was trained before graphs were kept."""
    for sample in reversed(list_files(folder)["samples"][-8:]):
        with suppress(OSError, ValueError, AttributeError):
            with Image.open(folder / "samples" / sample["name"]) as image:
                texts = {
                    name: parse_json(image.text[name])
                    for name in ("prompt", "workflow")
                    if name in image.text
                }
            if found := _checked(None, texts.get("prompt"), texts.get("workflow")):
                return found
    return None


def _checked(node: Any, prompt: Any, workflow: Any) -> dict[str, Any] | None:
    """Return a graph whose Train Steps is `node`, or the only one if that is unknown; else None."""
    if not isinstance(prompt, dict) or not all(isinstance(each, dict) for each in prompt.values()):
        return None
    trains = [key for key, each in prompt.items() if each.get("class_type") == TRAIN_STEPS]
    if node not in trains:
        node = trains[0] if len(trains) == 1 else None
    if node is None or not isinstance(prompt[node].get("inputs"), dict):
        return None
    return {"node": node, "prompt": prompt, "workflow": workflow if isinstance(workflow, dict) else None}


def _made(run: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a graph with a run's settings and its newest state; its model and images are to be chosen."""
    known = {"learning_rate": "optimizer.lr", "batch_size": "batch_size", "seed": "seed"}
    values = {name: settings[setting] for name, setting in known.items() if setting in settings}
    wires = {"model": ["1", 0], "dataset": ["3", 0], "start": ["4", 0]}
    encode = {"dataset": ["2", 0], "model": ["1", 0], "clip": ["1", 1], "vae": ["1", 2]}
    prompt = {
        "1": {"class_type": "GraftLoadBaseModel", "inputs": {}},
        "2": {"class_type": "GraftLoadDataset", "inputs": {}},
        "3": {"class_type": "GraftEncodeDataset", "inputs": encode},
        "4": {"class_type": "GraftLoadTrainingState", "inputs": {"name": run}},
        "5": {"class_type": TRAIN_STEPS, "inputs": {**wires, **values, "name": run.rpartition("-")[0]}},
    }
    return {"node": "5", "prompt": prompt, "workflow": None}
