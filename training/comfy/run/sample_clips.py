"""Clips among a run's samples: animated on the node, and as a video in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfy_api.latest import InputImpl, Types
from PIL import Image

from ...files.whole_file import commit, temporary_in, whole_file

SHOWN_SIDE = 512
"""Most pixels of the longer side of a clip on the node."""


def save_clip(frames: Sequence[Image.Image], fps: float, path: Path, texts: Mapping[str, Any]) -> None:
    """Write a clip whole or not at all: to `path` as an animated WEBP for the node, and beside it as .mp4.

    The .mp4 holds `texts` as ComfyUI's Save Video writes them. A clip is there once its WEBP is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    images = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).float() / 255
    parts = Types.VideoComponents(images=images, audio=None, frame_rate=Fraction(fps).limit_denominator(1000))
    with temporary_in(path.parent) as temporary:
        video = temporary.with_name(f"{temporary.name}.mp4")  # its ending says what is written
        try:
            InputImpl.VideoFromComponents(parts).save_to(str(video), metadata=dict(texts))
            video.rename(temporary)
        finally:
            video.unlink(missing_ok=True)
        commit(temporary, path.with_suffix(".mp4"))
    shown = [frame.copy() for frame in frames]
    for frame in shown:
        frame.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    with whole_file(path) as temporary:
        shown[0].save(
            temporary, "webp", save_all=True, append_images=shown[1:], duration=round(1000 / fps), loop=0
        )
