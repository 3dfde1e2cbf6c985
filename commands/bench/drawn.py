"""Pictures that a LoRA of `graft bench quality` draws, as the starter's judge sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...starter.judge import Judge, shares
from .curves import Values

OTHERS = (
    "dog", "red apple", "house, twemoji style", "blueprint of a rocket", "green neon sign of a cat",
    "outline drawing of a tree", "a purple car at the beach", "a small yellow star at the top right",
)  # fmt: skip
"""Prompts that a LoRA should leave as they are."""
LATENT = (16, 16, 16)
STEPS, CFG, SEED = 12, 4.0, 1


class Drawn:
    """Draws a task's prompts and others, by default OTHERS, all at once, and judges them."""

    def __init__(
        self, clip: Any, vae: Any, judge: Judge, prompts: Sequence[str], others: Sequence[str] | None = None
    ) -> None:
        self.vae, self.judge, self.prompts = vae, judge, list(prompts)
        texts = [*self.prompts, *(OTHERS if others is None else others)]
        encoded = [clip.encode_from_tokens(clip.tokenize(text), return_pooled=True) for text in (*texts, "")]
        context, pooled = (torch.cat(parts) for parts in zip(*encoded))
        count = len(texts)
        self.positive = [[context[:count], {"pooled_output": pooled[:count]}]]
        self.negative = [[context[count:], {"pooled_output": pooled[count:]}]]
        self.noise = torch.randn(count, *LATENT, generator=torch.Generator().manual_seed(SEED))
        self.before: np.ndarray | None = None

    def values(self, model: Any) -> Values:
        """Return the shares of pictures with the object and the style of their prompts, and the drift.

        The drift is how far the pictures of OTHERS are from those of the first model that was given, the
        base: the mean absolute difference of colors in [0, 1].
        """
        pixels = self.draw(model)
        own = len(self.prompts)
        others = pixels[own:].astype(np.float32) / 255
        if self.before is None:
            self.before = others
        found = shares(self.judge, self.prompts, [Image.fromarray(each) for each in pixels[:own]])
        return found | {"drift": float(np.abs(others - self.before).mean())}

    def draw(self, model: Any) -> np.ndarray:
        """Return the pictures, (n, height, width, 3) uint8."""
        import comfy.sample

        with torch.inference_mode():
            samples = comfy.sample.sample(
                model, self.noise, STEPS, CFG, "euler", "simple", self.positive, self.negative,
                torch.zeros_like(self.noise), disable_pbar=True, seed=SEED,
            )  # fmt: skip
            pixels = self.vae.decode(samples).clamp(0, 1)
        colors: np.ndarray = (pixels * 255).round().to("cpu", torch.uint8).numpy()
        return colors
