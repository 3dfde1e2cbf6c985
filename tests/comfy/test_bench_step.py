"""`graft bench step`: every way to train is measured on the same base, and what cannot be is named."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest

from graft.commands.bench.base_models import NARROW
from graft.commands.bench.step import CONTENDERS, as_table, measure
from graft.tests.support.card import PRETENDED

SMALL = replace(NARROW["flux"], network={**NARROW["flux"].network, "depth": 1, "depth_single_blocks": 1})
pytestmark = pytest.mark.skipif(PRETENDED, reason="autocast does not know the pretended card")


def measured_with(names, **changes):
    options = {"rank": 2, "batch": 2, "clock": "wall", "repeats": 1, "steps": 1, "rss": False}
    return measure("flux", SMALL, Namespace(only=names, **{"profile": False} | options | changes))


def test_every_contender_is_measured_or_named():
    names = [name for name in CONTENDERS if not name.endswith("_compiled")]
    report = measured_with(names)
    measured, missing = set(report["tensors_mb"]), set(report["missing"])
    assert measured | missing == set(names) and missing <= {"train_lora_node", "train_lora_node_as_shipped"}
    assert all(report[name] > 0 and report["of_peak"][name] > 0 for name in measured)
    assert report["tensors_mb"]["bound"] >= report["base_mb"]
    assert all(name in as_table(report) for name in names)


def test_where_a_step_goes_is_told_in_parts():
    names = ["graft", "bound"]
    report = measured_with(names, profile=True)
    parts = report["profile"]
    # On a busy machine a step this small may take less than what is beside it: then it has no parts.
    assert set(parts) == set(names) and all(
        not each or sum(each.values()) == pytest.approx(1, abs=0.01) for each in parts.values()
    )
    assert not any("int8 products" in parts[name] for name in names)
    assert 0 < report["added_up"] <= 1.5 * report["bound"]
