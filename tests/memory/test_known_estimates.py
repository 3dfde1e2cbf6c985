"""A step is estimated once: later runs read the estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graft.tests.support.memory import BATCH, CONFIG, Sized
from graft.tests.support.tiny import TinyDenoiser
from graft.training.config import AdapterConfig, MemoryConfig
from graft.training.loop import train
from graft.training.memory import plan
from graft.training.memory.known_estimates import MOST, KnownEstimates, estimate_key
from graft.training.memory.plan import MemoryPlan, candidates, make_estimator


@pytest.fixture
def computed(monkeypatch):
    """The modes in which a step was estimated anew."""
    modes, estimate = [], plan.estimate_step

    def note(denoiser, adapted, config, batch, mode, dtype, **options):
        modes.append(mode)
        return estimate(denoiser, adapted, config, batch, mode, dtype, **options)

    monkeypatch.setattr(plan, "estimate_step", note)
    return modes


def denoiser_with(folder):
    denoiser = TinyDenoiser()
    denoiser.cache_folder = folder
    return denoiser


def estimates(denoiser, config=CONFIG, batch=BATCH):
    estimate = make_estimator(denoiser, denoiser.specs, config, batch)
    return [estimate(each) for each in candidates(config.memory)]


def test_a_later_run_estimates_nothing_and_plans_the_same(tmp_path, computed):
    first = estimates(denoiser_with(tmp_path / "cache"))
    assert sorted(computed) == ["block", "none", "selective"]
    computed.clear()
    assert estimates(denoiser_with(tmp_path / "cache")) == first and not computed


def test_training_reads_what_an_earlier_run_estimated(tmp_path, computed):
    config = replace(CONFIG, memory=MemoryConfig(budget_gb=1e-4))
    first = train(denoiser_with(tmp_path), Sized(), config, None, steps=1)
    assert computed
    computed.clear()
    again = train(denoiser_with(tmp_path), Sized(), config, None, steps=1)
    assert not computed
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in first.weights.items())


def changed(structure="tiny", adapter=CONFIG.adapter, batch=BATCH, mode="none", dtype=torch.float32):
    denoiser = TinyDenoiser()
    denoiser.structure = structure
    return estimate_key(denoiser, denoiser.specs, adapter, batch, mode, dtype)


@pytest.mark.parametrize(
    "change",
    [
        {"structure": "another"},
        {"adapter": AdapterConfig(rank=3)},
        {"batch": replace(BATCH, latents=torch.zeros(2, 4, 8, 16))},
        {"batch": replace(BATCH, latents=torch.zeros(1, 4, 8, 8), conditioning=BATCH.conditioning[:1])},
        {"batch": replace(BATCH, conditioning=[{"words": torch.tensor([[9]])}] * 2)},
        {"mode": "block"},
        {"dtype": torch.bfloat16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_step_has_another_key(change):
    assert changed(**change) != changed()


def test_the_numbers_of_a_batch_do_not_change_the_key():
    text = {"cross_attn": torch.randn(1, 4, 2000), "mask": torch.tensor([[1.0, 1.0, 0.0]])}
    other = {"cross_attn": torch.randn(1, 4, 2000), "mask": torch.tensor([[1.0, 0.5, 0.0]])}
    longer = {**text, "mask": torch.ones(1, 3)}
    one, two, three = (
        changed(batch=replace(BATCH, latents=torch.randn(2, 4, 8, 8), conditioning=[each] * 2))
        for each in (text, other, longer)
    )
    assert one == two != three


def test_the_shapes_of_references_decide_the_key_and_their_numbers_do_not():
    given = (torch.zeros(1, 4, 40, 40), torch.randn(1, 4, 40, 40), torch.zeros(1, 4, 40, 48))
    one, two, three = (
        changed(batch=replace(BATCH, conditioning=[{"reference_latents": [each.clamp(0)]}] * 2))
        for each in given
    )
    assert one == two != three


def test_other_code_has_another_key(monkeypatch, tmp_path):
    before = changed()
    monkeypatch.setattr("graft.training.memory.known_estimates._code", lambda: "another")
    assert changed() != before


@pytest.mark.parametrize("content", ["", "[]", '{"x": 3', "\0", '{"KEY": {"saved": 1}}', '{"KEY": 7}'])
def test_a_damaged_file_is_computed_again_and_repaired(content, tmp_path, computed):
    key = estimate_key(TinyDenoiser(), TinyDenoiser().specs, CONFIG.adapter, BATCH, "none", torch.float32)
    (tmp_path / "estimates.json").write_text(content.replace("KEY", key))
    for _ in range(2):
        make_estimator(denoiser_with(tmp_path), TinyDenoiser().specs, CONFIG, BATCH)(
            MemoryPlan("resident", "none")
        )
    assert computed == ["none"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, computed):
    (tmp_path / "file").write_text("in the way")
    assert estimates(denoiser_with(tmp_path / "file")) == estimates(TinyDenoiser())


def test_the_file_keeps_the_newest(tmp_path):
    known = KnownEstimates(tmp_path)
    step = estimates(TinyDenoiser())[0].step
    for index in range(0, MOST + 20, 10):
        known.remember(str(index), step)
    known.file.write_text(known.file.read_text().replace('"0":', '"first":'))
    assert known.recall("first") == step and known.recall("none") is None
