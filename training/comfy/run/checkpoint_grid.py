"""Pictures of a run as a whole: its loss, and its checkpoints beside one another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from PIL import Image

from ...family import Family, family_named
from ...log import log
from ...model import OnProgress
from ...run.checkpoints import Checkpoints
from ...run.drawing import Column, loss_plot, sample_grid
from ...run.folder import Run
from ...run.saved_state import StateHandle
from ...state import best_step
from ...user_error import UserError
from .samples import SamplePrompts, draw_samples

LARGEST_PICTURE = 512
"""Height in pixels of a picture in the grid; larger ones are reduced to it."""

STRONGEST = 10.0


def plot(handle: StateHandle) -> Image.Image:
    """Draw the losses of a state's run up to it. Raises UserError before the first step."""
    state = handle.load()
    if not state.losses:
        raise UserError("Loss Plot: this state has no step yet; train it first.")
    best = best_step(state.validations)
    lowest = min((loss for _, loss in state.validations), default=math.nan)
    subtitle = f"{state.step} steps, {state.family}"
    subtitle += f"; lowest held-out loss {lowest:.4f} at step {best}" if state.validations else ""
    return loss_plot(state.losses, title=_title(handle), subtitle=subtitle, validations=state.validations)


def parse_strengths(text: str) -> tuple[float, ...]:
    """Return "0.5, 1" as numbers. Raises UserError for anything else."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or not all(abs(strength) <= STRONGEST for strength in found):
        raise UserError(
            f"strengths: {text!r} are not numbers between -{STRONGEST:g} and {STRONGEST:g} with commas "
            "between them, as in 0.5, 1.0."
        )
    return found


def checkpoint_grid(
    model: Any,
    handle: StateHandle,
    plan: SamplePrompts,
    strengths: Sequence[float],
    family: Family,
    *,
    checkpoints: int,
    trigger: str,
    on_progress: OnProgress,
) -> Image.Image:
    """Draw prompts from left to right; checkpoints and, of each, strengths from top to bottom. The model's
    `family` says the guidance scale where the plan does not.

    The checkpoints are at most so many of those that the run of `handle` has kept up to it, evenly spread,
    the last among them. A picture that does not fit into memory is left blank.
    """
    run = Run.of(handle)
    handles = spread_evenly(Checkpoints(run).leading_to(handle) if run else [handle], checkpoints)
    for note in plan.notes(family):
        log.warning("%s", note)
    plan = plan.of(family)
    total = len(handles) * len(strengths) * len(plan.prompts)
    rows: list[str] = []
    drawn: list[list[Image.Image]] = [[] for _ in plan.prompts]
    for chosen in handles:
        state = chosen.load()
        for strength in strengths:
            found = draw_samples(plan, model, state, family_named(state.family), trigger, strength=strength)
            for number, image in enumerate(found):
                drawn[number].append(image or Image.new("RGB", (plan.width, plan.height), "white"))
                done = len(rows) * len(plan.prompts) + number + 1
                on_progress(done, total, f"step {state.step}, strength {strength:g}")
            rows.append(f"step {state.step}\nstrength {strength:g}")
    columns = [
        Column(prompt.replace("[trigger]", trigger), "", images)
        for prompt, images in zip(plan.prompts, drawn, strict=True)
    ]
    guidance = f", guidance {plan.guidance:g}" if plan.guidance >= 0 else ""
    subtitle = f"{plan.steps} steps, cfg {plan.cfg:g}{guidance}, {plan.sampler}, {plan.scheduler}"
    subtitle += f", seed {plan.seed}"
    height = min(plan.height, LARGEST_PICTURE)
    return sample_grid(columns, rows, title=_title(handle), subtitle=subtitle, height=height)


def spread_evenly(handles: Sequence[StateHandle], count: int) -> list[StateHandle]:
    """Return at most `count` of `handles`, evenly spread, the last one among them."""
    count = min(count, len(handles))
    return [handles[(number + 1) * len(handles) // count - 1] for number in range(count)]


def _title(handle: StateHandle) -> str:
    """Name the run without its key."""
    run = Run.of(handle)
    return run.name if run else handle.path.name
