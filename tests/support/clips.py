"""Real clips of a few frames, written by PyAV, and what PyAV reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch


def moving(frames: int, width: int = 64, height: int = 64, seed: int = 0) -> np.ndarray:
    """Return (frames, H, W, 3) uint8: a smooth picture whose brightness says which frame it is."""
    from .datasets import picture

    still = np.asarray(picture(width, height, seed), np.float32)
    return np.stack([still * (1 + index) / frames for index in range(frames)]).astype(np.uint8)


def write_clip(
    path: Path,
    frames: np.ndarray,
    *,
    fps: int = 16,
    times: Sequence[int] | None = None,
    caption: str | None = "a clip",
) -> Path:
    """Write frames as .mp4, .webm or .gif; `times` are in thousandths of a second, in place of `fps`."""
    codec, pixels = {".webm": ("libvpx-vp9", "yuv420p"), ".gif": ("gif", "rgb8")}.get(
        path.suffix, ("libx264", "yuv420p")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps if times is None else 1000)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], pixels
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def decoded(path: Path) -> torch.Tensor:
    """Return a clip's frames (frames, H, W, 3) float32 in 0..1, as ComfyUI's Load Video has them."""
    with av.open(str(path)) as container:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return torch.stack(frames) / 255.0
