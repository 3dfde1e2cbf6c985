"""An optimizer of any package by its class: tried before it is trusted, and resumed bit for bit."""

from __future__ import annotations

import pytest
import torch

from graft.tests.support.runs import assert_same
from graft.tests.support.runs import run as train
from graft.training.config import AdapterConfig, OptimizerConfig, TrainConfig
from graft.training.optimizer.build import build_optimizer, optimizer_notes, row_of
from graft.training.run.saved_state import load_state, save_state

HERE = f"{__name__}."


def settings(package_class, arguments="", **changes):
    return OptimizerConfig(package_class=package_class, arguments=arguments, lr=3e-3, **changes)


class Remembering(torch.optim.SGD):
    """Keeps what no state has: how many steps it took."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - 0.01 * self.count)
        super().step(closure)


class Warming(torch.optim.SGD):
    """Counts its steps in its groups, as many do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"] / group["count"])


class Noting(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["note"] = "text"


class Closing(torch.optim.SGD):
    def step(self, closure):
        closure()


class TwoWeights(torch.optim.SGD):
    def eval(self):
        """As schedule-free optimizers."""


@pytest.mark.parametrize(
    ("name", "arguments", "bytes_each"),
    [
        ("torch.optim.NAdam", '{"betas": [0.8, 0.9], "momentum_decay": 0.01}', 8),
        ("torch.optim.SGD", '{"momentum": 0.9}', 4),
        (HERE + "Warming", "", 0),
        ("pytorch_optimizer.Adan", '{"weight_decay": 0.1}', None),
        ("bitsandbytes.optim.AdEMAMix8bit", "", None),
    ],
)
def test_a_run_with_it_resumes_from_disk_bit_for_bit(name, arguments, bytes_each, tmp_path):
    pytest.importorskip(name.split(".")[0])
    optimizer = settings(name, arguments)
    config = TrainConfig(
        batch_size=2, seed=3, adapter=AdapterConfig(rank=4, targets="all"), optimizer=optimizer
    )
    save_state(train(steps=3, config=config), tmp_path)
    whole = train(steps=6, config=config)
    assert_same(train(load_state(tmp_path), steps=3, config=config), whole)
    assert whole.optimizer.name == name
    if bytes_each is not None:
        assert row_of(optimizer).state_bytes == pytest.approx(bytes_each, abs=0.1)


def test_a_rate_for_each_layer_reaches_it():
    weights = {name: torch.nn.Parameter(torch.zeros(2)) for name in "ab"}
    optimizer = build_optimizer(weights, settings("torch.optim.SGD"), {"b": 10.0})
    for weight in weights.values():
        weight.grad = torch.ones(2)
    optimizer.step()
    assert float(weights["b"][0]) == pytest.approx(10 * float(weights["a"][0]))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (HERE + "Remembering", "", "cannot be resumed: in a trial, steps from its saved state differ"),
        (HERE + "Noting", "", "its note is str, and a checkpoint holds tensors and numbers only"),
        ("pytorch_optimizer.SOAP", "", "its GG is list, and a checkpoint holds tensors and numbers only"),
        (HERE + "Closing", "", r"fails in a trial step \(TypeError"),
        (HERE + "TwoWeights", "", "is schedule-free: it samples with other weights than it trains"),
        ("torch.optim.NoSuch", "", "torch.optim has no optimizer NoSuch"),
        ("torch.nn.Linear", "", "torch.nn has no optimizer Linear"),
        ("no_such_package.Best", "", "needs the package no_such_package.*pip install no_such_package"),
        ("SGD", "", "'SGD' is no package.Class, such as torch.optim.NAdam"),
        ("os; import sys.x", "", "is no package.Class"),
        ("torch.optim.SGD", "momentum=0.9", "arguments: not JSON"),
        ("torch.optim.SGD", "[0.9]", "arguments: expected a JSON object"),
        ("torch.optim.SGD", '{"lr": 1}', "the learning rate is set in Train Steps"),
        ("torch.optim.SGD", '{"speed": 1}', "SGD does not take these arguments: .*speed"),
    ],
)
def test_what_cannot_be_trained_with_or_resumed_is_refused_before_step_1(name, arguments, message):
    if name.startswith("pytorch_optimizer"):
        pytest.importorskip("pytorch_optimizer")
    with pytest.raises(ValueError, match=f"(?s){message}"):
        row_of(settings(name, arguments))


def test_settings_that_it_does_not_get_are_named():
    [note] = optimizer_notes(settings("torch.optim.SGD", weight_decay=0.5))
    assert note == "weight_decay has no effect with torch.optim.SGD; set it in arguments."
    [note] = optimizer_notes(OptimizerConfig(arguments="{}"))
    assert note == "arguments have no effect with adamw; they are for package_class."
