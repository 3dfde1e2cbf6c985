"""A resumable training on the CPU and its optimizers, for the starter model.

Every random number comes from the seed and the step, so an interrupted training ends as an undisturbed one.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

log = logging.getLogger("starter")

CHECKPOINT_SECONDS = 180


@dataclass(frozen=True)
class Training:
    """One resumable training: linear warm-up, constant, linear to zero over the last `cooldown` of `steps`.

    Until the cooldown begins `steps` may still be changed between starts, so the end can be set late.
    """

    name: str
    folder: Path
    steps: int
    warmup: int
    cooldown: float
    seed: int

    def rate(self, step: int) -> float:
        return min(1, (step + 1) / self.warmup, (self.steps - step) / (self.cooldown * self.steps))

    def go(
        self,
        loss_at: Callable[[int, torch.Generator], Tensor],
        modules: dict[str, nn.Module],
        updates: Sequence[torch.optim.Optimizer],
        *,
        after_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        path = self.folder / f"{self.name}.pt"
        step = self.resume(path, modules, updates)
        saved, losses, began = time.time(), [], time.time()
        while step < self.steps:
            loss = loss_at(step, torch.Generator().manual_seed(1_000_003 * self.seed + step))
            loss.backward()
            for update in updates:
                for group in update.param_groups:
                    group["lr"] = group["peak_lr"] * self.rate(step)
                update.step()
                update.zero_grad()
            after_step(step)
            step += 1
            losses.append(loss.item())
            if step % 20 == 0:
                recent, seconds = np.mean(losses[-200:]), (time.time() - began) / 20
                log.info("%s %d/%d loss %.4f, %.2f s/step", self.name, step, self.steps, recent, seconds)
                began = time.time()
            if step == self.steps or time.time() - saved > CHECKPOINT_SECONDS:
                state = {"step": step, "updates": [u.state_dict() for u in updates]}
                save_atomically(state | {"modules": {k: m.state_dict() for k, m in modules.items()}}, path)
                saved = time.time()

    def resume(
        self, path: Path, modules: dict[str, nn.Module], updates: Sequence[torch.optim.Optimizer]
    ) -> int:
        if not path.exists():
            return 0
        state = torch.load(path)
        for key, module in modules.items():
            module.load_state_dict(state["modules"][key])
        for update, saved in zip(updates, state["updates"], strict=True):
            update.load_state_dict(saved)
        log.info("%s: going on from step %d", self.name, state["step"])
        return state["step"]


def optimizers(
    named: Any, *, muon_lr: float, adam_lr: float, weight_decay: float = 0.0
) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices; AdamW for inputs, outputs, modulation, biases and norms."""
    hidden, rest = [], []
    for name, p in named:
        inner = (
            name.startswith("joint_blocks") and "adaLN" not in name
            if p.ndim == 2
            else p.shape[:2] == (64, 64)
        )
        if p.ndim:  # TAESD's two scalars are constants
            (hidden if p.ndim > 1 and inner else rest).append(p)
    return [
        Muon([{"params": hidden, "peak_lr": muon_lr}], weight_decay=weight_decay),
        torch.optim.AdamW(
            [{"params": rest, "peak_lr": adam_lr}], betas=(0.9, 0.98), weight_decay=0.0, fused=True
        ),
    ]


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal, a convolution being one (out, in*h*w) matrix.

    torch.optim.Muon takes no convolutions and one matrix at a time; here those of one shape share a batch.
    Times 0.2, updates are AdamW's size, so learning rates carry over (Liu et al. 2025, arXiv:2502.16982).
    """

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                momentum = self.state[p]["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"]).flatten(1)
                by_shape.setdefault(update.shape, []).append((p, update))
            for shape, pairs in by_shape.items():
                size = group["lr"] * 0.2 * math.sqrt(max(shape))
                for (p, _), update in zip(pairs, orthogonalize(torch.stack([u for _, u in pairs]))):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(update.view(p.shape).to(p.dtype), alpha=size)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring the singular values of each matrix near 1 by five Newton-Schulz steps (Jordan 2024)."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


def save_atomically(value: Any, path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    torch.save(value, part)
    os.replace(part, path)
