"""A run's optimizer (`rows.OPTIMIZERS`), its state as flat tensors and numbers for a file without pickle.

The one rule: saved state never overrides a setting. The state is what the optimizer has gathered from the
gradients; the learning rate, the betas and the rest come from the configuration, also when a resumed run has
a different one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..config import OptimizerConfig
from ..log import log
from ..state import Number, OptimizerState
from ..user_error import UserError
from .package_class import find_class, make, measure
from .rows import OPTIMIZERS, Groups, Row


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    lr_scales: Mapping[str, float] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Return the optimizer that `config` names, over the named `parameters`.

    `lr_scales` multiply the learning rate, by parameter name; 1 for names that are missing. Raises UserError
    when there is no such optimizer, when it is not installed, or when it takes only one learning rate.
    """
    row = row_of(config)
    scales = {name: lr_scales.get(name, 1.0) for name in parameters}
    if row.finds_lr and len(set(scales.values())) > 1:
        raise UserError(
            f"optimizer {config.title!r} finds one learning rate for everything: switch off LoRA+ and "
            "learning rates by pattern, set text encoder in Build LoRA to 0 or 1, or use another optimizer."
        )
    groups = []
    for scale in dict.fromkeys(scales.values()):
        names = [name for name in parameters if scales[name] == scale]
        members = [parameters[name] for name in names]
        groups.append({"params": members, "names": names, "lr_scale": scale, "lr": config.lr * scale})
    return row.build(groups, config)


def optimizer_notes(config: OptimizerConfig) -> list[str]:
    """Return a sentence for everything about the settings that does not suit the optimizer."""
    row, notes = row_of(config), []
    if row.finds_lr and config.lr < 0.1:
        notes.append(
            f"{config.title} multiplies the rate it finds by the learning rate of {config.lr:g}, so it will "
            "hardly learn anything; 1 is usual."
        )
    if row.clips and config.max_grad_norm:
        notes.append(
            f"{config.title} shortens its steps itself, and finds a worse rate with clipped gradients: set "
            "max grad norm to 0."
        )
    if config.package_class:
        default = OptimizerConfig()
        own = ("weight_decay", "betas", "eps", "d_coef")
        idle = [name for name in own if getattr(config, name) != getattr(default, name)]
        notes += [f"{name} has no effect with {config.title}; set it in arguments." for name in idle]
    elif config.arguments:
        notes.append(f"arguments have no effect with {config.name}; they are for package_class.")
    return notes


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate, times the group's own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


