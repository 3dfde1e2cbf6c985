"""Captions as ComfyUI's tokenizer and the starter's text encoder give them to the denoiser."""

from __future__ import annotations

import functools

import torch
from shipped import clip_l
from torch import Tensor


class Captions:
    """Token ids as ComfyUI's tokenizer makes them for CLIP-L, and what the text encoder makes of them."""

    def __init__(self) -> None:
        import comfy.sd1_clip

        tokenizer = comfy.sd1_clip.SDTokenizer()
        self.word = functools.cache(
            lambda w: [t for t, _ in tokenizer.tokenize_with_weights(w)[0][1:] if t != clip_l.END]
        )
        self.reader = Reader()

    def ids(self, captions: list[str]) -> Tensor:
        rows = torch.full((len(captions), clip_l.POSITIONS), clip_l.END)
        for row, caption in zip(rows, captions):
            tokens = [t for word in caption.split() for t in self.word(word)][: clip_l.PLACES - 2]
            row[: len(tokens) + 1] = torch.tensor([clip_l.BEGIN, *tokens])
        return rows

    def __call__(self, captions: list[str]) -> dict[str, Tensor]:
        ids = self.ids(captions)
        return {"context": self.reader.context(ids), "y": self.reader.pooled(ids)}


class Reader:
    """What ComfyUI's SD3 text encoder computes with these weights, fast enough for every step."""

    def __init__(self) -> None:
        self.tokens, self.positions = clip_l.token_vectors(), clip_l.position_vectors().float()

    def context(self, ids: Tensor) -> Tensor:
        """(b, 25, 768) for (b, 77) ids: the first 24 tokens as they are and one of the 53 zeros behind them.

        Raises ValueError where more than 24 tokens are not padding.
        """
        if (ids[:, clip_l.PLACES :] != clip_l.END).any():
            raise ValueError(f"a caption has more than {clip_l.PLACES - 2} tokens; write it shorter")
        vectors = self.tokens[ids[:, : clip_l.PLACES]].float() + self.positions[: clip_l.PLACES]
        return torch.cat([vectors, torch.zeros(len(ids), 1, clip_l.WIDTH)], 1)

    def pooled(self, ids: Tensor) -> Tensor:
        """(b, 768)"""
        context = self.context(ids)[:, : clip_l.PLACES]
        end = (ids == clip_l.END).int().argmax(1)
        read = torch.arange(clip_l.PLACES) <= end[:, None]
        vectors = torch.nn.functional.layer_norm(context, (clip_l.WIDTH,)) * read[..., None]
        gathered = self.positions[end] + clip_l.GATHER * vectors.sum(1) / (end[:, None] + 1)
        return torch.nn.functional.layer_norm(gathered, (clip_l.WIDTH,))
