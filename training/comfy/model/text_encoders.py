"""CLIP text encoders that are trained along with the network, so captions are encoded anew in every step.

T5 is not trained and stays in the text cache: ComfyUI puts CLIP's tokens first, and only those are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...family import TEXT, Family
from ...frozen_base.frozen_layer import FrozenLayer, LayerSpec
from ...memory.weight_store import Store
from ...model import Conditioning
from ...user_error import UserError
from . import weights
from .differentiable import make_differentiable

LAYER = re.compile(r"transformer\.text_model\.encoder\.layers\.(\d+)\..+")


class TextEncoders:
    """The CLIP encoders that a family's LoRA may change. Every `hold` leaves them as they were."""

    def __init__(self, clip: Any, family: Family) -> None:
        if not family.text_encoders:
            raise UserError(
                f"text_encoder: {family.name} has no CLIP text encoder to train; set text_encoder to 0 in "
                "Build LoRA."
            )
        self.clip, self.family = clip, family
        self.model = clip.cond_stage_model
        encoders = {name: getattr(self.model, name, None) for name in family.text_encoders}
        self.encoders: dict[str, nn.Module] = {name: e for name, e in encoders.items() if e is not None}
        if next(iter(family.text_encoders)) not in self.encoders:
            raise UserError(
                f"text_encoder: this CLIP has no {next(iter(family.text_encoders))}, without which ComfyUI "
                "does not load a LoRA of the text encoders; load it too, or set text_encoder to 0 in Build "
                "LoRA."
            )

    @cached_property
    def specs(self) -> Mapping[str, LayerSpec]:
        """Every linear layer that affects the conditioning, by path."""
        with self._as_sampled():
            return {
                f"{TEXT}{name}.{path}": spec
                for name, encoder in self.encoders.items()
                for path, spec in weights.layer_specs(encoder, self.clip.patcher.patches, name).items()
                if spec.kind == "linear" and _depth(path) < self._used(name)
            }

    @contextmanager
    def hold(self, device: torch.device) -> Iterator[Mapping[str, FrozenLayer]]:
        """Own the encoders' weights in the file's precision; they compute in float32, as in sampling."""
        layers: dict[str, FrozenLayer] = {}
        with ExitStack() as undo:
            undo.enter_context(self._as_sampled())
            for name, encoder in self.encoders.items():
                store = Store("resident", (), _dtype(encoder), device)
                base = undo.enter_context(weights.hold_weights(self.clip.patcher, encoder, name, store))
                layers |= {f"{TEXT}{name}.{path}": layer for path, layer in base.layers.items()}
                for path, module in encoder.named_modules():
                    if path in base.layers and base.layers[path].spec.kind == "embedding":
                        undo.callback(weights.replace(module, "weight", _on(module, device)))
                undo.enter_context(make_differentiable(encoder))
            yield layers

    def encode(self, caption: str, cached: Conditioning) -> Conditioning:
        """Return the encoders' current encoding of the caption in place of `cached`; differentiable."""
        tokens = self.clip.tokenize(caption)
        cross, pooled = self.model.encode_token_weights(tokens)[:2]
        before: Any = cached["cross_attn"]
        joined = torch.cat((cross, before[:, cross.shape[1] :].to(cross)), 1)
        return {"cross_attn": joined, **({} if pooled is None else {"pooled_output": pooled})}

    @contextmanager
    def _as_sampled(self) -> Iterator[None]:
        """Let the encoders return the layer that sampling uses (CLIP skip), and leave T5 out."""
        t5 = getattr(self.model, "t5xxl", None)
        if t5 is not None:
            self.model.t5xxl = None
        self.model.reset_clip_options()
        if self.clip.layer_idx is not None:
            self.model.set_clip_options({"layer": self.clip.layer_idx})
        try:
            yield
        finally:
            if t5 is not None:
                self.model.t5xxl = t5
            self.model.reset_clip_options()

    def _used(self, name: str) -> int:
        """Return how many layers of an encoder have an effect; the pooled output needs all."""
        encoder: Any = self.encoders[name]
        if name in self.family.pooled or encoder.layer == "last":
            return int(encoder.num_layers)
        return int(encoder.layer_idx) % int(encoder.num_layers) + 1


def _depth(path: str) -> float:
    match = LAYER.fullmatch(path)
    return int(match[1]) if match else float("inf")


def _dtype(encoder: nn.Module) -> torch.dtype:
    kinds = {p.dtype for p in encoder.parameters()} & {torch.float16, torch.bfloat16}
    return kinds.pop() if len(kinds) == 1 else torch.float32


def _on(module: nn.Module, device: torch.device) -> torch.Tensor:
    return module.get_parameter("weight").detach().to(device)
