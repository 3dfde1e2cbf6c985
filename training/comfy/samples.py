"""Pictures from the LoRA while it is trained, by ComfyUI's own sampler.

They are drawn between two optimizer steps, after the engine has given the weights back, so they never change
what is
trained; and running out of memory costs a picture, never the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..family import Family
from ..state import TrainState
from .output import with_lora

log = logging.getLogger(__name__)

SAMPLERS: list[str] = comfy.samplers.KSampler.SAMPLERS
SCHEDULERS: list[str] = comfy.samplers.KSampler.SCHEDULERS


@dataclass(frozen=True)
class SamplePrompts:
    """What to draw, how, and how often. Decides nothing about the training."""

    clip: Any
    vae: Any
    prompts: tuple[str, ...]
    """[trigger] stands for the dataset's trigger word."""
    negative: str = ""
    every: int = 100
    """Steps between two sets of pictures."""
    before_training: bool = True
    """Draw a first set at the step the run starts from."""
    width: int = 1024
    height: int = 1024
    steps: int = 20
    cfg: float = 4.0
    sampler: str = "euler"
    scheduler: str = "simple"
    seed: int = 0
    walk_seed: bool = False
    """Another seed for every set; otherwise sets differ by the training alone."""


def draw(
    plan: SamplePrompts,
    model: Any,
    state: TrainState,
    family: Family,
    folder: Path,
    *,
    trigger: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Draw every prompt with the LoRA of `state` and save the pictures as `folder`/step-<n>-<prompt>.png.

    A picture that does not fit into memory is drawn at half the size, then left out with a warning.
    `metadata` goes
    into the files (the workflow).
    """
    patched, clip = with_lora(model, plan.clip, state, family)
    paths = []
    with torch.inference_mode():
        for number, prompt in enumerate(plan.prompts):
            image = _drawn(plan, patched, clip, prompt.replace("[trigger]", trigger), state.step)
            if image is not None:
                folder.mkdir(parents=True, exist_ok=True)
                paths.append(folder / f"step-{state.step:08d}-{number}.png")
                image.save(paths[-1], pnginfo=_info({"prompt_text": prompt, **(metadata or {})}))
    return paths


def _drawn(plan: SamplePrompts, model: Any, clip: Any, prompt: str, step: int) -> Image.Image | None:
    seed = plan.seed + (step if plan.walk_seed else 0)
    for divisor in (1, 2):
        try:
            return _sample(plan, model, clip, prompt, seed, plan.width // divisor, plan.height // divisor)
        except comfy.model_management.OOM_EXCEPTION:
            comfy.model_management.unload_all_models()
            comfy.model_management.soft_empty_cache()
            log.warning("Graft: the sample %r does not fit into memory at 1/%d of its size.", prompt, divisor)
    return None


def _sample(
    plan: SamplePrompts, model: Any, clip: Any, prompt: str, seed: int, width: int, height: int
) -> Image.Image:
    positive, negative = (
        clip.encode_from_tokens_scheduled(clip.tokenize(t)) for t in (prompt, plan.negative)
    )
    reduction = int(plan.vae.spacial_compression_encode())
    channels = model.get_model_object("latent_format").latent_channels
    latent = torch.zeros(1, channels, height // reduction, width // reduction)
    latent = comfy.sample.fix_empty_latent_channels(model, latent)
    samples = comfy.sample.sample(
        model,
        comfy.sample.prepare_noise(latent, seed),
        plan.steps,
        plan.cfg,
        plan.sampler,
        plan.scheduler,
        positive,
        negative,
        latent,
        disable_pbar=True,
        seed=seed,
    )
    pixels = plan.vae.decode(samples)  # in tiles where the whole does not fit
    pixels = pixels.reshape(-1, *pixels.shape[-3:])[0]
    return Image.fromarray((pixels.clamp(0, 1) * 255).round().to("cpu", torch.uint8).numpy())


def _info(texts: Mapping[str, Any]) -> PngInfo:
    info = PngInfo()
    for name, value in texts.items():
        info.add_text(name, value if isinstance(value, str) else json.dumps(value))
    return info
