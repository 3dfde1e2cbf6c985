"""`python dev/mutate.py` tells a change that a test notices from one that none does."""

from __future__ import annotations

import ast
import os

import pytest

from graft.dev import mutate
from graft.dev.mutants import mutants

SOURCE = """
def clip(value: float, most=2):
    if value > most:
        return most
    return value
"""
TEST = """
import os, runpy

clip = runpy.run_path(os.path.abspath("training/clip.py"))["clip"]

def test_what_is_below_stays():
    assert clip(1) == 1

def test_what_is_above_is_clipped():
    assert clip(3) == 2
"""


def test_what_a_file_does_is_changed_in_small_ways():
    found = [str(m).split("\n", 1)[1] for m in mutants("training/clip.py", SOURCE.encode())]
    assert found == [
        "- def clip(value: float, most=2):\n+ def clip(value: float, most=3):",
        "- if value > most:\n+ if (value >= most):",
        "- return most\n+ return None",
        "- return value\n+ return None",
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_mutant_that_no_test_notices_survives(tmp_path):
    root = tmp_path / "graft"
    for name, text in (("training/clip.py", SOURCE), ("tests/test_clip.py", TEST)):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    reached = {"tests/test_clip.py": mutate.reach(root, "tests/test_clip.py")}
    below, above = (
        f"tests/test_clip.py::test_what_is_{what}" for what in ("below_stays", "above_is_clipped")
    )
    killers = []
    for mutant in mutants("training/clip.py", SOURCE.encode()):
        groups = mutate.choose_tests(mutant, "tests/clip/", reached)
        assert [sorted(group) for group in groups] == [[above, below]]
        killers.append(mutate.kill(root, mutant, [[above, below]]))
    assert killers == [above, None, above, below]
    assert (root / "training/clip.py").read_text() == SOURCE


def test_each_survivor_that_is_argued_is_a_change_of_todays_source_and_has_a_reason():
    reasons = mutate.argued()
    assert all(len(reason) > 20 for reason in reasons.values())
    files = {mutant.split(":")[0] for mutant in reasons}
    today = {str(m) for file in files for m in mutants(file, (mutate.ROOT / file).read_bytes())}
    assert not reasons.keys() - today, "the source has changed: run dev/mutate.py and argue again, or drop it"


def test_what_is_said_of_types_is_left_alone():
    source = "def f(x: int | None) -> int | None: ...\ny: int | str\nraise ValueError(1 + 1)"
    assert [ast.unparse(ast.parse(m.source)) for m in mutants("f.py", source.encode())] == [
        "def f(x: int | None) -> int | None:\n    ...\ny: int | str\npass"
    ]
