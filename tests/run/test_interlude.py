"""Between two steps a run gives its base back, for samples to be drawn, and goes on as if it had not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graft.tests.support.runs import CONFIG, Cancelled, assert_same, counting, go
from graft.training.config import EmaConfig, OptimizerConfig, ValidationConfig
from graft.training.loop import train

from ..support.tiny import TinyDataset, TinyDenoiser, TinySamples


def using_the_base(denoiser, seen):
    """Return an on_step that takes every interlude, disturbs what it may and notes what the base computes."""
    owners = {name: module.forward for name, module in denoiser.module.named_modules()}

    def on_step(progress, handles):
        with handles.give_base_back(), torch.inference_mode():
            torch.manual_seed(progress.step)
            forwards = {name: module.forward for name, module in denoiser.module.named_modules()}
            words = torch.zeros(1, 1, dtype=torch.long)
            output = denoiser.module(torch.ones(1, 4, 8, 8), torch.ones(1), words)
            seen.append((forwards == owners, output))
            handles.state()

    return on_step


@pytest.mark.parametrize("optimizer", ["adamw", "schedule-free-adamw", "prodigy", "adafactor", "adamw8bit"])
def test_a_run_with_interludes_ends_in_the_state_of_one_without(optimizer):
    ema = EmaConfig(decay=0.0 if optimizer.startswith("schedule") else 0.9)
    config = dataclasses.replace(
        CONFIG,
        optimizer=OptimizerConfig(name=optimizer, lr=1e-3),
        ema=ema,
        validation=ValidationConfig(every=2),
        adapter=dataclasses.replace(CONFIG.adapter, dropout=0.2),
    )
    denoiser, seen = TinyDenoiser(), []
    options = {"steps": 5, "validation": TinySamples()}
    disturbed = train(
        denoiser, TinyDataset(), config, None, on_step=using_the_base(denoiser, seen), **options
    )
    assert_same(disturbed, train(TinyDenoiser(), TinyDataset(), config, None, **options))
    assert len(seen) == 5 and all(whole and torch.equal(output, seen[0][1]) for whole, output in seen)


@pytest.mark.parametrize("error", [Cancelled, RuntimeError])
def test_a_run_that_ends_inside_an_interlude_has_saved_its_step(tmp_path, error):
    def on_step(progress, handles):
        if progress.step == 2:
            with handles.give_base_back():
                raise error("stop")

    with pytest.raises(error, match="stop"):
        go(tmp_path, 4, on_step=on_step)
    seen = []
    assert_same(go(tmp_path, 4, on_step=counting(seen)).load(), go(tmp_path / "whole", 4).load())
    assert seen == [3, 4]


def test_a_run_says_which_states_it_has_when_it_begins_and_when_it_is_done(tmp_path):
    began = []
    go(tmp_path, 2, on_start=lambda states: began.append(sorted(states)))
    go(tmp_path, 3, on_start=lambda states: began.append(sorted(states)))
    go(tmp_path, 3, on_start=lambda states: began.append(sorted(states)))
    assert began == [[0], [0, 1, 2], [0, 2, 3]]
