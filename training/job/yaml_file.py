"""A YAML file, even a hostile one, as plain values.

The one rule: it takes no more time and memory than its size warrants, and every error is a UserError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..files.input_file import NO_FILE, is_ordinary
from ..files.text import require_letters, shown
from ..user_error import UserError

LARGEST = 1 << 18
"""Bytes. PyYAML reads about as many in a second, and nothing can stop it meanwhile."""
MOST_REPEATED = 4 * LARGEST
"""Letters of a file once each alias (*name) stands for a copy of what it names."""


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds.

    Raises UserError for what cannot be read, is too large, nested too deep, or repeats itself too often.
    """
    if not is_ordinary(path):
        raise UserError(f"{NO_FILE}.")
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise UserError(f"more than {LARGEST >> 10} KB; a job file is a page or two of settings.")
    try:
        return yaml.load(content.decode("utf-8-sig"), _Loader)
    except RecursionError:
        raise UserError("its lists are nested too deep.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"this is not a readable YAML file: {error}") from error


NOT_A_VALUE = (ValueError, ArithmeticError, LookupError, AttributeError)
"""What PyYAML raises for dates and numbers that there are not, as 2020-99-99."""


class _Loader(yaml.SafeLoader):
    """Checks the file's nodes before values are made of them."""

    def construct_document(self, node: yaml.Node) -> Any:
        if _letters(node, {}) > MOST_REPEATED:
            raise UserError("its aliases (*name) repeat too much to fit into memory; use fewer.")
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        construct = super().construct_object
        if not isinstance(node, yaml.ScalarNode):
            return construct(node, deep)
        place = f"line {node.start_mark.line + 1}: {shown(node.value)}"
        require_letters(node.value, place)
        try:
            return construct(node, deep)
        except NOT_A_VALUE as error:
            raise UserError(f"{place} is not what it looks like ({error}); put it in quotes.") from error


def _letters(node: Any, known: dict[int, float]) -> float:
    """Return how many letters a node holds, with a copy of what its aliases name; infinite if it holds
    itself.
    """
    if isinstance(node, tuple):  # a key and its value
        return sum(_letters(part, known) for part in node)
    if id(node) not in known:
        known[id(node)] = float("inf")
        below = [] if isinstance(node, yaml.ScalarNode) else node.value
        own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        known[id(node)] = 1 + own + sum(_letters(part, known) for part in below)
    return known[id(node)]
