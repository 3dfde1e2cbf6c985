"""What is trained: small modules beside frozen layers. One file a method, one table of methods (`ADAPTERS`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..layer import LayerSpec
from .base import Adapter, attach, select
from .lora import LoRA

ADAPTERS: Mapping[str, type[Adapter]] = {"lora": LoRA}
"""By `AdapterConfig.algorithm`."""


def build_adapters(specs: Mapping[str, LayerSpec], config: AdapterConfig) -> dict[str, Adapter]:
    """Return one adapter of the configured method for each layer, its parameters not yet set.

    Raises ValueError when there is no such method.
    """
    if config.algorithm not in ADAPTERS:
        raise ValueError(f"algorithm: {config.algorithm!r} is unknown; choose one of {', '.join(ADAPTERS)}.")
    return {name: ADAPTERS[config.algorithm](spec, config) for name, spec in specs.items()}


def restore_adapters(
    specs: Mapping[str, LayerSpec], config: AdapterConfig, weights: Mapping[str, Tensor], device: torch.device
) -> dict[str, Adapter]:
    """Return adapters on `device` holding a copy of `weights` ("<module path>.<parameter>").

    Raises ValueError when a weight belongs to no layer of the model, or is missing, or has another shape.
    """
    paths = {name.rsplit(".", 1)[0] for name in weights}
    unknown = sorted(paths - set(specs))
    if unknown:
        raise ValueError(f"{unknown[0]}: the base model has no such layer; was the LoRA trained on another base?")
    adapters = build_adapters({path: spec for path, spec in specs.items() if path in paths}, config)
    for name, parameter in named_parameters(adapters).items():
        if name not in weights or weights[name].shape != parameter.shape:
            found = tuple(weights[name].shape) if name in weights else "nothing"
            raise ValueError(f"{name}: expected a tensor of shape {tuple(parameter.shape)}, found {found}.")
        parameter.data = weights[name].detach().to(device, torch.float32, copy=True)
    return adapters


def named_parameters(adapters: Mapping[str, Adapter]) -> dict[str, nn.Parameter]:
    """Return every trained parameter by "<module path>.<parameter>", in a fixed order."""
    return {f"{path}.{name}": p for path, adapter in adapters.items() for name, p in adapter.named_parameters()}


__all__ = ["ADAPTERS", "Adapter", "attach", "build_adapters", "named_parameters", "restore_adapters", "select"]
