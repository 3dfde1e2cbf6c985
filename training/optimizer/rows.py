"""The optimizers as rows of a table: how each is built, what its state takes, and what else it needs."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import OptimizerConfig
from ..optional_packages import optional
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
    """Entries of a parameter group that change as it runs; of a class of a package, any that changed."""
    step_bytes: float = 0.0
    """Bytes of temporary tensors per trained number, if a step is computed for all tensors at once."""
    averages: bool = False
    """Schedule-free: the weights to sample with are not those it trains at; see `final_weights`."""
    most_lr: float = 0.0
    """Learning rate above which a LoRA of a full-size model is mostly broken; 0 where none is known."""
    finds_lr: bool = False
    """It finds one learning rate for all parameters; the configured one multiplies it."""
    clips: bool = False
    """It shortens its steps itself, and is misled by gradients that were clipped before."""


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


def _muon(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Momentum made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), at the size
    of AdamW's steps (Liu et al. 2025, arXiv:2502.16982), so that learning rates for AdamW suit it. Vectors
    are trained by AdamW."""
    parts = []
    for group in groups:
        pairs = list(zip(group["names"], group["params"], strict=True))
        for matrices in (True, False):
            own = [(name, p) for name, p in pairs if _is_matrix(p) == matrices]
            if not own:
                continue
            names, members = zip(*own)
            part = {**group, "names": list(names), "params": list(members), "use_muon": matrices}
            part["weight_decay"] = config.weight_decay
            parts.append(part | ({} if matrices else {"betas": (config.betas[0], 0.99), "eps": 1e-8}))
    module = _installed("pytorch_optimizer", config.name)
    return module.Muon(parts, momentum=config.betas[0], use_adjusted_lr=True)  # type: ignore[no-any-return]


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and min(parameter.flatten(1).shape) > 1


def _came(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Luo et al. 2023, arXiv:2307.02047."""
    settings = {"lr": config.lr, "betas": (*config.betas, 0.9999), "weight_decay": config.weight_decay}
    module = _installed("pytorch_optimizer", config.name)
    return module.CAME(groups, **settings)  # type: ignore[no-any-return]


def _ademamix(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Pagliardini et al. 2024, arXiv:2409.03137."""
    settings = {**_adam(config), "betas": (*config.betas, 0.9999), "weight_decouple": True}
    module = _installed("pytorch_optimizer", config.name)
    return module.AdEMAMix(groups, **settings)  # type: ignore[no-any-return]


def _prodigy_plus(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Prodigy's rate for schedule-free training
    (https://github.com/LoganBooker/prodigy-plus-schedule-free)."""
    module = optional(
        "prodigyplus",
        f"optimizer {config.name!r}",
        "choose adamw or prodigy",
        package="prodigy-plus-schedule-free",
    )
    own = {"d_coef": config.d_coef, "split_groups": False, "stochastic_rounding": False}
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its settings
        built = module.ProdigyPlusScheduleFree(groups, **_adam(config), **own)
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


def _installed(module: str, optimizer: str) -> Any:
    package = module.replace("_", "-")
    return optional(module, f"optimizer {optimizer!r}", "choose adamw or lion", package=package)


PRODIGY_PLUS = (
    "d", "d_prev", "d_numerator", "d_denom", "prev_d_numerator", "max_d_numerator", "effective_lr", "k",
    "weight_sum", "running_weight_sum", "train_mode",
)  # fmt: skip
SCHEDULE_FREE = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode")

OPTIMIZERS: Mapping[str, Row] = {
    "adamw": Row(_adamw, 8, most_lr=2e-3),
    "adamw8bit": Row(_bitsandbytes("AdamW8bit"), 2.1, most_lr=2e-3),
    "paged-adamw8bit": Row(_bitsandbytes("PagedAdamW8bit"), 2.1, most_lr=2e-3),
    "lion": Row(_lion, 4, most_lr=4e-4),
    "lion8bit": Row(_bitsandbytes("Lion8bit"), 1.1, most_lr=4e-4),
    "adafactor": Row(_adafactor, 0.5),
    "prodigy": Row(_prodigy, 16, ("d", "d_max", "d_numerator", "d_denom", "d_hat", "k"), finds_lr=True),
    "schedule-free-adamw": Row(
        _schedule_free("AdamWScheduleFree"), 8, SCHEDULE_FREE, step_bytes=4, averages=True
    ),
    "schedule-free-radam": Row(_schedule_free("RAdamScheduleFree"), 8, SCHEDULE_FREE, averages=True),
    "stable-adamw": Row(_stable_adamw, 8, most_lr=2e-3),
    "sgd": Row(_sgd, 4, step_bytes=4),
    "muon": Row(_muon, 4, ("step",), step_bytes=8, most_lr=2e-3),
    "came": Row(_came, 4, ("step",), step_bytes=8, most_lr=2e-3),
    "ademamix": Row(_ademamix, 12, ("step",), step_bytes=8, most_lr=2e-3),
    "prodigy-plus-schedule-free": Row(
        _prodigy_plus, 4.4, PRODIGY_PLUS, averages=True, finds_lr=True, clips=True
    ),
}
"""Name in the settings -> optimizer."""
