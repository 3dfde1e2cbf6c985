"""A text encoder that sees an image and writes about it, as ComfyUI's node Generate Text has it do."""

from __future__ import annotations

import re
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...config import digest
from ...data.captioning import CaptioningConfig
from ...user_error import UserError
from .encoder import text_fingerprint

SAMPLING = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 64,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}
"""The defaults of Generate Text."""


class Captioner:
    """Describes images by a CLIP. Raises UserError for one that cannot."""

    def __init__(self, clip: Any, config: CaptioningConfig) -> None:
        if not hasattr(clip, "generate"):
            raise UserError(
                "clip: this ComfyUI is too old to let text encoders write (it has no node Generate Text). "
                "Update ComfyUI, or connect the captions of another node, a list of STRING, to 'captions'."
            )
        self.clip, self.config = clip, config
        self._tokenize(torch.zeros(1, 64, 64, 3))
        self.fingerprint = digest(text_fingerprint(clip), config.instruction, config.longest, config.seed)

    def describe(self, image: Tensor) -> str:
        """Return what the encoder says of an image (1, H, W, 3) in 0..1, in one line."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        with torch.inference_mode():
            tokens, config = self._tokenize(image), self.config
            ids = self.clip.generate(tokens, max_length=config.longest, seed=config.seed, **SAMPLING)
            text = self.clip.decode(ids)
        return " ".join(re.sub(r"<think>.*?(</think>|$)", "", text, flags=re.DOTALL).split())

    def _tokenize(self, image: Tensor) -> Any:
        tokens = self.clip.tokenize(
            self.config.instruction, image=image, skip_template=False, min_length=1, thinking=False
        )
        if not _has_image(tokens):
            raise UserError(
                f"clip: this text encoder ({type(self.clip.tokenizer).__name__}) does not see images; load "
                "one that does, such as Qwen3-VL, Qwen3.5 or Gemma 4, with Load CLIP, or connect the "
                "captions of another node, a list of STRING, to 'captions'."
            )
        return tokens


def _has_image(tokens: Any) -> bool:
    """Return whether an image is among tokens: {encoder: [[(token, weight), ...]]}."""
    batches = tokens.values() if isinstance(tokens, dict) else [tokens]
    return any(isinstance(entry[0], dict) for batch in batches for row in batch for entry in row)
