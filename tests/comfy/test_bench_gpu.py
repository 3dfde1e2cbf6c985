"""The parts of `graft bench gpu`, dry: the same code on tiny models."""

from __future__ import annotations

import pytest

from graft.commands.bench import gpu_parts
from graft.commands.bench.gpu import as_table
from graft.commands.bench.gpu_parts import PARTS, run_part
from graft.tests.support.card import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a dry run is for the CPU")


@pytest.fixture(autouse=True)
def there(monkeypatch):
    """ComfyUI is in this process already."""
    monkeypatch.setattr(gpu_parts, "start_comfyui", lambda device: None)


def dry(name):
    return run_part(next(part for part in PARTS if part.name == name), "cpu", "dry", None)


@pytest.mark.parametrize("plan", ["int8", "offload"])
def test_a_model_is_measured_by_a_plan(plan):
    (row,) = dry(f"sd35l {plan}")["rows"]
    wanted = gpu_parts.PLANS[plan]
    assert row["plan"] == f"{wanted['base']}, {wanted['checkpointing']}"
    assert 0 < row["seconds"] and 0 < row["of_peak"] < 2
    assert 0 < row["estimate_gib"] and row["peak_gib"] > 0 and row["ratio"] > 0


def test_the_bound_stands_beside():
    (row,) = dry("sdxl bound")["rows"]
    assert row["plan"] == "bound" and row["seconds"] > 0 and row["peak_gib"] > 0 and row["of_peak"] > 0


def test_settings_that_this_graft_lacks_are_skipped():
    part = gpu_parts.Part("x", "step", "flux", {"no_such_setting": 1})
    assert "no no_such_setting" in run_part(part, "cpu", "dry", None)["skipped"]


def test_batch_and_rank_count():
    small, large = dry("sd35m bf16-block"), dry("sd35m batch 3 rank 128 block")
    assert large["rows"][0]["estimate_gib"] > 1.5 * small["rows"][0]["estimate_gib"]


def test_every_plan_of_a_model_ends_in_the_same_bits():
    found = dry("sd35m plans")
    assert len(found["rows"]) == 9 and found["note"] == "all plans end in the same bits"


@pytest.mark.feature(122)
def test_a_run_in_little_memory_says_where_it_ends():
    assert dry("flux in 11 GiB")["note"].startswith("ends with resident, none; 0 GiB")


def test_dynamic_vram_is_compared_or_skipped():
    off, on = dry("dynamic off"), dry("dynamic on")
    assert off["note"].endswith("resident and offload are equal") and "NVIDIA" in on["skipped"]
    same = {"parts": {"dynamic off": off, "dynamic on": off}}
    assert "dynamic VRAM on and off end in the same bits" in as_table(same)
    other = {"rows": [{**row, "weights": "0"} for row in off["rows"]]}
    assert "DIFFERENT bits" in as_table({"parts": {"dynamic off": off, "dynamic on": other}})
