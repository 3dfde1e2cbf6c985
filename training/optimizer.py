"""Optimizers as rows of a table, and their state as flat tensors and numbers that a file can hold without pickle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .config import OptimizerConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's memory: tensors and plain values by "<parameter name>.<key>"."""

    name: str = ""
    """Row of OPTIMIZERS that it belongs to."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, float | int | bool] = field(default_factory=dict)


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that `config` names over named `parameters`.

    Raises ValueError when there is no such optimizer.
    """
    if config.name not in OPTIMIZERS:
        raise ValueError(f"optimizer: {config.name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}.")
    groups = [{"params": list(parameters.values()), "names": list(parameters)}]
    return OPTIMIZERS[config.name](groups, config)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate, times the group's own "lr_scale" where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def save_optimizer(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> OptimizerState:
    """Return a copy of the optimizer's memory on the CPU."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, float | int | bool] = {}
    for name, parameter in _named(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value.detach().to("cpu", copy=True)
            else:
                values[f"{name}.{key}"] = value
    return OptimizerState(config.name, tensors, values)


def load_optimizer(optimizer: torch.optim.Optimizer, config: OptimizerConfig, state: OptimizerState) -> None:
    """Give `optimizer` the memory that `save_optimizer` returned; another optimizer's memory is left aside."""
    if state.name != config.name:
        if state.name:
            log.warning("Graft: the optimizer changed from %s to %s and starts anew.", state.name, config.name)
        return
    parameters = dict(_named(optimizer))
    for name, value in {**state.tensors, **state.values}.items():
        path, key = name.rsplit(".", 1)
        parameter = parameters[path]
        if isinstance(value, Tensor):  # torch keeps the step count on the CPU and everything else beside the weights
            value = value.to("cpu" if key == "step" else parameter.device, copy=True)
        optimizer.state[parameter][key] = value


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )


OPTIMIZERS: Mapping[str, Callable[[list[dict[str, Any]], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
}
"""Name -> constructor."""
