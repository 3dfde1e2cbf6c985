"""The limits of the house's figures (`python dev/house.py`)."""

from __future__ import annotations

import ast

import pytest

from graft.dev import house

LIMITS = {
    "top-level entries": 17,
    "loose modules in training/": 14,
    "arrows up": 0,
    "circles of files": 0,
    "circles of rooms": 0,
    "lines of the largest __init__.py": 60,
    "lines of a function, 95th percentile": 30,
    "functions that act and begin with no verb": 0,
}


@pytest.fixture(scope="module")
def figures():
    return house.figures()


@pytest.mark.parametrize("name", LIMITS)
def test_the_house_keeps_within_its_limits(figures, name):
    assert figures[name] <= LIMITS[name], "`python dev/house.py` says where"


def test_a_circle_and_an_arrow_up_are_found():
    low, high = house.ROOT / "training" / "state.py", house.ROOT / "nodes" / "train.py"
    assert house.arrows_up({low: {high}, high: {low}}) == ["training/state.py -> nodes/train.py"]
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert low in house.imported_files(house.ROOT / "training" / "loop.py")
    own = house.imported_files(house.ROOT / "tests" / "dev" / "test_house.py")
    assert own == {house.ROOT / "dev" / "house.py"}


@pytest.mark.parametrize(
    ("source", "acts"),
    [
        ("def x() -> None: pass", True),
        ("def x() -> int:\n '''Write it.'''", True),
        ("def x() -> int:\n '''Return it.'''", False),
        ("@contextmanager\ndef x() -> None:\n '''Lock it.'''", False),
    ],
)
def test_what_acts_is_told_from_what_gives(source, acts):
    assert house.acts(ast.parse(source).body[0]) is acts
