"""A model and an adapter that Graft does not have, each as it would be added: one row, and its class."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from graft.training.adapters.base import Adapter
from graft.training.config import AdapterConfig
from graft.training.family import Caption, Family, InPlaceBlock
from graft.training.frozen_base.frozen_layer import LayerSpec


class Gained(Adapter):
    """dW = (alpha / rank) * left @ diag(gains) @ right: (out, rank), (1, rank), (rank, everything else)."""

    suffixes = {name: f"gained_{name}" for name in ("left", "gains", "right")}
    starts_at_zero = ("left",)
    padded_with_zeros = ("left",)
    default_alpha = 2.0
    network_types = {"gained_bold": {}}
    lycoris_names = ("gnd",)

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        self.left = nn.Parameter(torch.empty(spec.shape[0], config.rank))
        self.gains = nn.Parameter(torch.empty(1, config.rank))
        self.right = nn.Parameter(torch.empty(config.rank, math.prod(spec.shape[1:])))

    def initialize(self, generator: torch.Generator, base: Tensor | None = None) -> None:
        with torch.no_grad():
            self.left.zero_()
            self.gains.fill_(1.0)
            nn.init.normal_(self.right, std=0.1, generator=generator)

    @staticmethod
    def compose(weights: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        gains = weights["gains"] if mask is None else weights["gains"] * mask.to(weights["gains"])
        return (weights["left"] * gains) @ weights["right"]

    @staticmethod
    def rank_in(weights: Mapping[str, Tensor]) -> int | None:
        return weights["right"].shape[0]


MODEL = Family(
    name="Made Up",
    targets={
        "attn-mlp": ("*.transformer_blocks.*",),
        "first half": ("input_blocks.*.transformer_blocks.*",),
    },
    blocks=("input_blocks.*", "middle_block", "output_blocks.*"),
    in_place={"MadeUpBlock": InPlaceBlock(("x",), ("norm",))},
    preset_modules={"MadeUpModule": ("input_blocks.*",)},
    sigmas="logit-normal",
    guidance=3.0,
    architecture="made-up-v1",
    base_model="made_up",
    network_module="networks.lora_made_up",
    key_prefix="",
    layer_sign="made_up_layers",
    clip_type="COSMOS",
    caption=Caption(77, 768),
    arch=("made_up", "made_up_large"),
    own_shift=True,
    latents="madeup",
    latent_scale=(2.0, 0.5),
    notes=("made up",),
)
"""For a network of SD1.5's size."""
