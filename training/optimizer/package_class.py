"""Optimizers of any package by their class, `package.Class`: found, tried on a few numbers, and measured.

The trial is what lets a run be resumed: steps, a saved state, and steps from it must equal steps at once, bit
for bit. A class that fails it, or keeps what is no tensor and no number, is refused before step 1.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..files.input_file import parse_json
from ..optional_packages import optional
from ..user_error import UserError

RATE = 1e-3
SHAPES = {"down": (16, 512), "up": (512, 16), "vector": (40,)}
"""Of a LoRA's factors and a bias."""


def find_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer class at `name`, "package.Class" or "package.module.Class".

    Raises UserError where there is none.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        raise UserError(f"package_class: {name!r} is no package.Class, such as torch.optim.NAdam.")
    module, _, title = name.rpartition(".")
    kind = getattr(optional(module, f"optimizer {name!r}", "clear package_class"), title, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UserError(
            f"package_class: {module} has no optimizer {title}; write it as in its documentation."
        )
    if callable(getattr(kind, "eval", None)):
        raise UserError(
            f"package_class: {name} is schedule-free: it samples with other weights than it trains. Choose "
            "schedule-free-adamw, schedule-free-radam or prodigy-plus-schedule-free instead."
        )
    return kind


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments that `text` has as a JSON object. Raises UserError for anything else."""
    try:
        arguments = parse_json(text) if text.strip() else {}
    except UserError as error:
        raise UserError(f"arguments: not JSON ({error}); write for instance {EXAMPLE}.") from error
    if not isinstance(arguments, dict):
        raise UserError(f"arguments: expected a JSON object such as {EXAMPLE}, got {text!r}.")
    for name in {"lr", "params"} & arguments.keys():
        raise UserError(f"arguments: {name} is not one of them; the learning rate is set in Train Steps.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}


EXAMPLE = '{"betas": [0.9, 0.99], "weight_decay": 0.01}'

Groups = list[dict[str, Any]]


def make(
    kind: type[torch.optim.Optimizer], groups: Groups, lr: float, arguments: str
) -> torch.optim.Optimizer:
    """Return an optimizer of class `kind`. Raises UserError where it does not take the arguments."""
    with contextlib.redirect_stdout(io.StringIO()):  # some print their settings
        try:
            return kind(groups, lr=lr, **read_arguments(arguments))  # type: ignore[call-arg]
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise UserError(f"{kind.__name__} does not take these arguments: {error}.") from error


Save = Callable[[torch.optim.Optimizer], Any]
Load = Callable[[torch.optim.Optimizer, Any], None]


def measure(build: Callable[[Groups], torch.optim.Optimizer], save: Save, load: Load, name: str) -> float:
    """Return the bytes of state per trained number of the optimizer that `build` makes.

    Raises UserError where training resumed from `save` and `load` would differ from training at once, or
    where a step fails.
    """
    with torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()):
        try:
            whole, _ = _run(build, steps=5)
            half, optimizer = _run(build, steps=3)
            resumed, _ = _run(
                build, steps=2, first=3, weights=half, prepare=lambda o: load(o, save(optimizer))
            )
        except UserError:
            raise
        except Exception as error:  # of another program
            raise UserError(
                f"package_class: {name} fails in a trial step ({type(error).__name__}: {error}); choose "
                "another."
            ) from error
    if any(not torch.equal(whole[key], resumed[key]) for key in whole):
        raise UserError(
            f"package_class: {name} cannot be resumed: in a trial, steps from its saved state differ from "
            "steps at once. Choose an optimizer that keeps all it remembers in its state."
        )
    numbers = sum(weight.numel() for weight in whole.values())
    tensors = (t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    return sum(tensor.nbytes for tensor in tensors) / numbers


def _run(
    build: Callable[[Groups], torch.optim.Optimizer],
    *,
    steps: int,
    first: int = 0,
    weights: Mapping[str, Tensor] | None = None,
    prepare: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """Return the weights after `steps`, and the optimizer, with gradients that depend on the step alone."""
    start = {name: torch.zeros(shape) for name, shape in SHAPES.items()} if weights is None else weights
    parameters = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in start.items()}
    members = {"params": list(parameters.values()), "names": list(parameters), "lr_scale": 1.0, "lr": RATE}
    optimizer = build([members])
    prepare(optimizer)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}, optimizer
