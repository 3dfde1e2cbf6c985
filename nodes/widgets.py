"""Widgets made from the fields of a config, so that names, types and defaults are written once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from comfy_api.latest import io

from ..training.config import ADDED


def widget(
    config: type,
    name: str,
    tooltip: str,
    *,
    options: Sequence[str] = (),
    low: float = 0,
    high: float = 1_000_000,
    step: float = 0.01,
) -> Any:
    """Return the input for field `name` of the dataclass `config`, with that field's default.

    A field of strings with `options` is a menu; `low`, `high` and `step` are for numbers.
    """
    [field] = (field for field in dataclasses.fields(config) if field.name == name)
    made = _widget(field.name, field.default, tooltip, options, low, high, step)
    return added(made) if ADDED in field.metadata else made


def _widget(
    name: str, default: Any, tooltip: str, options: Sequence[str], low: float, high: float, step: float
) -> Any:
    if options:
        return io.Combo.Input(name, options=list(options), default=default, tooltip=tooltip)
    if isinstance(default, bool):
        return io.Boolean.Input(name, default=default, tooltip=tooltip)
    if isinstance(default, int):
        return io.Int.Input(name, default=default, min=int(low), max=int(high), tooltip=tooltip)
    if isinstance(default, float):
        return io.Float.Input(
            name, default=default, min=low, max=high, step=step, round=False, tooltip=tooltip
        )
    return io.String.Input(name, default=default, tooltip=tooltip)


def seed_input(tooltip: str) -> Any:
    """Return the input "seed". It stays as it is from one queue to the next: another seed is another run."""
    return io.Int.Input(
        "seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=False, tooltip=tooltip
    )


def lines(text: str) -> tuple[str, ...]:
    """Return the lines of a text box that hold something."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def advanced(input: Any) -> Any:
    """Mark an input as one that few need: editors show it on demand."""
    return _marked(input, "advanced")


def added(input: Any) -> Any:
    """Mark a widget that is newer than people's graphs: at its default their runs are found again.

    It is optional, and the last of its node: saved workflows hold a node's values by their order alone.
    """
    input.optional = True
    return _marked(input, ADDED)


def _marked(input: Any, mark: str) -> Any:
    input.extra_dict = {**(input.extra_dict or {}), mark: True}
    return input
