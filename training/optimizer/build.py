"""Optimizers as rows of a table, and their state as flat tensors and numbers for a file without pickle.

The one rule: saved state never overrides a setting. The state is what the optimizer has gathered from the
gradients; the learning rate, the betas and the rest come from the configuration, also when a resumed run has
a different one.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..config import OptimizerConfig
from ..log import log
from ..optional_packages import optional
from ..state import Number, OptimizerState
from ..user_error import UserError
from .bitsandbytes_fixes import fix_waits_and_leaks
from .lion_and_stable_adamw import Lion, StableAdamW

Groups = list[dict[str, Any]]
Build = Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]


@dataclass(frozen=True)
class Row:
    """One optimizer."""

    build: Build
    state_bytes: float
    """Bytes of optimizer state per trained number."""
    group_state: tuple[str, ...] = ()
    """Entries of a parameter group that change as it runs."""
    step_bytes: float = 0.0
    """Bytes of temporary tensors per trained number, if a step is computed for all tensors at once."""
    averages: bool = False
    """Schedule-free: the weights to sample with are not those it trains at; see `final_weights`."""
    finds_lr: bool = False
    """It finds one learning rate for all parameters; the configured one multiplies it."""


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
            f"optimizer {config.name!r} finds one learning rate for everything: switch off LoRA+ and "
            "learning rates by pattern, set text encoder in Build LoRA to 0 or 1, or use another optimizer."
        )
    groups = []
    for scale in dict.fromkeys(scales.values()):
        names = [name for name in parameters if scales[name] == scale]
        members = [parameters[name] for name in names]
        groups.append({"params": members, "names": names, "lr_scale": scale, "lr": config.lr * scale})
    return row.build(groups, config)


def optimizer_notes(config: OptimizerConfig) -> list[str]:
    """Return a sentence if the learning rate looks like one for other optimizers."""
    if not row_of(config).finds_lr or config.lr >= 0.1:
        return []
    return [
        f"{config.name} multiplies the rate it finds by the learning rate of {config.lr:g}, so it will "
        "hardly learn anything; 1 is usual."
    ]


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
    row = row_of(config)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Number] = {}
    for name, parameter, _ in _named(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value.detach().to("cpu", copy=True)
            elif value is not None:
                values[f"{name}.{key}"] = value
        if row.averages:
            tensors[f"{name}.{TRAINED}"] = parameter.detach().to("cpu", torch.float32, copy=True)
    groups = [
        {key: group[key] for key in row.group_state if key in group} for group in optimizer.param_groups
    ]
    return OptimizerState(config.name, tensors, values, tuple(groups))


def load_optimizer(optimizer: torch.optim.Optimizer, config: OptimizerConfig, state: OptimizerState) -> None:
    """Load the state that `save_optimizer` returned. That of another optimizer is ignored, with a warning."""
    if state.name != config.name:
        if state.name:
            log.warning("the optimizer changed from %s to %s, which starts afresh.", state.name, config.name)
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
        else:
            optimizer.state[parameter][key] = _placed(optimizer, parameter, group, key, value)


TRAINED = "trained"
"""Key of the weights that a schedule-free optimizer trains at."""


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
    """Return the row of OPTIMIZERS that `config` names. Raises UserError when there is none."""
    if config.name not in OPTIMIZERS:
        raise UserError(f"optimizer: {config.name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[config.name]


def _adam(config: OptimizerConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}


def _adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    parameters = [parameter for group in groups for parameter in group["params"]]
    fuses = all(p.device.type in ("cuda", "cpu") for p in parameters)
    return torch.optim.AdamW(groups, **_adam(config), fused=fuses or None)


def _lion(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    return Lion(groups, config.lr, config.betas, config.weight_decay)


def _stable_adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    return StableAdamW(groups, **_adam(config))


def _adafactor(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Shazeer & Stern 2018, arXiv:1804.04235, without the paper's scaling by a tensor's own size (the 1.0
    switches it off), which would keep LoRA weights at 0, where they start."""
    if not hasattr(torch.optim, "Adafactor"):
        raise UserError("optimizer 'adafactor' needs torch 2.5 or newer; update ComfyUI, or choose adamw.")
    eps = (1e-15, 1.0)
    return torch.optim.Adafactor(groups, lr=config.lr, eps=eps, weight_decay=config.weight_decay)


def _sgd(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0], weight_decay=config.weight_decay)


def _prodigy(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Mishchenko & Defazio 2023, arXiv:2306.06101, set as the authors advise for runs with a warm-up."""
    module = _installed("prodigyopt", config.name)
    advice = {"decouple": True, "use_bias_correction": True, "safeguard_warmup": True}
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its settings
        built = module.Prodigy(groups, **_adam(config), **advice, d_coef=config.d_coef)
    return built  # type: ignore[no-any-return]


def _bitsandbytes(name: str) -> Build:
    def build(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
        options = _adam(config)
        if "Lion" in name:
            del options["eps"]
        kind = getattr(_installed("bitsandbytes", config.name).optim, name)
        return fix_waits_and_leaks(kind)(groups, **options)  # type: ignore[no-any-return]

    return build


def _schedule_free(name: str) -> Build:
    def build(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
        kind = getattr(_installed("schedulefree", config.name), name)
        optimizer: torch.optim.Optimizer = kind(groups, **_adam(config))
        optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    return build


def _installed(package: str, optimizer: str) -> Any:
    return optional(package, f"optimizer {optimizer!r}", "choose adamw or lion")


SCHEDULE_FREE = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode")

OPTIMIZERS: Mapping[str, Row] = {
    "adamw": Row(_adamw, 8),
    "adamw8bit": Row(_bitsandbytes("AdamW8bit"), 2.1),
    "paged-adamw8bit": Row(_bitsandbytes("PagedAdamW8bit"), 2.1),
    "lion": Row(_lion, 4),
    "lion8bit": Row(_bitsandbytes("Lion8bit"), 1.1),
    "adafactor": Row(_adafactor, 0.5),
    "prodigy": Row(_prodigy, 16, ("d", "d_max", "d_numerator", "d_denom", "d_hat", "k"), finds_lr=True),
    "schedule-free-adamw": Row(
        _schedule_free("AdamWScheduleFree"), 8, SCHEDULE_FREE, step_bytes=4, averages=True
    ),
    "schedule-free-radam": Row(_schedule_free("RAdamScheduleFree"), 8, SCHEDULE_FREE, averages=True),
    "stable-adamw": Row(_stable_adamw, 8),
    "sgd": Row(_sgd, 4, step_bytes=4),
}
"""Name in the settings -> optimizer."""
