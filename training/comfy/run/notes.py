"""Notes on a run before it starts: a distilled base, patches, captions that are encoded again, a resolution
that the base was not made for, settings without effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...adapters.build import ineffective_patterns
from ...config import TrainConfig
from ...family import Family, family_of
from ...ineffective_settings import ineffective_notes, run_settings
from ...model import Batch
from ...optimizer.build import optimizer_notes
from ...optimizer.schedule import schedule_notes
from ..model.denoiser import ComfyDenoiser
from ..model.unseen import find_unseen
from .loader_faults import loader_notes

MODEL_FILES = ("model", "ckpt_name", "unet_name", "model_name", "gguf_name")
"""Widgets in which loaders, ours or others, name the file of a base model."""


def family_in(file: str, model: Any) -> Family:
    """Return the family of a MODEL. The name of its `file` ("" if unknown) may tell that it is distilled."""
    config = model.model.model_config
    return family_of(type(config).__name__, config.unet_config, file=file)


def run_notes(
    denoiser: ComfyDenoiser,
    config: TrainConfig,
    family: Family,
    total: int,
    sizes: Iterable[tuple[int, int]] = (),
) -> list[str]:
    """Return a sentence for everything unusual about a run of `total` steps and for settings without effect.

    `family` is the one that the base's file names; `sizes` are (width, height) of the images in pixels.
    """
    patches = denoiser.patcher.patches
    notes = [f"{family.name}: {note}" for note in family.notes]
    if patches:
        notes.append(
            f"the incoming MODEL has patches on {len(patches)} weights (a LoRA loaded before): they apply "
            "while training but are not part of the result; load them beside it where they matter."
        )
    if config.adapter.text_encoder:
        notes.append(
            "text encoders are trained: captions are encoded in every step; the text cache is not used."
        )
    made_for, side = family.resolution, max((width * height for width, height in sizes), default=0) ** 0.5
    if made_for and side > 1.5 * made_for:
        notes.append(
            f"{family.name} was made for images of about {made_for} px and is trained at {side:.0f}, where "
            f"it tends to draw things twice; set the resolution in Load Dataset to {made_for}."
        )
    notes += ineffective_patterns(denoiser.specs, denoiser.family, config.adapter)
    notes += loader_notes(config.adapter)
    notes += [*optimizer_notes(config.optimizer), *schedule_notes(config.schedule, total)]
    return notes + ineffective_notes(run_settings(config, denoiser.family), run_settings(TrainConfig()))


def unseen_notes(denoiser: ComfyDenoiser, batch: Batch) -> list[str]:
    """Return a sentence for what of a sample's conditioning the model does not look at."""
    names = find_unseen(denoiser, batch.conditioning[0], batch.latents)
    listed, name = ", ".join(sorted(names)), denoiser.family.name
    return [f"conditioning: {name} does not look at {listed}, so it learns nothing from it."] * bool(names)


def model_file(prompt: Mapping[str, Any] | None, node_id: str | None) -> str:
    """Return the file that the `model` input of a node comes from in the queued graph; "" if unknown."""
    nodes, seen = prompt or {}, set()
    waiting = [_source(nodes, str(node_id), "model")]
    while waiting:
        source = waiting.pop()
        if source in seen or source not in nodes:
            continue
        seen.add(source)
        inputs = nodes[source].get("inputs", {})
        for name in MODEL_FILES:
            if isinstance(inputs.get(name), str):
                return str(inputs[name])
        waiting += [value[0] for value in inputs.values() if isinstance(value, list) and value]
    return ""


def _source(nodes: Mapping[str, Any], node_id: str, name: str) -> str:
    value = nodes.get(node_id, {}).get("inputs", {}).get(name)
    return str(value[0]) if isinstance(value, list) and value else ""