@torch.no_grad()
def final_weights(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> dict[str, Tensor]:
    """Return the weights to sample with and to save, by parameter name, on the parameters' device. Do not
    change them.

    They are the parameters themselves, or for schedule-free training the average x = y + (1 - 1/beta1) (z -
    y), where y is trained and z is the fast sequence (Defazio et al. 2024, arXiv:2405.15682, eq. 3).
    """
    weights = {name: parameter.detach() for name, parameter, _ in _named(optimizer)}
    if row_of(config).averages:
        for name, parameter, group in _named(optimizer):
            if "z" in optimizer.state[parameter]:
                z = optimizer.state[parameter]["z"]
                weights[name] = torch.lerp(weights[name].float(), z, 1.0 - 1.0 / group["betas"][0])
    return weights


def save_optimizer(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> OptimizerState:
    """Return a copy of the optimizer's state on the CPU."""
    return _saved(optimizer, config, row_of(config))


def _saved(optimizer: torch.optim.Optimizer, config: OptimizerConfig, row: Row) -> OptimizerState:
    tensors: dict[str, Tensor] = {}
    values: dict[str, Number] = {}
    for name, parameter, _ in _named(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value.detach().to("cpu", copy=True)
            elif isinstance(value, tuple) and all(isinstance(part, int) for part in value):
                tensors[f"{name}.{key}{TUPLE}"] = torch.tensor(value, dtype=torch.int64)
            elif isinstance(value, Number):
                values[f"{name}.{key}"] = value
            elif value is not None:
                raise _unsaved(config, key, value)
        if row.averages:
            tensors[f"{name}.{TRAINED}"] = parameter.detach().to("cpu", torch.float32, copy=True)
    groups = tuple(_changed(group, config, row) for group in optimizer.param_groups)
    return OptimizerState(config.title, tensors, values, groups)


def _changed(group: Mapping[str, Any], config: OptimizerConfig, row: Row) -> dict[str, Number]:
    """Return what a parameter group has gathered: the entries of its row, or those unlike at its start."""
    if not config.package_class:
        return {key: group[key] for key in row.group_state if group.get(key) is not None}
    start, changed = group["at_start"], {}
    for key, value in group.items():
        if key in ("params", "names", "lr", "lr_scale", "at_start") or value is None:
            continue
        if key not in start or not _equal(value, start[key]):
            if not isinstance(value, Number):
                raise _unsaved(config, key, value)
            changed[key] = value
    return changed


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _unsaved(config: OptimizerConfig, key: str, value: Any) -> UserError:
    return UserError(
        f"optimizer {config.title}: its {key} is {type(value).__name__}, and a checkpoint holds tensors and "
        "numbers only, so that the run could not be resumed; choose another."
    )


def load_optimizer(optimizer: torch.optim.Optimizer, config: OptimizerConfig, state: OptimizerState) -> None:
    """Load the state that `save_optimizer` returned. That of another optimizer is ignored, with a warning."""
    if state.name != config.title:
        if state.name:
            log.warning("the optimizer changed from %s to %s, which starts afresh.", state.name, config.title)
        return
    for index, group in enumerate(optimizer.param_groups):
        if state.groups:  # after a change of learning rates by pattern, all groups take the first one's
            same = len(state.groups) == len(optimizer.param_groups)
            group.update(state.groups[index if same else 0])
    parameters = {name: (parameter, group) for name, parameter, group in _named(optimizer)}
    for name, value in {**state.tensors, **state.values}.items():
        path, key = name.rsplit(".", 1)
        parameter, group = parameters[path]
        if key == TRAINED and isinstance(value, Tensor):
            parameter.data = value.to(parameter.device, parameter.dtype, copy=True)
        elif key.endswith(TUPLE) and isinstance(value, Tensor):
            optimizer.state[parameter][key.removesuffix(TUPLE)] = tuple(value.tolist())
        else:
            optimizer.state[parameter][key] = _placed(optimizer, parameter, group, key, value)


TRAINED = "trained"
"""Key of the weights that a schedule-free optimizer trains at."""

TUPLE = "()"
"""End of a key whose tensor is a tuple of whole numbers in the optimizer."""


def reserve_optimizer_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> list[Tensor]:
    """Return empty tensors as large as the state that `optimizer` will allocate in its first step; none if
    it has state already.

    Holding them until then shows in time whether there is enough memory: while no weight has moved, the step
    can still be computed again by another memory plan.
    """
    if optimizer.state:
        return []
    each = row_of(config).state_bytes
    return [
        torch.empty(int(parameter.numel() * each), dtype=torch.uint8, device=parameter.device)
        for _, parameter, _ in _named(optimizer)
    ]


def _placed(
    optimizer: torch.optim.Optimizer, parameter: Tensor, group: Mapping[str, Any], key: str, value: Any
) -> Any:
    """Return a saved value where the optimizer keeps it: beside the weights, paged, or on the CPU."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not group.get("fused"):  # torch keeps the step count on the CPU
        return value.clone()
    if getattr(optimizer, "is_paged", False) and key in ("state1", "state2"):
        paged: Any = optimizer
        return paged.get_state_buffer(parameter, dtype=value.dtype).copy_(value)
    return value.to(parameter.device, copy=True)


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            yield name, parameter, group


def row_of(config: OptimizerConfig) -> Row:
    """Return the row of OPTIMIZERS that `config` names, or that of its class of a package.

    Raises UserError when there is none.
    """
    if config.package_class:
        return _package_row(config.package_class, config.arguments)
    if config.name not in OPTIMIZERS:
        raise UserError(f"optimizer: {config.name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[config.name]


@cache
def _package_row(name: str, arguments: str) -> Row:
    kind = find_class(name)
    config = OptimizerConfig(package_class=name, arguments=arguments)

    def build(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
        optimizer = make(kind, groups, config.lr, config.arguments)
        for group in optimizer.param_groups:
            skipped = {"params": None, "names": None}
            copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            group["at_start"] = copied | skipped
        return optimizer

    def save(optimizer: torch.optim.Optimizer) -> OptimizerState:
        return _saved(optimizer, config, Row(build, 0))

    def load(optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
        load_optimizer(optimizer, config, state)

    return Row(build, measure(partial(build, config=config), save, load, name))
