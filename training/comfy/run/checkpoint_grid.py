"""A run in one image: its loss, or samples of its checkpoints side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from PIL import Image

from ...family import Family, family_named
from ...log import log
from ...model import OnProgress
from ...run.checkpoints import Checkpoints
from ...run.folder import Run
from ...run.plots import Column, loss_plot, sample_grid
from ...run.saved_state import StateHandle
from ...state import best_step
from ...user_error import UserError
from ..model.denoiser import ComfyDenoiser
from ..model.sound import Sound
from .sample_model import require_same_layers
from .samples import Encoded, SamplePrompts, draw_samples

LARGEST_HEIGHT = 512
"""Pixels of a sample in the grid; larger ones are scaled down."""

STRONGEST = 10.0


def plot(handle: StateHandle) -> Image.Image:
    """Draw the losses of a run up to this state. Raises UserError before the first step."""
    state = handle.load()
    if not state.losses:
        raise UserError("Loss Plot: this state has no steps yet; train it first.")
    best = best_step(state.validations)
    lowest = min((loss for _, loss in state.validations), default=math.nan)
    subtitle = f"{state.step} steps, {state.family}"
    subtitle += f"; lowest held-out loss {lowest:.4f} at step {best}" if state.validations else ""
    return loss_plot(state.losses, title=_title(handle), subtitle=subtitle, validations=state.validations)


def parse_strengths(text: str) -> tuple[float, ...]:
    """Return "0.5, 1" as numbers. Raises UserError for anything else."""
    try:
        strengths = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        strengths = ()
    if not strengths or not all(abs(strength) <= STRONGEST for strength in strengths):
        raise UserError(
            f"strengths: {text!r} are not numbers between -{STRONGEST:g} and {STRONGEST:g} with commas "
            "between them, as in 0.5, 1.0."
        )
    return strengths


def checkpoint_grid(
    model: Any,
    handle: StateHandle,
    settings: SamplePrompts,
    strengths: Sequence[float],
    family: Family,
    *,
    checkpoints: int,
    trigger: str,
    on_progress: OnProgress,
) -> Image.Image:
    """Draw prompts from left to right, and checkpoints with each of their strengths from top to bottom.
    `family` gives the guidance scale if neither the settings nor their own model do.

    Draws at most `checkpoints` of those that the run of `handle` still has up to it, evenly spread and ending
    with the last one. A sample that does not fit into memory stays blank. Of a clip, the frame in the
    middle is shown.
    """
    if settings.is_sound:
        raise UserError(
            "Checkpoint Grid draws images, and this VAE is one of sound; listen to the samples on Train "
            "Steps."
        )
    if settings.model is not None:
        require_same_layers(settings.model, ComfyDenoiser(model), handle.adapter)
    run = Run.of(handle)
    handles = spread_evenly(Checkpoints(run).leading_to(handle) if run else [handle], checkpoints)
    for note in settings.notes(family):
        log.warning("%s", note)
    settings = settings.of(family)
    total = len(handles) * len(strengths) * len(settings.prompts)
    rows: list[str] = []
    encoded: Encoded = {}
    drawn: list[list[Image.Image]] = [[] for _ in settings.prompts]
    for chosen in handles:
        state = chosen.load()
        for strength in strengths:
            trained = family_named(state.family)
            images = draw_samples(
                settings, model, state, trained, trigger, strength=strength, encoded=encoded
            )
            for column, frames in enumerate(images):
                assert not isinstance(frames, Sound)
                blank = [Image.new("RGB", (settings.width, settings.height), "white")]
                drawn[column].append((frames or blank)[len(frames or blank) // 2])
                done = len(rows) * len(settings.prompts) + column + 1
                on_progress(done, total, f"step {state.step}, strength {strength:g}")
            rows.append(f"step {state.step}\nstrength {strength:g}")
    columns = [
        Column(prompt.replace("[trigger]", trigger), "", samples)
        for prompt, samples in zip(settings.prompts, drawn, strict=True)
    ]
    guidance = f", guidance {settings.guidance:g}" if settings.guidance >= 0 else ""
    subtitle = (
        f"{settings.steps} steps, cfg {settings.cfg:g}{guidance}, {settings.sampler}, {settings.scheduler}"
    )
    subtitle += f", seed {settings.seed}"
    height = min(settings.height, LARGEST_HEIGHT)
    return sample_grid(columns, rows, title=_title(handle), subtitle=subtitle, height=height)


def spread_evenly(handles: Sequence[StateHandle], count: int) -> list[StateHandle]:
    """Return at most `count` of `handles`, evenly spread, ending with the last one."""
    count = min(count, len(handles))
    return [handles[(index + 1) * len(handles) // count - 1] for index in range(count)]


def _title(handle: StateHandle) -> str:
    """Return the name of the run, without its key."""
    run = Run.of(handle)
    return run.name if run else handle.path.name
