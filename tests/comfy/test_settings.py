"""Every value that the widgets of a run offer, on ComfyUI's own SDXL, SD3.5 Medium and Flux.

The cases are the nodes' widgets, so a new setting and a new row of a table are tried without a line here: two
steps, finite, resumed equal to uninterrupted, with what its part of the config may change and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache, partial

import pytest
import torch
from comfy_api.latest import io

from graft.nodes.lora import BuildLora
from graft.nodes.lora_settings import LoraSettings
from graft.nodes.memory_settings import MemorySettings
from graft.nodes.objective_settings import ObjectiveSettings
from graft.nodes.optimizer_settings import OptimizerSettingsNode
from graft.nodes.validation_settings import ValidationSettings
from graft.nodes.widgets import read
from graft.tests.support.runs import assert_same
from graft.tests.support.tiny_models import TINY
from graft.tests.support.two_steps import CONFIG, Samples
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import TrainConfig, settings
from graft.training.family import family_named
from graft.training.ineffective_settings import INEFFECTIVE, OtherThan
from graft.training.loop import initial_state, train
from graft.training.model import Captions
from graft.training.optimizer.rows import OPTIMIZERS

MODELS = ("sdxl", "sd35m", "flux")
NODES = (
    BuildLora,
    LoraSettings,
    OptimizerSettingsNode,
    ObjectiveSettings,
    MemorySettings,
    ValidationSettings,
)
WIDGETS = {
    entry.id: entry
    for node in NODES
    for entry in node.define_schema().inputs
    if isinstance(entry, io.WidgetInput)
}
PARTS = {
    each.input: part.name
    for part in dataclasses.fields(TrainConfig)
    if dataclasses.is_dataclass(part.default_factory)
    for each in settings(part.default_factory)
}
"""Widget -> its part of the config."""

OTHER = {
    "include": "*0*", "exclude": "*0*", "blocks": "0", "algorithms": "*0* = loha", "ranks": "*0* = 2",
    "alphas": "*0* = 1", "learning_rates": "*0* = 0.5", "package_class": "pytorch_optimizer.Adan",
    "arguments": '{"weight_decay": 0.3}', "max_grad_norm": 1e-3, "min_snr_gamma": 0.01, "every": 1,
    "d_coef": 100.0,
}  # fmt: skip
"""Widgets whose values a range does not tell -> one that is not the default."""
ELSEWHERE = {
    "text_encoder": "test_text_encoders.py",
    "start_from": "test_initial_lora.py",
    "start_size": "test_initial_lora.py",
    "preset": "../adapters/test_preset.py",
    "compile": "test_training.py, ../memory/test_compiling.py",
    "sharded": "test_sharded.py",
    "stream": "test_stream.py",
}
"""Widgets and choices that need more than a model and two steps -> the tests of them."""
ON = {
    "guidance": "flux", "tucker": "sdxl", "fp16": "flux", "min_snr_gamma": "sdxl", "velocity": "sdxl",
    "cut": "flux",
}  # fmt: skip
"""Settings and choices that do not act on every model -> one on which they do."""
BASE = {"rank": 6, "targets": "all", "learning_rate": 1e-2, "total_steps": 8, "every": 0}
LATE = ("schedule-free-radam", "d_coef")
"""They act from the sixth step."""
ROUNDING = ("bf16", "fp16", "fp8", "int8", "nf4")


def values(entry):
    """What a widget is set to besides its default."""
    if entry.id in OTHER:
        return [OTHER[entry.id]]
    if isinstance(entry, io.Combo.Input):
        return [option for option in entry.options if option != entry.default and option not in ELSEWHERE]
    if isinstance(entry, io.Boolean.Input):
        return [not entry.default]
    kind, default = type(entry.default), entry.default
    near = (kind(found) for found in (2 * default, default / 2, 0.3, 2))
    return [next(n for n in near if entry.min <= n <= entry.max and n > 0 and n != default)]


def beside(name):
    """The settings without which `name` has no effect, by the table of such."""
    found = {"package_class": OTHER["package_class"]} if name == "arguments" else {}
    found |= {"every": 1} if PARTS.get(name) == "validation" else {}
    for row in INEFFECTIVE:
        if name in row.settings and all(WIDGETS[other].default in row.beside[other] for other in row.beside):
            other, has_none = next(iter(row.beside.items()))
            needed = tuple(has_none) if isinstance(has_none, OtherThan) else values(WIDGETS[other])
            found[other] = needed[0]
    return found


CASES = [(name, value) for name, entry in WIDGETS.items() if name not in ELSEWHERE for value in values(entry)]


class PreservedSamples(Samples):
    """The two images, with captions to preserve."""

    def preserved_captions(self, size, *, seed, index):
        return Captions([self.tiny.conditioning(7)] * size)


class HeldOut:
    """Two other images."""

    fingerprint = "held out"

    def __init__(self, tiny):
        self.tiny = tiny

    def __len__(self):
        return 2

    def sample(self, index):
        return self.tiny.batch((5 + index,))


@cache
def trained(model, *changes, steps):
    """What a run is made of, its start, its state after the first step and its last one."""
    given = {name: entry.default for name, entry in WIDGETS.items()} | BASE | dict(changes)
    if OPTIMIZERS[given["optimizer"]].finds_lr:
        given["learning_rate"] = 1.0
    if given["algorithm"] == "boft":
        given["rank"] = 18  # its smallest blocks here
    config, denoiser, tiny = read(CONFIG, given), ComfyDenoiser(TINY[model]()), TINY[model]
    run = partial(train, denoiser, PreservedSamples(tiny), config)
    if config.validation.every:
        run = partial(run, validation=HeldOut(tiny))
    start, states = initial_state(denoiser, config), []
    last = run(start, steps=steps, on_step=lambda progress, handles: states.append(handles.state()))
    return run, start, states[0], last


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def models(index, name, value):
    """The models to try a value on: all for a method, else one in turn."""
    if name == "algorithm":
        return MODELS
    if on := ON.get(value, ON.get(name)):
        return [on]
    turn = MODELS if PARTS.get(name) in ("adapter", "objective") else MODELS[1:]
    return [turn[index % len(turn)]]


@pytest.mark.feature(
    2, 3, 22, 23, 24, 27, 28, 30, 31, 32, 38, 39, 40, 71, 72, 73, 75, 76, 79, 80, 81, 82, 83, 91, 111, 117,
    125, 128, 129, 130,
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "value", "model"),
    [(name, value, model) for i, (name, value) in enumerate(CASES) for model in models(i, name, value)],
    ids=str,
)
def test_a_setting_changes_its_part_of_a_training_and_nothing_else(name, value, model):
    steps = 7 if name in LATE or value in LATE else 2
    context = {**beside(name), name: WIDGETS[name].default}
    _, start, _, plain = trained(model, *context.items(), steps=steps)
    run, begun, first, state = trained(model, *(context | {name: value}).items(), steps=steps)
    assert_same(state, run(first, steps=steps - 1))
    numbers = [*state.losses, *(loss for _, loss in state.validations)]
    assert all(map(math.isfinite, numbers)) and all(t.isfinite().all() for t in state.result().values())

    part = PARTS.get(name, "")
    starts_alike, trains_alike, ends_alike = (
        same(one, other)
        for one, other in (
            (start.weights, begun.weights),
            (plain.weights, state.weights),
            (plain.result(), state.result()),
        )
    )
    assert starts_alike or part == "adapter"
    if part in ("adapter", "optimizer", "schedule"):  # a fresh adapter changes nothing yet
        assert state.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)
    if part in ("ema", "validation"):
        assert state.losses == plain.losses and trains_alike
    if part == "memory":
        assert state.losses == pytest.approx(plain.losses, rel=0.1)
    if part == "validation":
        assert state.validations
    else:
        is_own = value == getattr(family_named(state.family), name, None)  # what "auto" is here
        only_moves = part == "memory" and value not in ROUNDING
        assert ends_alike == (is_own or only_moves)
