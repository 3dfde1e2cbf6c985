"""Real sounds of a second, written by PyAV."""

from __future__ import annotations

import av
import numpy as np

RATE = 8000


def wave(seconds, channels=2):
    """A rising tone, another on the other channel."""
    time = np.arange(round(seconds * RATE)) / RATE
    tones = [np.sin(2 * np.pi * (200 + 100 * channel + 50 * time) * time) for channel in range(channels)]
    return (0.5 * np.stack(tones)).astype(np.float32)


def write_sound(path, samples, caption="a tone"):
    """Write samples (channels, N) as .wav, .flac, .mp3 or .mka."""
    known = {".flac": ("flac", "s16"), ".mp3": ("libmp3lame", "s16p")}
    codec, kind = known.get(path.suffix, ("pcm_s16le", "s16"))
    layout = "stereo" if len(samples) == 2 else "mono"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = (samples * 32767).astype(np.int16)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=RATE, layout=layout, format=kind)
        planes = whole if kind.endswith("p") else whole.T.reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(planes), format=kind, layout=layout)
        frame.sample_rate = RATE
        fifo = av.AudioFifo()
        fifo.write(frame)
        while part := fifo.read(1152, partial=True):
            container.mux(stream.encode(part))
        container.mux(stream.encode())
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path
