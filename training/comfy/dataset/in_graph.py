"""The images that a graph in API form asks for, before any of its nodes has run: nothing is encoded."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import nodes

from ...data.bucket import buckets_for
from ...data.config import DatasetConfig
from ...data.folder import find_images
from ...data.join import join
from ...data.roots import resolve_dataset
from ...data.samples import ImageSet
from ...user_error import UserError
from .. import paths

LOAD_DATASET, SETTINGS = "GraftLoadDataset", "GraftDatasetSettings"
JOIN, SPLIT = "GraftJoinDatasets", "GraftSplitDataset"
STEP = 64
"""Pixels between two sizes of a bucket, for most models."""


def folder_and_config(graph: Any, node: Any) -> tuple[str, DatasetConfig]:
    """Return the folder and the settings of a Load Dataset. Raises UserError if it is none, or its folder
    comes from another node.
    """
    try:
        inputs = _inputs(graph, node, LOAD_DATASET)
        link = inputs.get("dataset_settings")
        others = _inputs(graph, link[0], SETTINGS) if isinstance(link, list) else {}
        folder = inputs["folder"]
        config = nodes.NODE_CLASS_MAPPINGS[LOAD_DATASET].config_of(_values(inputs), _values(others))
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise UserError(f"not a graph with this Load Dataset ({type(error).__name__}).") from error
    if not isinstance(folder, str):
        raise UserError("The folder comes from another node; only a folder chosen here can be shown.")
    return folder, config


def count_showings(graph: Mapping[str, Any], link: Any) -> tuple[float, int]:
    """Return how many images an epoch shows, repeats and resolutions counted, and the largest resolution of
    the dataset on a wire. Of a share that Split Dataset holds out by content, only the number is known.

    Raises UserError or LookupError if the dataset is not one from folders.
    """
    entry = graph[str(link[0])]
    inputs = entry["inputs"]
    if entry["class_type"] != SPLIT:
        images = find_dataset(graph, link)
        return sum(_showings(images)), _largest(images)
    images = find_dataset(graph, inputs["dataset"])
    showings, config = _showings(images), nodes.NODE_CLASS_MAPPINGS[SPLIT].config_of(_values(inputs))
    regular = [images.source(sample).config.regularisation for sample in images.samples]
    free = [not each for each in regular]
    count = max(1, round(config.fraction * sum(free))) if config.fraction else 0
    chance = count / max(1, sum(free))
    held = sum(
        shown * (1.0 if any(fnmatchcase(sample.name, glob) for glob in config.names) else chance)
        for sample, shown, may in zip(images.samples, showings, free, strict=True)
        if may
    )
    return (held if link[1] else sum(showings) - held), _largest(images)


def find_dataset(graph: Mapping[str, Any], link: Any) -> ImageSet:
    """Return the images of the dataset on a wire, from the headers of their files.

    Raises UserError or LookupError if they do not all come from folders.
    """
    node = str(link[0])
    kind, inputs = graph[node]["class_type"], graph[node]["inputs"]
    if kind == LOAD_DATASET:
        folder, config = folder_and_config(graph, node)
        names = [folder, *nodes.NODE_CLASS_MAPPINGS[LOAD_DATASET].reference_folders(config)]
        root, *references = (resolve_dataset(name, paths.dataset_roots()) for name in names)
        return find_images(root, config, references=references)
    wires = [inputs[name] for name in sorted(inputs) if name.startswith("dataset")]
    found = [find_dataset(graph, wire) for wire in wires if isinstance(wire, list)]
    if kind == JOIN:
        return join(found, shares=nodes.NODE_CLASS_MAPPINGS[JOIN].shares_of(_values(inputs)))
    return found[0]


def _showings(images: ImageSet) -> list[int]:
    """Return how often an epoch shows each sample."""
    configs = [source.config.bucket for source in images.sources]
    return [
        s.repeats * (1 if s.is_sound else len(buckets_for(s.width, s.height, configs[s.source], step=STEP)))
        for s in images.samples
    ]


def _largest(images: ImageSet) -> int:
    return max(max(source.config.bucket.resolutions) for source in images.sources)


def _inputs(graph: Any, node: Any, kind: str) -> dict[str, Any]:
    entry = graph[str(node)]
    if entry["class_type"] != kind:
        raise LookupError(kind)
    return dict(entry["inputs"])


def _values(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the widgets' values; those that other nodes give are at their defaults."""
    return {name: value for name, value in inputs.items() if not isinstance(value, list)}
