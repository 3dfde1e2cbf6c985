"""Video clips: files that PyAV reads, folders of frames, and videos of a graph, as upright sRGB frames.

The one rule: frames are counted by their time on screen, so clips of any frame rate, also a varying one, give
the same frames at the same moments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from ..files.input_file import require_ordinary
from ..optional_packages import optional
from .bucket import Size
from .config import DatasetConfig
from .image import UprightImage, read_image
from .image_file import EXTENSIONS, BadImage, read_header, require_size

CLIPS = frozenset((".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi"))
ANIMATED = ".gif"
"""An image without `frames` in the dataset's settings, a clip with them."""
FRAME_FOLDER = ".frames"
"""Ending of a folder that is a clip; a folder with a caption file of its name beside it is one too."""
STEADY = 0.25
"""How much longer or shorter than usual a frame may stay on screen: GIF and WebM round its time."""


class Video(Protocol):
    """ComfyUI's VIDEO, as far as it is read here."""

    def get_components(self) -> Any:
        """Return `images` (frames, H, W, 3) float32 in 0..1 and the `frame_rate`."""
        ...


@dataclass(frozen=True)
class ClipHeader:
    """What a clip's packets say, without decoding more than its first frame."""

    size: Size
    times: tuple[float, ...]
    """Seconds at which each frame appears, increasing; () if it is not known, as of a folder of frames."""
    count: int
    is_still: bool = False
    """Whether it is an image after all: a GIF of one frame."""

    def length(self, fps: float) -> int:
        """Return the number of frames at `fps`, all with 0. Raises BadImage if 0 leaves the rate open."""
        if not self.times or self.count < 2:
            return self.count
        waits = [after - before for before, after in zip(self.times, self.times[1:])]
        if fps:
            return max(1, int((self.times[-1] - self.times[0] + sum(waits) / len(waits)) * fps + 0.05))
        usual = median(waits)
        if any(abs(wait - usual) > STEADY * usual for wait in waits):
            rates = f"{1 / max(waits):.3g} to {1 / max(min(waits), 1e-3):.3g} per second"
            raise BadImage(f"its frame rate varies ({rates}); set fps in Dataset Settings")
        return self.count

    def at(self, index: int, fps: float) -> int:
        """Return the clip's own frame for frame `index` at `fps`: the nearest one in time."""
        if not fps or not self.times:
            return index
        time = self.times[0] + index / fps
        after = min(max(bisect_left(self.times, time), 1), self.count - 1)
        return after - (time - self.times[after - 1] <= self.times[after] - time)


def samples_of(header: ClipHeader, config: DatasetConfig) -> list[int]:
    """Return the first frame of every sample that a clip gives: one, or several with "chunks".

    Raises BadImage if it has fewer frames than a sample.
    """
    length = header.length(config.fps)
    if length < config.frames:
        rate = f" at {config.fps:g} fps" if config.fps and header.times else ""
        raise BadImage(
            f"has {length} frames{rate}, but {config.frames} are asked for; lower 'frames' in Load Dataset"
        )
    return list(range(0, length - config.frames + 1, config.frames)) if config.clips == "chunks" else [0]


def frames_of(header: ClipHeader, config: DatasetConfig, start: int, count: int) -> list[int]:
    """Return which of the clip's own frames are the `count` frames of the sample that begins at `start`."""
    if config.clips == "uniform" and count > 1:
        last = header.length(config.fps) - 1
        wanted = [round(place * last / (count - 1)) for place in range(count)]
    else:
        wanted = list(range(start, start + count))
    return [header.at(index, config.fps) for index in wanted]


