"""Compiled blocks train as the others do, and where compiling fails the run goes on without."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from graft.tests.support.adapter_cases import adapter_config, train_config
from graft.tests.support.tiny import TinyDataset, TinyDenoiser, TinySamples
from graft.training.config import MemoryConfig, TrainConfig, ValidationConfig
from graft.training.loop import train
from graft.training.memory import compiling
from graft.training.memory.activation_checkpointing import MODES
from graft.training.run.execute import run_key


@pytest.fixture(autouse=True)
def tracing_only(monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()


def trained(method="lora", *, denoiser=None, memory=None, every=0, **adapter):
    config = train_config(
        adapter_config(method, targets="all", **adapter),
        memory=MemoryConfig(**memory or {}),
        validation=ValidationConfig(every=every),
    )
    tiny = denoiser or TinyDenoiser()
    state = train(tiny, TinyDataset(), config, None, steps=3, validation=TinySamples())
    return {**state.weights, "losses": torch.tensor(state.losses)}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "mode"),
    [*(("lora", mode) for mode in MODES), ("dora", "none"), ("loha", "none"), ("lokr", "none")],
)
def test_compiled_blocks_train_the_same(method, mode):
    denoiser = TinyDenoiser()
    found = trained(method, denoiser=denoiser, memory={"compile": True, "checkpointing": mode})
    assert counters["stats"]["unique_graphs"] >= len(denoiser.module.blocks)
    assert_close(found, trained(method))
    assert all("forward" not in vars(module) for module in denoiser.module.modules())


@pytest.mark.parametrize("base", ["resident", "offload"])
def test_blocks_are_compiled_once_however_often_the_base_is_given_back(base):
    def compiled_after(times):
        torch._dynamo.reset()
        counters.clear()

        def on_step(progress, handles):
            for _ in range(times):
                with handles.give_base_back():
                    pass

        memory = MemoryConfig(compile=True, base=base)
        config = train_config(adapter_config("lora", targets="all"), memory=memory)
        train(TinyDenoiser(), TinyDataset(), config, None, steps=3, on_step=on_step)
        return counters["stats"]["unique_graphs"]

    assert compiled_after(2) == compiled_after(0) > 0


def test_dropout_draws_the_same_in_compiled_blocks():
    dropped = {"dropout": 0.3, "rank_dropout": 0.3, "module_dropout": 0.3}
    expected = trained(**dropped)
    assert_close(trained(memory={"compile": True}, **dropped), expected)
    assert not torch.equal(expected["losses"], trained()["losses"])


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_the_default_compiler_trains_the_same(monkeypatch):
    monkeypatch.undo()
    assert_close(trained(memory={"compile": True}), trained())


def failing(graph, inputs):
    raise RuntimeError("no compiler here")


@pytest.mark.feature(133)
@pytest.mark.parametrize("every", [0, 1])
def test_where_compiling_fails_the_run_goes_on_without(every, monkeypatch, caplog):
    monkeypatch.setattr(compiling, "BACKEND", failing)
    found = trained(memory={"compile": True}, every=every)
    assert caplog.text.count("torch.compile failed; training goes on without it") == 1
    assert "no compiler here" in caplog.text
    assert all(torch.equal(found[name], tensor) for name, tensor in trained().items())


def test_a_system_that_cannot_compile_at_all_trains_without(monkeypatch, caplog):
    def unsupported(*args, **kwargs):
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    monkeypatch.setattr(torch, "compile", unsupported)
    found = trained(memory={"compile": True})
    assert "goes on without it" in caplog.text
    assert all(torch.equal(found[name], tensor) for name, tensor in trained().items())


def test_other_errors_of_a_compiled_run_pass():
    class Broken(TinyDenoiser):
        def denoise(self, *args):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        trained(denoiser=Broken(), memory={"compile": True})


def test_a_compiled_run_is_another_run():
    def key(**memory):
        return run_key(TinyDenoiser(), TinyDataset(), TrainConfig(memory=MemoryConfig(**memory)), None)

    assert key(compile=True) != key()
