"""Sound files: their length, and a piece of one as samples. Lyrics are in a text file beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..files.input_file import require_ordinary
from ..optional_packages import optional
from .caption import LYRICS
from .caption_file import read_text
from .config import DatasetConfig
from .image_file import BadImage

SOUNDS = frozenset((".wav", ".flac", ".mp3", ".ogg"))
LYRICS_FILE = "_lyrics.txt"
"""Behind the name of a sound, as in ACE-Step's own datasets."""
_MISSING = 0.1
"""Seconds that a file may lack of the length its packets say; silence takes their place."""


def is_sound(file: str) -> bool:
    return PurePosixPath(file).suffix.lower() in SOUNDS


def with_lyrics(captions: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """Return a sound's captions with its lyrics behind them, if it has a file with some."""
    file = path.with_name(path.stem + LYRICS_FILE)
    if not is_sound(path.name) or not file.is_file():
        return captions
    lyrics = read_text(file, "its lyrics").strip()
    return tuple(f"{caption}{LYRICS}{lyrics}" for caption in captions) if lyrics else captions


def read_length(path: Path) -> int:
    """Return a sound's length in milliseconds, without decoding it. Raises BadImage if it is unusable."""
    with _open(path) as container:
        stream = container.streams.audio[0]
        parts = [packet.duration * packet.time_base for packet in container.demux(stream) if packet.duration]
    if not parts:
        raise BadImage("has no sound in its track")
    return int(1000 * sum(parts))


def pieces_of(length: int, config: DatasetConfig) -> list[int]:
    """Return where the pieces of a sound of `length` begin, both in milliseconds.

    Raises BadImage if it is shorter than one piece.
    """
    piece = round(1000 * config.seconds)
    if config.clips == "uniform":
        raise BadImage("is sound, of which 'clips' uniform takes nothing; choose head or chunks")
    if length + 1000 * _MISSING / 2 < piece:
        raise BadImage(
            f"has {length / 1000:.1f} seconds, but {config.seconds:g} are asked for; lower 'seconds' in Load "
            "Dataset"
        )
    return list(range(0, length - piece + 1, piece)) or [0] if config.clips == "chunks" else [0]


def read_piece(path: Path, start: int, seconds: float) -> tuple[Tensor, int]:
    """Return `seconds` of a sound from `start` milliseconds on, (2, samples) float32, and its sample rate.

    Raises BadImage if they are not there.
    """
    av = optional("av", "seconds (sound)", "set seconds to 0 in Load Dataset")
    with _open(path) as container:
        rate = int(container.streams.audio[0].rate)
        first, count = round(start * rate / 1000), round(seconds * rate)
        resampler = av.AudioResampler(format="fltp", layout="stereo", rate=rate)
        parts, known = [], 0
        for frame in container.decode(audio=0):
            parts += [part.to_ndarray() for part in resampler.resample(frame)]
            known += frame.samples
            if known >= first + count:
                break
        parts += [part.to_ndarray() for part in resampler.resample(None)]
    samples = np.concatenate(parts, axis=1)[:, first : first + count] if parts else np.zeros((2, 0))
    if samples.shape[1] < count - _MISSING * rate:
        raise BadImage(
            f"is damaged: only {samples.shape[1] / rate:.1f} of {seconds:g} seconds can be decoded"
        )
    if not np.isfinite(samples).all():
        raise BadImage("has NaN or infinite values")
    padded = np.pad(samples, ((0, 0), (0, count - samples.shape[1])))
    return torch.from_numpy(padded.astype(np.float32)), rate


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file with a sound track. Every error while it is read becomes BadImage."""
    av = optional("av", "seconds (sound)", "set seconds to 0 in Load Dataset")
    try:
        require_ordinary(path)
        options = {"format_whitelist": "wav,flac,mp3,ogg", "protocol_whitelist": "file"}
        with av.open(str(path), options=options) as container:
            if not container.streams.audio:
                raise BadImage("has no sound track")
            yield container
    except BadImage:
        raise
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise BadImage(f"damaged or not readable ({getattr(error, 'strerror', '') or error})") from error
