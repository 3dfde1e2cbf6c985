"""Lion and StableAdamW, which torch lacks, in plain PyTorch with float32 state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Steps of equal size in the direction of the sign, with half of Adam's state.

    Chen et al. 2023, arXiv:2302.06675, alg. 2. Needs a third to a tenth of Adam's learning rate.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p, gradient in _with_gradient(group):
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                momentum = self.state[p]["momentum"]
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(torch.lerp(gradient, momentum, beta1)), alpha=-group["lr"])
                momentum.lerp_(gradient, 1.0 - beta2)


class StableAdamW(torch.optim.Optimizer):
    """AdamW with shorter steps for gradients that are larger than their running average predicts.

    Wortsman et al. 2023, arXiv:2304.13013, alg. 2: the learning rate of a tensor is divided by max(1, RMS),
    where RMS^2 = mean(g^2 / max(v, eps^2)). It replaces gradient clipping.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, gradient in _with_gradient(group):
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] = t = state["step"] + 1
                m, v = state["exp_avg"], state["exp_avg_sq"]
                beta1, beta2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in group["betas"])
                m.lerp_(gradient, 1.0 - beta1)
                v.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
                rms = (gradient.square() / v.clamp_min(group["eps"] ** 2)).mean().sqrt()
                lr = group["lr"] / rms.clamp_min(1.0)
                p.mul_(1.0 - lr * group["weight_decay"])
                p.sub_(lr * m / (v.sqrt() + group["eps"]))


def _with_gradient(group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    return [(p, p.grad) for p in group["params"] if p.grad is not None]
