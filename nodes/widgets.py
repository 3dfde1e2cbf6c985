"""Widgets made from the settings of a config, and a config from the values of its widgets.

The one rule: a setting's name, default, range, menu and tooltip are written once, in the field of its config.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from comfy_api.latest import io

from ..training.config import ADDED, SETTINGS, Setting, settings
from ..training.user_error import UserError

C = TypeVar("C", bound=Any)


def widgets(kind: type, **menus: Collection[str]) -> list[Any]:
    """Return a widget for every setting of a config class that its node of settings shows.

    `menus` are the choices of those whose choices are the rows of a table.
    """
    return [_widget(setting, menus.get(setting.input, ())) for setting in settings(kind, main=False)]


def widget(kind: type, name: str, menu: Collection[str] = (), **options: Any) -> Any:
    """Return the widget `name` of a setting of a config class; `options` are those of ComfyUI's input."""
    return _widget(next(setting for setting in settings(kind) if setting.input == name), menu, **options)


def _widget(setting: Setting, menu: Collection[str], **options: Any) -> Any:
    default, optional = setting.default, setting.optional or setting.advanced or setting.added
    default = "" if default == () else default
    options = {"default": default, "tooltip": setting.sentence, "optional": optional, **options}
    if choices := list(menu or setting.choices):
        made = io.Combo.Input(setting.input, options=choices, **options)
    elif isinstance(default, bool):
        made = io.Boolean.Input(setting.input, **options)
    elif isinstance(default, int):
        options = {"min": int(setting.low), "max": int(setting.high), "step": setting.step, **options}
        made = io.Int.Input(setting.input, **options)
    elif isinstance(default, float):
        options = {
            "min": setting.low,
            "max": setting.high,
            "step": setting.step or 0.01,
            "round": False,
            **options,
        }
        made = io.Float.Input(setting.input, **options)
    else:
        options = {"multiline": setting.multiline or setting.default == (), **options}
        made = io.String.Input(setting.input, **options)
    made = advanced(made) if setting.advanced else made
    return added(made) if setting.added else made


def in_order(inputs: Iterable[Any], names: Iterable[str]) -> list[Any]:
    """Return inputs in the order that saved graphs have them in: those named first, newer ones behind."""
    by_name = {entry.id: entry for entry in inputs}
    return [*(by_name.pop(name) for name in names), *by_name.values()]


def read(config: C, values: Mapping[str, Any]) -> C:
    """Return `config` with what the widgets say, also in the configs in it; other fields stay."""
    hints = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        names = [setting.input or item.name for setting in item.metadata.get(SETTINGS, ())]
        if dataclasses.is_dataclass(value):
            changes[item.name] = read(value, values)
        elif len(names) > 1:
            changes[item.name] = tuple(values.get(name, part) for name, part in zip(names, value))
        elif names and names[0] in values:
            changes[item.name] = _parsed(hints[item.name], names[0], values[names[0]])
    return dataclasses.replace(config, **changes)


def _parsed(hint: Any, name: str, value: Any) -> Any:
    """Return a widget's value as a field of type `hint` has it: a text as its lines, or as pairs."""
    if typing.get_origin(hint) is not tuple:
        return value
    entry = typing.get_args(hint)[0]
    return lines(value) if entry is str else _pairs(name, value, typing.get_args(entry)[1])


def _pairs(name: str, text: str, kind: type) -> tuple[tuple[str, Any], ...]:
    """Return lines of "pattern = value" as pairs."""
    pairs = []
    for line in lines(text):
        pattern, _, value = (part.strip() for part in line.rpartition("="))
        try:
            pairs.append((pattern, kind(value)))
        except ValueError:
            pattern = ""
        if not pattern:
            raise UserError(f"{name}: {line!r} is not a line like *attn* = 0.5")
    return tuple(pairs)


def seed_input(tooltip: str) -> Any:
    """Return the input "seed". It stays the same from one queue to the next: another seed is another run."""
    return io.Int.Input(
        "seed", default=0, min=0, max=2**64 - 1, control_after_generate=False, tooltip=tooltip
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
