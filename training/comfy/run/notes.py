"""What a person should know of a run before it has cost time: a distilled base, patches, captions encoded
anew, a resolution that the base was not made for, settings without effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...adapters.build import idle_patterns
from ...config import TrainConfig
from ...family import Family, family_of
from ...idle_settings import idle_notes, run_settings
from ...optimizer.build import optimizer_notes
from ...optimizer.schedule import schedule_notes
from ..model.denoiser import ComfyDenoiser

MODEL_FILES = ("model", "ckpt_name", "unet_name", "model_name", "gguf_name")
"""Widgets in which loaders, ours and others', name the file of a base model."""


def family_in(file: str, model: Any) -> Family:
    """Return a MODEL's family from its base model's `file` ("": not known); the name may say distilled."""
    config = model.model.model_config
    return family_of(type(config).__name__, config.unet_config, file=file)


def run_notes(
    denoiser: ComfyDenoiser,
    config: TrainConfig,
    family: Family,
    total: int,
    sizes: Iterable[tuple[int, int]] = (),
) -> list[str]:
    """Return a sentence for all that is unusual about a run of `total` steps, and for settings of no effect.

    `family` is that of its base's file; `sizes` are those of the pictures, (width, height) in pixels.
    """
    patches = denoiser.patcher.patches
    found = [f"{family.name}: {note}" for note in family.notes]
    if patches:
        found.append(
            f"the incoming MODEL carries patches on {len(patches)} weights (a LoRA loaded before): they "
            "apply while training and are no part of the result; load them beside it where they matter."
        )
    if config.adapter.text_encoder:
        found.append(
            "text encoders are trained: captions are encoded in every step, and what the text cache holds of "
            "them is not used."
        )
    made_for, side = family.resolution, max((width * height for width, height in sizes), default=0) ** 0.5
    if made_for and side > 1.5 * made_for:
        found.append(
            f"{family.name} was made for pictures of about {made_for} px and is trained at {side:.0f}, where "
            f"it tends to draw things twice; {made_for} is the resolution to set in Load Dataset."
        )
    found += idle_patterns(denoiser.specs, denoiser.family, config.adapter)
    found += [*optimizer_notes(config.optimizer), *schedule_notes(config.schedule, total)]
    return found + idle_notes(run_settings(config, denoiser.family), run_settings(TrainConfig()))


def model_file(prompt: Mapping[str, Any] | None, node_id: str | None) -> str:
    """Return the file that the `model` input of a node comes from in the queued graph, or ""."""
    nodes, seen = prompt or {}, set()
    waiting = [_source(nodes, str(node_id), "model")]
    while waiting:
        number = waiting.pop()
        if number in seen or number not in nodes:
            continue
        seen.add(number)
        inputs = nodes[number].get("inputs", {})
        for name in MODEL_FILES:
            if isinstance(inputs.get(name), str):
                return str(inputs[name])
        waiting += [value[0] for value in inputs.values() if isinstance(value, list) and value]
    return ""


def _source(nodes: Mapping[str, Any], number: str, name: str) -> str:
    value = nodes.get(number, {}).get("inputs", {}).get(name)
    return str(value[0]) if isinstance(value, list) and value else ""