def read_clip_header(path: Path) -> ClipHeader:
    """Return the header of a clip file or a folder of frames. Raises BadImage if it is unusable."""
    if path.is_dir():
        files = frame_files(path)
        sizes = {(header.width, header.height) for header in map(read_header, files)}
        if len(sizes) > 1:
            raise BadImage(f"its frames have {len(sizes)} sizes ({_sizes(sizes)}); give them all the same")
        return ClipHeader(sizes.pop(), (), len(files))
    with _open(path) as container:
        [stream] = container.streams.video[:1]
        packets = [p for p in container.demux(stream) if p.size and not p.is_discard]
        times = sorted(float((p.dts if p.pts is None else p.pts) * p.time_base) for p in packets)
        if not times:
            raise BadImage("has no frames")
        container.seek(0)
        image = next(_decoded(container), None)
    if image is None:
        raise BadImage("none of its frames can be decoded")
    require_size(*image.size)
    still = len(times) == 1 and path.suffix.lower() == ANIMATED
    return ClipHeader(image.size, tuple(times), len(times), still)


def read_frames(path: Path, indices: Sequence[int]) -> Iterator[UprightImage]:
    """Yield these of a clip's frames, which increase or repeat. Raises BadImage if one is missing."""
    if path.is_dir():
        files = frame_files(path)
        yield from (read_image(files[index]) for index in indices)
        return
    with _open(path) as container:
        wanted, given = list(indices), 0
        for index, image in enumerate(_decoded(container)):
            while given < len(wanted) and wanted[given] == index:
                given += 1
                yield UprightImage((image,))
            if given == len(wanted):
                return
    raise BadImage(f"is damaged: its frame {wanted[given]} cannot be decoded")


def read_video(video: Video) -> tuple[ClipHeader, Tensor]:
    """Return the header of a video of a graph and its frames (frames, H, W, 3) float32 in 0..1."""
    parts = video.get_components()
    count, height, width = parts.images.shape[:3]
    if not count or not float(parts.frame_rate) > 0:
        raise BadImage("has no frames")
    require_size(width, height)
    times = tuple(index / float(parts.frame_rate) for index in range(count))
    return ClipHeader((width, height), times, count), parts.images[..., :3].to("cpu", torch.float32)


def frame_files(folder: Path) -> list[Path]:
    """Return the images of a folder of frames, in the order of the numbers in their names."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in EXTENSIONS]
    if not files:
        raise BadImage("has no frames")
    return sorted(files, key=lambda path: (_number(path.stem), path.name))


def stamp(path: Path) -> tuple[int, int]:
    """Return size in bytes and date of a clip: of a folder of frames, their sum and the newest."""
    infos = [file.stat() for file in frame_files(path)] if path.is_dir() else [path.stat()]
    return sum(info.st_size for info in infos), max(info.st_mtime_ns for info in infos)


def is_clip(file: str, config: DatasetConfig) -> bool:
    """Return whether a file's name is that of a clip, as `config` reads the folder."""
    extension = PurePosixPath(file).suffix.lower()
    return bool(config.frames) and (extension in CLIPS or extension == ANIMATED)


def _number(stem: str) -> int:
    digits = "".join(letter if letter.isdigit() else " " for letter in stem).split()
    return int(digits[-1]) if digits else -1


def _sizes(sizes: set[Size]) -> str:
    return ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:3])


def _decoded(container: Any) -> Iterator[Image.Image]:
    """Yield a clip's frames in order, upright, mode RGB."""
    for frame in container.decode(video=0):
        image = Image.fromarray(frame.to_ndarray(format="rgb24"))
        turn = getattr(frame, "rotation", 0) % 360  # counterclockwise, as a phone held it
        yield image.rotate(turn, expand=True) if turn else image


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a clip file with a video stream. Every error while it is read becomes BadImage."""
    av = optional("av", "frames (clips)", "set frames to 0 in Load Dataset")
    try:
        require_ordinary(path)
        with av.open(str(path), options=_OPTIONS) as container:
            if not container.streams.video:
                raise BadImage("has no video stream")
            yield container
    except BadImage:
        raise
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise BadImage(f"damaged or not readable ({getattr(error, 'strerror', '') or error})") from error


_OPTIONS = {"format_whitelist": "mov,matroska,avi,gif", "protocol_whitelist": "file"}
"""FFmpeg's guard against playlists, which would open other files and addresses."""
