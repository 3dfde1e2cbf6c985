"""The judge of the starter's pictures: what object and what style they show (dev/starter/train_judge.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

FILE = Path(__file__).parent / "judge.safetensors"
SIDE = 128


@dataclass(frozen=True)
class Verdict:
    """What a picture shows."""

    object: str
    style: str


class Judge(nn.Module):
    """(b, 3, 128, 128) in [0, 1] -> logits of the object (b, objects) and of the style (b, styles)."""

    def __init__(self, objects: Sequence[str], styles: Sequence[str], width: int = 48) -> None:
        super().__init__()
        self.objects, self.styles = list(objects), list(styles)
        sizes = [width, 2 * width, 3 * width, 4 * width, 6 * width]
        self.enter = nn.Conv2d(12, width, 3, padding=1)  # of 2 x 2 pixels
        self.halve = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in zip(sizes, sizes[1:]))
        self.refine = nn.ModuleList(nn.Conv2d(s, s, 3, padding=1) for s in sizes[1:])
        self.norms = nn.ModuleList(nn.GroupNorm(8, s) for s in sizes[1:])
        self.name = nn.Linear(sizes[-1], len(self.objects))
        self.style = nn.Linear(2 * sum(sizes[1:]), len(self.styles))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.silu(self.enter(F.pixel_unshuffle(2 * x - 1, 2)))
        means, peaks = [], []
        for halve, refine, norm in zip(self.halve, self.refine, self.norms):
            x = norm(F.silu(halve(x)))
            x = x + F.silu(refine(x))
            means.append(x.mean((2, 3)))
            peaks.append(x.amax((2, 3)))
        first, *middle, last = means
        return self.name(peaks[-1]), self.style(torch.cat([first, last, *middle, *peaks], 1))

    @torch.no_grad()
    def logits(self, images: Sequence[Image.Image]) -> tuple[Tensor, Tensor]:
        """Return the logits of the images' objects and of their styles."""
        pixels = np.stack([np.asarray(image.convert("RGB").resize((SIDE, SIDE))) for image in images])
        objects, styles = self(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)
        return objects, styles

    def verdicts(self, images: Sequence[Image.Image]) -> list[Verdict]:
        """Return what each image shows."""
        objects, styles = self.logits(images)
        return [
            Verdict(self.objects[object], self.styles[style])
            for object, style in zip(objects.argmax(1).tolist(), styles.argmax(1).tolist())
        ]

    def asked_for(self, prompt: str) -> Verdict:
        """Return the object and the style that a prompt names: the longest of either, or ""."""
        words = f" {prompt.replace(',', ' ').lower()} "
        named = [max([n for n in names if f" {n} " in words], key=len, default="")
                 for names in (self.objects, self.styles)]  # fmt: skip
        return Verdict(*named)


def load_judge(file: Path = FILE) -> Judge:
    """Return the shipped judge. The names of what it knows are in the file."""
    with safe_open(file, "pt") as opened:
        names = opened.metadata()
        weights = {key: opened.get_tensor(key) for key in opened.keys()}
    judge = Judge(json.loads(names["objects"]), json.loads(names["styles"]))
    judge.load_state_dict(weights)
    return judge.eval().requires_grad_(False)


def shares(judge: Judge, prompts: Sequence[str], images: Sequence[Image.Image]) -> dict[str, float]:
    """Return the shares of images that show the object, and the style, that their prompts name.

    A prompt that names none does not count; without any that does, the share is missing.
    """
    found = [(judge.asked_for(p), v) for p, v in zip(prompts, judge.verdicts(images), strict=True)]
    objects = [asked.object == seen.object for asked, seen in found if asked.object]
    styles = [asked.style == seen.style for asked, seen in found if asked.style]
    rows = {"object": objects, "style": styles}
    return {name: round(sum(right) / len(right), 3) for name, right in rows.items() if right}
