"""Graphs for the cases: parts of Graft's own workflow, on its tiny base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

Prompt = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / "example_workflows" / "api" / "first_lora.json"
BASE_MODEL = ROOT / "starter" / "base" / "graft_tiny_sd3.safetensors"
TEXT_ENCODER = "graft_tiny_clip_l.safetensors"
BASE, DATASET, ENCODE, LORA, TRAIN, SAVE = "1", "2", "3", "4", "5", "6"
"""Its nodes."""


def part(*nodes: str, **inputs: dict[str, Any]) -> Prompt:
    """Return nodes of the workflow for two pictures of 64 pixels, and what else is named by its node.

    `inputs` change those of a class: GraftTrainSteps={"steps": 2}.
    """
    graph = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    graph[DATASET]["inputs"] |= {"folder": "tiny", "resolution": "64", "caption_dropout": 0.0}
    graph[LORA]["inputs"]["rank"] = 2
    graph[TRAIN]["inputs"] |= {"steps": 1, "batch_size": 1, "name": "sweep"}
    graph[SAVE]["inputs"] |= {"name": "sweep", "dtype": "fp32"}
    chosen = {node_id: graph[node_id] for node_id in nodes}
    for node in chosen.values():
        node["inputs"] |= inputs.get(node["class_type"], {})
    return chosen


def node(kind: str, **inputs: Any) -> Prompt:
    """Return a node by its class and inputs."""
    return {"class_type": kind, "inputs": inputs}


def shown(graph: Prompt, node_id: str, output: int = 0) -> Prompt:
    """Return a graph with a stock node that has an output computed."""
    return {**graph, "90": node("PreviewAny", source=[node_id, output])}


def write_pictures(folder: Path) -> None:
    """Write two squares with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    for color in ("red", "blue"):
        Image.new("RGB", (64, 64), color).save(folder / f"{color}.png")
        (folder / f"{color}.txt").write_text(f"a {color} square")
