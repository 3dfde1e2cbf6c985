"""Every schedule is its formula, at every step, whatever the length of one part of the run."""

from __future__ import annotations

import math

import pytest

from graft.training.config import ScheduleConfig
from graft.training.optimizer.schedule import SCHEDULES, multiplier, schedule_notes

FORMULAS = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "restarts": lambda t: (1 + math.cos(math.pi * ((3 * t) % 1))) / 2,
    "polynomial": lambda t: (1 - t) ** 2,
    "rex": lambda t: (1 - t) / (0.5 + (1 - t) / 2),
}


def config(name, **options):
    return ScheduleConfig(name=name, total_steps=100, cycles=3, power=2.0, **options)


@pytest.mark.feature(81)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_its_formula(name):
    for step in range(100):
        assert multiplier(config(name), step) == pytest.approx(FORMULAS[name](step / 100), abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_warm_up_rises_in_equal_parts_to_the_first_value_of_the_decay(name):
    warm = config(name, warmup_steps=4)
    assert [multiplier(warm, step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert multiplier(warm, 4) == 1.0
    assert multiplier(warm, 52) == pytest.approx(FORMULAS[name](0.5), abs=1e-12)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_a_schedule_ends_at_its_floor_and_stays_there(name):
    low = config(name, floor=0.1)
    assert [multiplier(low, step) for step in (100, 1000)] == [0.1, 0.1]
    assert multiplier(low, 50) == pytest.approx(0.1 + 0.9 * FORMULAS[name](0.5), abs=1e-12)


def test_restarts_begin_again_at_full_rate():
    course = ScheduleConfig(name="restarts", total_steps=90, cycles=3)
    assert [multiplier(course, step) for step in (0, 30, 60)] == [1.0, 1.0, 1.0]
    assert multiplier(course, 29) < 0.01


def test_a_run_of_one_step_has_a_schedule():
    assert multiplier(ScheduleConfig(name="cosine", total_steps=1), 0) == 1


def test_a_decay_without_a_length_and_an_unknown_name_are_refused():
    with pytest.raises(ValueError, match="needs total steps"):
        multiplier(ScheduleConfig(name="cosine"), 0)
    with pytest.raises(ValueError, match="choose one of constant"):
        multiplier(ScheduleConfig(name="cos"), 0)


@pytest.mark.parametrize("options", [{"floor": 1.5}, {"cycles": 0}, {"power": 0.0}, {"warmup_steps": -1}])
def test_impossible_settings_are_refused(options):
    with pytest.raises(ValueError, match="must"):
        ScheduleConfig(name="cosine", **options)


def test_a_warm_up_that_takes_the_whole_run_is_told():
    warm = ScheduleConfig(warmup_steps=200)
    assert "rises to the last step, where it reaches 50%" in schedule_notes(warm, 100)[0]
    assert schedule_notes(warm, 200) and schedule_notes(warm, 201) == schedule_notes(warm, 0) == []


def test_steps_beyond_the_schedule_are_told():
    assert "the steps from there to 150 are trained at 0%" in schedule_notes(config("cosine"), 150)[0]
    assert not schedule_notes(config("cosine"), 100) and not schedule_notes(config("constant"), 150)
