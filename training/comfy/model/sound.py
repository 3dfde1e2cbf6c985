"""Sounds to latents and back, and what a model is told of them, by the stock nodes' own code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import node_helpers
import torch
from torch import Tensor

from ...data.caption import LYRICS
from .first_frame import stock_node


@dataclass(frozen=True)
class Sound:
    """Samples (channels, N) from -1 to 1, and how many of them make a second."""

    samples: Tensor
    rate: int


def is_of_sound(vae: Any) -> bool:
    """Return whether a VAE is one of sound: its outputs are two channels of samples."""
    return getattr(vae, "output_channels", 3) == 2


def encode_sound(vae: Any, sound: Sound) -> Tensor:
    """Return what VAE Encode Audio makes of a sound, as a batch of one on the CPU."""
    audio = {"waveform": sound.samples[None], "sample_rate": sound.rate}
    # Stable Audio's VAE draws noise; the same one each time, so that a run can be repeated.
    devices = [vae.device] if vae.device.type == "cuda" else []
    with torch.inference_mode(), torch.random.fork_rng(devices):
        torch.manual_seed(0)
        latent = _call("VAEEncodeAudio", "encode", vae=vae, audio=audio)
        return latent["samples"].to("cpu", torch.float32).clone()  # type: ignore[no-any-return]


def decode_sound(vae: Any, latents: Tensor) -> Sound:
    """Return what VAE Decode Audio makes of a batch of one."""
    audio = _call("VAEDecodeAudio", "decode", vae=vae, samples={"samples": latents})
    return Sound(audio["waveform"][0].float().cpu(), int(audio["sample_rate"]))


def encode_song(clip: Any, caption: str) -> Any:
    """Return the CONDITIONING of a caption, with lyrics as TextEncodeAceStepAudio gives them."""
    tags, mark, lyrics = caption.partition(LYRICS)
    return clip.encode_from_tokens_scheduled(clip.tokenize(tags, **({"lyrics": lyrics} if mark else {})))


def with_seconds(conditioning: Any, seconds: float) -> Any:
    """Return a CONDITIONING as ConditioningStableAudio describes a whole sound."""
    return node_helpers.conditioning_set_values(
        conditioning, {"seconds_start": 0.0, "seconds_total": seconds}
    )


def _call(node: str, method: str, **inputs: Any) -> Any:
    """Return the output of a node of comfy_extras.nodes_audio, whose class had no `execute` in 0.3.75."""
    kind = stock_node(f"nodes_audio.{node}")
    outputs = (kind.execute if hasattr(kind, "execute") else getattr(kind(), method))(**inputs)
    return (outputs if isinstance(outputs, tuple) else outputs.result)[0]
