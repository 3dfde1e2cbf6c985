"""What the table says of settings without effect is what training does with them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache

import pytest

from graft.tests.support.runs import CONFIG, run
from graft.training.adapters.build import ADAPTERS
from graft.training.config import (
    AdapterConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from graft.training.ineffective_settings import INEFFECTIVE, ineffective_notes, run_settings
from graft.training.objective.sigmas import RESOLUTION_SHIFTS, SIGMAS
from graft.training.objective.weighting import LOSSES, WEIGHTINGS
from graft.training.optimizer.rows import OPTIMIZERS
from graft.training.optimizer.schedule import SCHEDULES

from .support.tiny import FAMILY

PARTS = ("adapter", "optimizer", "schedule", "objective", "ema")
CHOICES = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "sigmas": ("auto", *SIGMAS),
    "resolution_shift": ("auto", *RESOLUTION_SHIFTS),
    "loss": LOSSES,
    "weighting": WEIGHTINGS,
    "algorithm": ADAPTERS,
    "full_matrix": (False, True),
    "ema_decay": (0.0, 0.9),
    "min_noise": (0.0, 0.3),
    "max_noise": (1.0, 0.7),
    "preservation": (0.0, 1.0),
}
"""Every setting that decides about others -> all of its values."""
OTHER = {
    "floor": 0.5, "cycles": 2, "power": 3.0, "d_coef": 3.0, "beta1": 0.5, "beta2": 0.7, "eps": 0.1,
    "ema_power": 0.3, "shift": 4.0, "mean": 1.0, "std": 0.4, "mode_scale": 0.5, "huber_delta": 0.7,
    "min_snr_gamma": 0.5, "factor": 2, "decompose_both": True, "full_matrix": True, "rank": 2, "alpha": 7.0,
    "rslora": True, "rank_dropout": 0.5, "noise_range": "cut", "preservation_share": 0.5,
}  # fmt: skip
"""Every setting of the table -> a value that is not its default."""
BASE = {"rank": 1, "alpha": 0.0, "targets": "linear", "total_steps": 4}


def config(**widgets):
    """The config that nodes with these widgets give."""
    betas = (widgets.pop("beta1", 0.9), widgets.pop("beta2", 0.99))
    names = {"optimizer": ("optimizer", "name"), "schedule": ("schedule", "name")}
    names |= {"ema_decay": ("ema", "decay"), "ema_power": ("ema", "power")}
    lr = 1.0 if widgets.get("optimizer", "").startswith("prodigy") else 1e-2
    if widgets.get("algorithm") in ("oft", "boft"):  # they turn no blocks of one output
        widgets["rank"] = 6 * widgets.get("rank", 1)
    found = replace(CONFIG, optimizer=OptimizerConfig(lr=lr, betas=betas), schedule=ScheduleConfig())
    for name, value in (BASE | widgets).items():
        kinds = (part for part in PARTS if name in (f.name for f in dataclasses.fields(getattr(found, part))))
        part, field = names.get(name) or (next(kinds), name)
        found = replace(found, **{part: replace(getattr(found, part), **{field: value})})
    return found


@cache
def result(**widgets):
    """The losses of a run, and a sum over each weight that it hands on."""
    steps = 9 if "optimizer" in widgets else 4  # schedule-free-radam first moves in its sixth
    state = run(steps=steps, config=config(**widgets))
    return [*state.losses, *(float(t.double().sum()) for t in state.result(average=True).values())]


def cases():
    """Every setting of the table, with every value of each setting that decides about it."""
    found = []
    for name in OTHER:
        deciding = sorted({choice for row in INEFFECTIVE if name in row.settings for choice in row.beside})
        combinations = [{}]
        for choice in deciding:
            combinations = [{**known, choice: value} for known in combinations for value in CHOICES[choice]]
        found += [(name, beside) for beside in combinations]
    return found


def test_every_setting_of_the_table_is_tried():
    assert OTHER.keys() == {name for row in INEFFECTIVE for name in row.settings}
    assert CHOICES.keys() == {name for row in INEFFECTIVE for name in row.beside}


@pytest.mark.parametrize(("name", "beside"), cases(), ids=str)
def test_a_setting_is_said_to_have_no_effect_exactly_where_training_does_not_change(name, beside):
    plain, other = config(**beside), config(**beside, **{name: OTHER[name]})
    notes = [
        note for note in ineffective_notes(run_settings(other, FAMILY), run_settings(plain)) if name in note
    ]
    same = result(**beside) == result(**beside, **{name: OTHER[name]})
    assert bool(notes) == same


def test_the_sentence_says_what_is_needed():
    found = TrainConfig(
        adapter=AdapterConfig(rank=8, algorithms=(("*mlp*", "lora"),), factor=4),
        optimizer=OptimizerConfig(name="lion", eps=1e-6),
        schedule=ScheduleConfig(name="cosine", cycles=3),
        objective=ObjectiveConfig(std=2.0),
    )
    assert ineffective_notes(run_settings(found, FAMILY), run_settings(TrainConfig())) == [
        "cycles 3 has no effect with schedule cosine; it is for restarts.",
        "eps 1e-06 has no effect with optimizer lion.",
        "factor 4 has no effect with algorithm lora; it is for lokr.",
    ]


def test_a_method_that_some_layers_have_counts():
    mixed = AdapterConfig(algorithm="lokr", full_matrix=True, rank=8, algorithms=(("*mlp*", "lora"),))
    assert not ineffective_notes(run_settings(TrainConfig(adapter=mixed)), run_settings(TrainConfig()))
    whole = replace(mixed, algorithms=())
    [note] = ineffective_notes(run_settings(TrainConfig(adapter=whole)), run_settings(TrainConfig()))
    assert note == "rank 8 has no effect with algorithm lokr and full_matrix True."
