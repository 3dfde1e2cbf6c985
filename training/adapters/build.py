"""Adapters: small trained modules beside frozen layers. One file a method, one table of them (`ADAPTERS`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .. import rng
from ..config import AdapterConfig
from ..family import is_text
from ..frozen_base.frozen_layer import FrozenLayer, LayerSpec
from ..user_error import UserError
from .base import Adapter, attach
from .boft import BOFT
from .dora import DoRA
from .dropout import draws
from .full import Full
from .glora import GLoRA
from .loha import LoHa
from .lokr import LoKr
from .lora import LoRA
from .oft import OFT
from .pissa import PiSSA
from .select import first_match, for_layer, ineffective_patterns, matches, select

ADAPTERS: Mapping[str, type[Adapter]] = {
    "lora": LoRA,
    "dora": DoRA,
    "loha": LoHa,
    "lokr": LoKr,
    "oft": OFT,
    "boft": BOFT,
    "glora": GLoRA,
    "full": Full,
}
"""By `AdapterConfig.algorithm`."""

NOT_SUPPORTED: Mapping[str, str] = {
    "locon": "it is LoRA on convolutions: choose lora and the targets 'all'",
    "diag-oft": "it is oft here",
    **dict.fromkeys(("diff", "full-diff"), "it is full here"),
    **dict.fromkeys(("ia3", "dylora", "tlora"), "its files do not load everywhere"),
    **dict.fromkeys(("slider", "concept-slider", "leco"), "its dataset comes from Slider From Words"),
    **dict.fromkeys(("tread", "token-routing"), "token routing changes the network that is trained"),
}
"""Algorithms of other trainers -> why they are not here."""


def method_of(config: AdapterConfig) -> type[Adapter]:
    """Return the class that one layer's settings ask for.

    Raises UserError for an unknown algorithm, naming the known ones.
    """
    name = config.algorithm.lower()
    if name not in ADAPTERS:
        reason = f"not supported ({NOT_SUPPORTED[name]})" if name in NOT_SUPPORTED else "unknown"
        raise UserError(f"algorithm: {config.algorithm!r} is {reason}; choose one of {', '.join(ADAPTERS)}.")
    return PiSSA if config.init == "pissa" else ADAPTERS[name]


def build_adapters(specs: Mapping[str, LayerSpec], config: AdapterConfig) -> dict[str, Adapter]:
    """Return one adapter of the configured method for each layer, its parameters not yet set.

    Raises UserError for an unknown algorithm.
    """
    settings = {path: for_layer(config, path) for path in specs}
    return {path: method_of(settings[path])(spec, settings[path]) for path, spec in specs.items()}


def restore_adapters(
    specs: Mapping[str, LayerSpec], config: AdapterConfig, weights: Mapping[str, Tensor], device: torch.device
) -> dict[str, Adapter]:
    """Return adapters on `device` holding a copy of `weights` ("<module path>.<parameter>").

    Raises UserError for a weight that belongs to no layer of the model, is missing or has another shape.
    """
    paths = {name.rsplit(".", 1)[0] for name in weights}
    unknown = sorted(paths - set(specs))
    if unknown:
        raise UserError(
            f"{unknown[0]}: the base model has no such layer; was the LoRA trained on another base?"
        )
    with device:
        adapters = build_adapters({path: spec for path, spec in specs.items() if path in paths}, config)
    for name, parameter in named_parameters(adapters).items():
        if name not in weights or weights[name].shape != parameter.shape:
            shape = tuple(weights[name].shape) if name in weights else "nothing"
            raise UserError(f"{name}: expected a tensor of shape {tuple(parameter.shape)}, found {shape}.")
        parameter.data = weights[name].detach().to(device, torch.float32, copy=True)
    return adapters


def initialize(
    adapters: Mapping[str, Adapter],
    seed: int,
    layers: Mapping[str, FrozenLayer] | None = None,
    device: torch.device | None = None,
) -> None:
    """Set every adapter's initial weights, which change nothing yet, drawn from `seed` and its layer's path.

    `layers` holds the base, read on `device` by methods that start from it (`needs_base`).
    """
    for path, adapter in adapters.items():
        base = None
        if adapter.needs_base and layers is not None:
            base = layers[path].weight(torch.float32, device or torch.device("cpu"))
        adapter.initialize(rng.generator(seed, "init", path), base)


def needs_base(adapters: Mapping[str, Adapter]) -> bool:
    """Return whether `initialize` must be given the base's layers."""
    return any(adapter.needs_base for adapter in adapters.values())


def named_parameters(adapters: Mapping[str, Adapter]) -> dict[str, nn.Parameter]:
    """Return every parameter by "<module path>.<parameter>", in a fixed order.

    All are part of the state; those that require no gradient are not trained (PiSSA's starting factors).
    """
    return {
        f"{path}.{name}": p for path, adapter in adapters.items() for name, p in adapter.named_parameters()
    }


def lr_scales(adapters: Mapping[str, Adapter], config: AdapterConfig) -> dict[str, float]:
    """Return each parameter's multiple of the learning rate: its layer's (`lrs`) times the LoRA+ ratio."""
    scales: dict[str, float] = {}
    for path, adapter in adapters.items():
        layer = first_match(path, config.lrs, 1.0) * (config.text_encoder if is_text(path) else 1.0)
        for name, _ in adapter.named_parameters():
            fast = name in adapter.starts_at_zero
            scales[f"{path}.{name}"] = layer * (config.lora_plus_ratio if fast else 1.0)
    return scales


@torch.no_grad()
def limit_norms(adapters: Mapping[str, Adapter], config: AdapterConfig) -> int:
    """Scale every difference larger than `config.max_norm` down to it; return how many were larger.

    All factors of an adapter shrink alike (sd-scripts' scale_weight_norms); DoRA's magnitudes stay.
    """
    scaled = list(adapters.values()) if config.max_norm else []
    norms = torch.stack([adapter.product().norm() for adapter in scaled]).tolist() if scaled else []
    for adapter, norm in zip(scaled, norms, strict=True):
        if norm > config.max_norm:
            factors = adapter.factors()
            for factor in factors:
                factor.mul_((config.max_norm / norm) ** (1 / len(factors)))
    return sum(norm > config.max_norm for norm in norms)


__all__ = [
    "ADAPTERS",
    "Adapter",
    "attach",
    "build_adapters",
    "draws",
    "for_layer",
    "ineffective_patterns",
    "initialize",
    "limit_norms",
    "lr_scales",
    "matches",
    "method_of",
    "named_parameters",
    "needs_base",
    "restore_adapters",
    "select",
]
