"""The base class of Graft's nodes: checked inputs, no inference mode, readable errors.

ComfyUI 0.3.75 passes on whatever a client sends as a choice of a menu, and its queue ends with a message that
its log cannot write. The one rule: a class in ALL_NODES is a `Node`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from comfy_api.latest import io

from ..training.comfy.inference_mode import leave_inference_mode
from ..training.files.text import make_readable, require_letters, shown
from ..training.user_error import UserError

LONGEST_NAME = 1024
"""Letters of a file's name in a menu; systems take no path of more than 4096 bytes."""


class Files(io.Combo.Input):
    """A menu of files or folders, where a client may name one that came after the page was loaded."""


class Node(io.ComfyNode):
    """A node whose `execute` and `fingerprint_inputs` get inputs that its widgets could have."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("execute", "fingerprint_inputs"):
            method = vars(cls).get(name)
            if method is not None and not hasattr(method.__func__, "__wrapped__"):  # as in ComfyUI's clones
                setattr(cls, name, classmethod(_guarded(method.__func__)))


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(cls: type[Node], *args: Any, **values: Any) -> Any:
        try:
            schema = cls.SCHEMA or cls.define_schema()
            require_usable(schema, values)
            if method.__name__ == "execute":
                values = _without_null(schema, values)
            with leave_inference_mode():
                return method(cls, *args, **values)
        except UserError as error:
            make_readable(error)
            raise error.with_traceback(None) from None  # ComfyUI's log has the frames of bugs only
        except Exception as error:
            make_readable(error)
            raise

    return guarded


def _without_null(schema: io.Schema, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs without optional ones that are null. Raises UserError for a widget that has to be
    set.
    """
    for entry in schema.inputs:
        is_null = entry.id in values and values[entry.id] is None
        if is_null and isinstance(entry, io.WidgetInput) and not entry.optional:
            raise UserError(f"{entry.id}: missing; {schema.display_name} needs a value.")
    optional = {entry.id for entry in schema.inputs if entry.optional}
    return {name: value for name, value in values.items() if value is not None or name not in optional}


def require_usable(schema: io.Schema, values: Mapping[str, Any]) -> None:
    """Raise UserError for a value that a menu does not have, and for half of a letter in a text."""
    for entry in schema.inputs:
        value = values.get(entry.id)
        for each in value if schema.is_input_list and isinstance(value, list) else [value]:
            if each is not None:  # which an input is that is left out, or not known yet
                _require_usable(entry, each)


def _require_usable(entry: Any, value: Any) -> None:
    if isinstance(entry, io.String.Input) and isinstance(value, str):
        require_letters(value, f"{entry.id}: {shown(value)}")
    elif isinstance(entry, Files):
        if not isinstance(value, str) or len(value) > LONGEST_NAME:
            raise UserError(f"{entry.id}: {shown(value)} is not a file name; choose one from the menu.")
    elif isinstance(entry, io.Combo.Input) and value not in entry.options:
        choices = ", ".join(map(str, entry.options))
        raise UserError(f"{entry.id}: {shown(value)} is not one of {choices}.")
