"""Sounds among a run's samples: FLAC files, as ComfyUI's Save Audio writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av

from ...files.whole_file import whole_file
from ..model.sound import Sound


def save_sound(sound: Sound, path: Path, texts: Mapping[str, Any]) -> None:
    """Write a sound whole or not at all, with `texts` in it: strings as they are, the rest as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = sound.samples[:2]
    interleaved = channels.T.reshape(1, -1).numpy()
    frame = av.AudioFrame.from_ndarray(
        interleaved, format="flt", layout=("mono", "stereo")[len(channels) - 1]
    )
    frame.sample_rate = sound.rate
    with whole_file(path) as temporary, av.open(str(temporary), "w", format="flac") as file:
        file.metadata.update(
            {name: value if isinstance(value, str) else json.dumps(value) for name, value in texts.items()}
        )
        stream = file.add_stream("flac", rate=sound.rate, layout=frame.layout.name)
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
