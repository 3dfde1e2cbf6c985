"""The moving average follows its formula, is part of the state, and is what a run is measured by."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graft.tests.support.adapter_cases import adapter_config
from graft.tests.support.runs import CONFIG, assert_same
from graft.tests.support.runs import run as train
from graft.training.config import EmaConfig, ValidationConfig
from graft.training.loop import train as train_with
from graft.training.optimizer.ema import decay_at
from graft.training.run.saved_state import load_state, save_state
from graft.training.validation import validation_loss

from ..support.tiny import TinyDataset, TinyDenoiser, TinySamples

AVERAGED = dataclasses.replace(CONFIG, ema=EmaConfig(decay=0.9))


@pytest.mark.feature(91)
def test_the_average_is_its_formula():
    states = []
    train_with(
        TinyDenoiser(),
        TinyDataset(),
        AVERAGED,
        None,
        steps=4,
        on_step=lambda p, handles: states.append(handles.state()),
    )
    name = next(iter(states[0].weights))
    start = train(steps=1).weights  # its first step has nothing to remember: decay 0
    average = start[name].clone()
    for step in (1, 2, 3):
        keep = min(0.9, 1 - (1 + step) ** -0.75)
        average = keep * average + (1 - keep) * states[step].weights[name]
    assert torch.allclose(states[3].ema[name], average, atol=1e-7)


def test_the_share_that_is_kept_rises_to_its_limit():
    shares = [decay_at(EmaConfig(decay=0.99), step) for step in (0, 1, 10, 1000)]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 0.99


def test_the_average_does_not_change_the_training():
    averaged = train(steps=5, config=AVERAGED)
    assert_same(dataclasses.replace(averaged, ema={}), train(steps=5))


def test_the_average_resumes_exactly(tmp_path):
    save_state(train(steps=3, config=AVERAGED), tmp_path)
    resumed, whole = train(load_state(tmp_path), steps=3, config=AVERAGED), train(steps=6, config=AVERAGED)
    assert all(torch.equal(resumed.ema[name], whole.ema[name]) for name in whole.ema)


def test_what_is_not_trained_is_no_part_of_the_average_and_of_what_is_saved(tmp_path):
    config = dataclasses.replace(AVERAGED, adapter=adapter_config("pissa"))
    state = train(steps=2, config=config)
    assert state.ema and state.ema.keys() == {name for name in state.weights if name[-1] != "0"}
    save_state(state, tmp_path)
    assert load_state(tmp_path).result().keys() == state.weights.keys()


def test_either_set_of_weights_can_be_saved():
    state = train(steps=4, config=AVERAGED)
    assert state.result() == state.ema and state.result(average=False) is state.weights
    assert state.ema.keys() == state.weights.keys()
    plain = train(steps=1)
    assert plain.result() == plain.weights


def test_a_run_is_measured_by_the_weights_that_are_saved():
    config = dataclasses.replace(AVERAGED, validation=ValidationConfig(every=4))
    state = train_with(TinyDenoiser(), TinyDataset(), config, None, steps=4, validation=TinySamples())
    saved = dataclasses.replace(state, weights=state.ema)
    assert state.validations == ((4, validation_loss(TinyDenoiser(), TinySamples(), state=saved)),)


def test_a_measurement_with_the_average_leaves_the_trained_weights_in_place():
    measured = dataclasses.replace(AVERAGED, validation=ValidationConfig(every=1))
    state = train_with(TinyDenoiser(), TinyDataset(), measured, None, steps=4, validation=TinySamples())
    assert_same(dataclasses.replace(state, validations=()), train(steps=4, config=AVERAGED))


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="below 1"):
        EmaConfig(decay=1.0)
