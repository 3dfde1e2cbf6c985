"""Real files made by Pillow and an encoder of thirty lines, for the tests of training/data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from graft.training.data import BucketConfig, DatasetConfig

SMALL = DatasetConfig(bucket=BucketConfig(resolutions=(64,)))
"""64 x 64 pixels: 8 x 8 latents."""
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0"
"""How a phone's photo begins."""


class FakeEncoder:
    """A "VAE" that averages 8 x 8 pixels and a "text encoder" that counts letters; both count their calls."""

    inpaints = False
    edit_node = "mean color"
    bucket_step = 16
    reduction = 8
    first_frame, needs_first_frame = "", False

    def __init__(self, image_fingerprint: str = "vae", text_fingerprint: str = "clip") -> None:
        self.image_fingerprint, self.text_fingerprint = image_fingerprint, text_fingerprint
        self.images: list[Tensor] = []
        self.texts: list[str] = []

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        return 3, height // 8, width // 8

    def encode_image(self, pixels: Tensor) -> Tensor:
        self.images.append(pixels)
        return F.avg_pool2d(pixels.movedim(-1, 1), 8)

    def clip_frames(self, frames: int) -> int:
        return (frames - 1) // 4 * 4 + 1

    def encode_clip(self, pixels: Tensor) -> Tensor:
        """Average each first frame, and then four at a time."""
        self.images.append(pixels)
        cells = F.avg_pool2d(pixels.movedim(-1, 1), 8)
        return torch.stack([cells[:1].mean(0), *(part.mean(0) for part in cells[1:].split(4))], 1)[None]

    def encode_sound(self, samples: Tensor, rate: int) -> Tensor:
        """Average each tenth of a second."""
        self.images.append(samples)
        return F.avg_pool1d(samples[None], rate // 10)

    def encode_first_frame(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return the first frame's latents, and a mask that is 0 there."""
        mask = torch.ones(1, 1, self.encode_clip(pixels).shape[2], 1, 1)
        mask[:, :, 0] = 0
        return {"concat_latent_image": self.encode_image(pixels[:1])[:, :, None], "denoise_mask": mask}

    def encode_text(self, caption: str) -> dict[str, Tensor]:
        self.texts.append(caption)
        letters = torch.tensor([float(caption.count(letter)) for letter in "abcdefgh"])
        return {
            "cross_attn": letters[None, None],
            "pooled_output": letters[None],
            "attention_mask": torch.ones(1, 1).int(),
        }

    @property
    def calls(self) -> tuple[int, int]:
        return len(self.images), len(self.texts)


def picture(width: int = 64, height: int = 64, seed: int = 0) -> Image.Image:
    """Return a smooth RGB image, different for each seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def add(
    folder: Path,
    name: str,
    caption: str | None = "a picture",
    image: Image.Image | None = None,
    **save: object,
) -> Path:
    """Write an image and, unless it is None, its caption; return the image's path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture(seed=len(name) + sum(map(ord, name)))).save(path, **save)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path
