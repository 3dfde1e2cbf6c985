"""The validation loss is one number for one set of weights, whoever asks and whenever."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from graft.tests.support.runs import CONFIG, assert_same
from graft.training import loop, rng
from graft.training.config import CheckpointConfig, ObjectiveConfig, ValidationConfig
from graft.training.loop import initial_state, train
from graft.training.objective.loss import loss_at
from graft.training.run.checkpoints import Checkpoints
from graft.training.run.execute import execute, run_key
from graft.training.run.folder import Run
from graft.training.validation import (
    NOISE_SEED,
    TIMESTEPS,
    held_out_loss,
    validation_loss,
    validation_sigmas,
)

from .support.tiny import Flow, TinyDataset, TinyDenoiser, TinySamples


def test_validation_is_bit_deterministic():
    assert validation_loss(TinyDenoiser(), TinySamples()) == validation_loss(TinyDenoiser(), TinySamples())


def test_a_fresh_adapter_has_the_validation_loss_of_the_base():
    denoiser = TinyDenoiser()
    start = initial_state(denoiser, CONFIG)
    assert validation_loss(denoiser, TinySamples(), state=start) == validation_loss(denoiser, TinySamples())


def test_a_trained_adapter_has_another_validation_loss_than_the_base():
    denoiser = TinyDenoiser()
    trained = train(denoiser, TinyDataset(), CONFIG, None, steps=5)
    assert validation_loss(denoiser, TinySamples(), state=trained) != validation_loss(denoiser, TinySamples())


def test_validation_is_the_mean_over_samples_and_validation_sigmas():
    denoiser, samples, losses = TinyDenoiser(), TinySamples(2), []
    for index in range(2):
        batch = dataclasses.replace(samples.sample(index), weights=None)
        noise = torch.randn(1, 4, 8, 8, generator=rng.generator(NOISE_SEED, "validation", index))
        for level in TIMESTEPS:
            sigma = torch.tensor([level])
            losses.append(loss_at(denoiser, batch, batch.latents, sigma, noise).item())
    assert validation_loss(denoiser, samples) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_flow_models_are_measured_at_nine_levels_from_a_tenth_on():
    assert validation_sigmas(Flow()).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])


def test_validation_inside_a_run_measures_the_base_that_is_held():
    denoiser = TinyDenoiser()
    alone = validation_loss(denoiser, TinySamples())
    with denoiser.hold(torch.float32):
        assert held_out_loss(denoiser, TinySamples()) == alone


def test_where_the_base_does_not_fit_it_is_measured_offloaded(monkeypatch):
    denoiser, held = TinyDenoiser(), []
    hold = denoiser.hold

    def small(dtype, store="resident", *how):
        held.append(store)
        if store == "resident":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return hold(dtype, store)

    denoiser.hold = small
    assert validation_loss(denoiser, TinySamples()) == validation_loss(TinyDenoiser(), TinySamples())
    assert held == ["resident", "offload"]


def test_a_limit_measures_evenly_spread_samples():
    seen = []
    samples = TinySamples(10)
    samples.sample = lambda index: seen.append(index) or TinySamples.sample(samples, index)
    validation_loss(TinyDenoiser(), samples, limit=3)
    assert seen == [0, 3, 6]


def test_models_that_are_not_flow_are_measured_at_fractions_of_their_schedule():
    class Eps(Flow):
        sigma_max = torch.tensor(14.6)

        def noise_scaling(self, sigma, noise, latent_image):
            return latent_image + sigma * noise

        def percent_to_sigma(self, percent):
            return 14.6 * (1 - percent) ** 2

    assert validation_sigmas(Eps()).tolist() == pytest.approx(
        [14.6 * level**2 for level in TIMESTEPS], rel=1e-5
    )


def validated(steps, state=None, *, config=None, **options):
    config = config or ValidationConfig(every=2)
    config = dataclasses.replace(CONFIG, validation=config)
    return train(
        TinyDenoiser(), TinyDataset(), config, state, steps=steps, validation=TinySamples(), **options
    )


def test_a_run_is_measured_at_the_guidance_it_is_trained_with():
    denoiser, seen = TinyDenoiser(), []
    denoiser.family = dataclasses.replace(denoiser.family, guidance=1.0)
    denoise = denoiser.denoise
    denoiser.denoise = lambda x, sigma, batch: (
        seen.append(batch.extras[0]["guidance"]) or denoise(x, sigma, batch)
    )
    measured = dataclasses.replace(CONFIG, validation=ValidationConfig(every=1))
    at_three = dataclasses.replace(measured, objective=ObjectiveConfig(guidance=3.5))
    state = train(denoiser, TinyDataset(), at_three, None, steps=1, validation=TinySamples())
    assert set(seen) == {3.5}
    other = train(denoiser, TinyDataset(), measured, state, steps=1, validation=TinySamples())
    assert [step for step, _ in other.validations] == [1, 2]  # both at 1.0, as 3.5 cannot be compared
    assert seen.count(1.0) == 2 * seen.count(3.5) - 1


def test_a_run_is_measured_every_so_many_steps_and_trains_the_same():
    state = validated(5)
    assert [step for step, _ in state.validations] == [2, 4]
    unmeasured = train(TinyDenoiser(), TinyDataset(), CONFIG, None, steps=5)
    assert_same(dataclasses.replace(state, validations=()), unmeasured)


def test_a_measured_run_in_two_parts_equals_one():
    assert_same(validated(2, validated(4)), validated(6))


def test_what_a_run_measures_is_the_loss_of_its_state():
    state = validated(4)
    assert state.validations[-1] == (4, validation_loss(TinyDenoiser(), TinySamples(), state=state))


def test_a_measurement_that_was_interrupted_is_made_up_for(tmp_path):
    calls = []

    def sample(self, index):
        calls.append(index)
        if len(calls) == 5:  # in the second measurement
            raise KeyboardInterrupt
        return TinySamples.sample(self, index)

    class Interrupting(TinySamples):
        pass

    Interrupting.sample = sample
    config = dataclasses.replace(CONFIG, validation=ValidationConfig(every=2))
    go = partial(execute, Run(tmp_path), TinyDenoiser(), TinyDataset(), config, None, steps=6)
    with pytest.raises(KeyboardInterrupt):
        go(validation=Interrupting())
    assert_same(go(validation=TinySamples()).load(), validated(6))


SCRIPT = [5.0, 4.0, 3.0, 3.5, 3.2, 3.1, 2.0]


@pytest.fixture
def scripted(monkeypatch):
    """Validation losses as in SCRIPT, one a step."""
    seen = []
    monkeypatch.setattr(loop, "held_out_loss", lambda *args, **options: SCRIPT[len(seen)])
    return seen


def test_a_run_ends_when_validation_has_not_improved_for_long_enough(scripted):
    patience = ValidationConfig(every=1, patience=2)
    state = validated(9, config=patience, on_step=lambda p, handles: scripted.append(p.best))
    assert state.step == 5 and scripted == [True, True, True, False, False]
    assert validated(9, state, config=patience) is state


def test_a_run_that_ended_early_costs_no_step_and_hands_on_its_best(scripted, tmp_path):
    patience = ValidationConfig(every=1, patience=3, result="best")
    config = dataclasses.replace(CONFIG, validation=patience)
    run = Run(tmp_path, CheckpointConfig(keep=1))
    go = partial(execute, run, TinyDenoiser(), TinyDataset(), config, None, steps=9, validation=TinySamples())
    handle = go(on_step=lambda p, handles: scripted.append(p.step))
    assert handle.step == 3 and scripted[-1] == 6
    assert go(on_step=lambda p, handles: scripted.append(p)) == handle and scripted[-1] == 6
    assert Checkpoints(run).find_result(None, 9, config) == handle


def test_a_run_that_only_got_worse_than_its_start_hands_the_start_on(scripted, tmp_path):
    best = dataclasses.replace(CONFIG, validation=ValidationConfig(every=1, result="best"))
    go = partial(
        execute, denoiser=TinyDenoiser(), dataset=TinyDataset(), config=best, validation=TinySamples()
    )
    first = go(Run(tmp_path / "a"), start=None, steps=4, on_step=lambda p, handles: scripted.append(p.step))
    assert first.step == 3
    second = go(Run(tmp_path / "b"), start=first, steps=2, on_step=lambda p, handles: scripted.append(p.step))
    assert second == first and scripted[-1] == 5
    longer = go(Run(tmp_path / "b"), start=first, steps=3, on_step=lambda p, handles: scripted.append(p.step))
    assert longer.step == 6


def test_losses_on_other_images_do_not_count():
    other = TinySamples(2)
    other.fingerprint = "other"
    config = dataclasses.replace(CONFIG, validation=ValidationConfig(every=1))
    state = validated(2)
    go = partial(train, TinyDenoiser(), TinyDataset(), config, state, steps=1)
    same, others = go(validation=TinySamples()).validations, go(validation=other).validations
    assert [step for step, _ in same] == [step for step, _ in others] == [2, 3]
    assert same[0] == state.validations[0] != others[0]


def test_another_choice_of_the_result_is_the_same_run():
    keys = {
        run_key(TinyDenoiser(), TinyDataset(), dataclasses.replace(CONFIG, validation=v), None, TinySamples())
        for v in (ValidationConfig(every=1), ValidationConfig(every=1, result="best"))
    }
    assert len(keys) == 1


def test_validation_needs_images_and_patience_needs_validation():
    config = dataclasses.replace(CONFIG, validation=ValidationConfig(every=1))
    with pytest.raises(ValueError, match="connect a validation dataset"):
        train(TinyDenoiser(), TinyDataset(), config, None, steps=1)
    with pytest.raises(ValueError, match="patience needs validation"):
        ValidationConfig(patience=3)


def test_an_empty_held_out_set_is_refused():
    with pytest.raises(ValueError, match="at least one image"):
        validation_loss(TinyDenoiser(), TinySamples(0))
