"""Every row of OPTIMIZERS learns, and continues from a file as if it had never stopped."""

from __future__ import annotations

import builtins
import dataclasses
import gc
from collections import defaultdict

import pytest
import torch
from torch import nn

from graft.tests.support.adapter_cases import adapter_config
from graft.tests.support.runs import assert_same
from graft.tests.support.runs import run as train
from graft.training.config import AdapterConfig, EmaConfig, MemoryConfig, OptimizerConfig, TrainConfig
from graft.training.live_state import LiveState
from graft.training.loop import initial_state
from graft.training.memory.precision import DTYPES
from graft.training.optimizer import bitsandbytes_fixes as bits
from graft.training.optimizer.build import (
    build_optimizer,
    final_weights,
    load_optimizer,
    optimizer_notes,
    save_optimizer,
    set_lr,
)
from graft.training.optimizer.gradient_check import steps_needed
from graft.training.optimizer.rows import OPTIMIZERS
from graft.training.run.saved_state import load_state, save_state

from ..support.tiny import TinyDenoiser

PACKAGES = {
    "adamw8bit": "bitsandbytes",
    "paged-adamw8bit": "bitsandbytes",
    "lion8bit": "bitsandbytes",
    "prodigy": "prodigyopt",
    "schedule-free-adamw": "schedulefree",
    "schedule-free-radam": "schedulefree",
    "muon": "pytorch_optimizer",
    "came": "pytorch_optimizer",
    "ademamix": "pytorch_optimizer",
    "prodigy-plus-schedule-free": "prodigyplus",
}
INSTALLED_AS = {"pytorch_optimizer": "pytorch-optimizer", "prodigyplus": "prodigy-plus-schedule-free"}
RATES = {"prodigy": 1.0, "prodigy-plus-schedule-free": 1.0, "sgd": 0.1, "lion": 3e-4, "lion8bit": 3e-4}
SHAPES = {"a.down": (16, 300), "a.up": (300, 16), "b.scale": (7,)}

every_row = pytest.mark.parametrize("name", OPTIMIZERS)


def settings(name, **options):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    return OptimizerConfig(name=name, lr=RATES.get(name, 3e-3), **options)


def parameters(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for name, shape in shapes.items()
    }


def step(weights, optimizer, count, lr, first=0):
    """Move towards the weights that are all 1."""
    for index in range(first, first + count):
        noise = torch.Generator().manual_seed(index)
        for p in weights.values():
            p.grad = (p.detach() - 1) + 0.1 * torch.randn(p.shape, generator=noise)
        set_lr(optimizer, lr)
        optimizer.step()


@every_row
def test_training_resumed_from_disk_equals_uninterrupted_training(name, tmp_path):
    config = TrainConfig(
        batch_size=2,
        gradient_accumulation=2,
        seed=3,
        adapter=AdapterConfig(rank=4, targets="all"),
        optimizer=settings(name),
    )
    save_state(train(steps=3, config=config), tmp_path)
    assert_same(train(load_state(tmp_path), steps=3, config=config), train(steps=6, config=config))


@every_row
def test_memory_saved_and_loaded_continues_bit_for_bit_also_for_tensors_in_eight_bit(name):
    config = settings(name)
    whole, half = parameters(), parameters()
    optimizer = build_optimizer(whole, config)
    step(whole, optimizer, 6, config.lr)
    first = build_optimizer(half, config)
    step(half, first, 3, config.lr)
    resumed = {key: nn.Parameter(p.detach().clone()) for key, p in half.items()}
    second = build_optimizer(resumed, config)
    load_optimizer(second, config, save_optimizer(first, config))
    step(resumed, second, 3, config.lr, first=3)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.feature(80)
@every_row
def test_every_optimizer_learns(name):
    config = settings(name, weight_decay=0.0)
    weights = parameters()
    optimizer = build_optimizer(weights, config)
    before = distance(final_weights(optimizer, config))
    step(weights, optimizer, 60, config.lr)
    assert distance(final_weights(optimizer, config)) < 0.999 * before


def distance(weights):
    return sum(float((p - 1).square().sum()) for p in weights.values())


@every_row
def test_settings_are_never_overridden_by_a_memory(name):
    old, new = settings(name, weight_decay=0.1), settings(name, weight_decay=0.2, betas=(0.8, 0.9))
    new = dataclasses.replace(new, lr=old.lr * 2)
    weights = parameters()
    first = build_optimizer(weights, old)
    step(weights, first, 2, old.lr)
    second = build_optimizer(parameters(), new)
    before = [
        {key: group[key] for key in group if key in old_settings(group)} for group in second.param_groups
    ]
    load_optimizer(second, new, save_optimizer(first, old))
    assert before == [
        {key: group[key] for key in group if key in old_settings(group)} for group in second.param_groups
    ]


def old_settings(group):
    return {"lr", "betas", "weight_decay", "eps", "lr_scale", "momentum", "d_coef"} & set(group)


@every_row
def test_a_saved_memory_is_changed_neither_by_who_saved_nor_by_who_loaded_it(name):
    config, weights = settings(name), parameters()
    first, second = (build_optimizer(weights, config) for _ in range(2))
    step(weights, first, 2, config.lr)
    saved = save_optimizer(first, config)
    before = {key: tensor.clone() for key, tensor in saved.tensors.items()}
    load_optimizer(second, config, saved)
    for optimizer in (first, second):
        step(weights, optimizer, 1, config.lr, first=2)
    assert all(torch.equal(saved.tensors[key], tensor) for key, tensor in before.items())


@every_row
def test_the_memory_of_an_optimizer_is_what_plans_count(name):
    weights = parameters({"w": (1024, 512)})
    optimizer = build_optimizer(weights, settings(name))
    step(weights, optimizer, 1, 1e-3)
    found = sum(t.nbytes for t in optimizer.state[weights["w"]].values() if isinstance(t, torch.Tensor))
    assert found / (1024 * 512) == pytest.approx(OPTIMIZERS[name].state_bytes, rel=0.05, abs=0.5)


@every_row
def test_a_parameter_without_a_gradient_stays_where_it_is(name):
    """Module dropout leaves an adapter out of a whole step."""
    config, weights = settings(name, weight_decay=0.1), parameters()
    optimizer = build_optimizer(weights, config)
    before = weights["a.up"].detach().clone()
    weights["a.down"].grad = torch.ones_like(weights["a.down"])
    optimizer.step()
    assert torch.equal(weights["a.up"], before)


def test_parameters_whose_rates_differ_anew_share_what_was_known_of_all():
    config, weights = settings("schedule-free-adamw"), parameters()
    first = build_optimizer(weights, config)
    step(weights, first, 3, config.lr)
    second = build_optimizer(weights, config, {"a.up": 16.0})
    load_optimizer(second, config, save_optimizer(first, config))
    assert [(group["k"], group["lr_scale"]) for group in second.param_groups] == [(3, 1.0), (3, 16.0)]


def test_another_optimizers_memory_is_left_aside(caplog):
    weights = parameters()
    first = build_optimizer(weights, settings("adamw"))
    step(weights, first, 2, 1e-3)
    second = build_optimizer(weights, settings("lion"))
    load_optimizer(second, settings("lion"), save_optimizer(first, settings("adamw")))
    assert not second.state and "changed from adamw to lion" in caplog.text


@pytest.mark.feature(79)
def test_eight_bit_memory_is_a_quarter_of_the_full_one():
    sizes = {}
    for name in ("adamw", "adamw8bit"):
        weights = parameters({"w": (1024, 512)})
        optimizer = build_optimizer(weights, settings(name))
        step(weights, optimizer, 1, 1e-3)
        state = save_optimizer(optimizer, settings(name))
        sizes[name] = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
    assert 0.24 < sizes["adamw8bit"] / sizes["adamw"] < 0.27


def test_prodigy_and_schedule_free_remember_what_belongs_to_all_parameters():
    for name, key in (("prodigy", "d"), ("schedule-free-adamw", "k")):
        weights = parameters()
        optimizer = build_optimizer(weights, settings(name))
        before = optimizer.param_groups[0][key]
        step(weights, optimizer, 5, settings(name).lr)
        [group] = save_optimizer(optimizer, settings(name)).groups
        assert group[key] > before


def test_schedule_free_training_draws_with_the_average_and_keeps_both():
    config = TrainConfig(
        batch_size=2,
        gradient_accumulation=1,
        seed=0,
        adapter=AdapterConfig(rank=4),
        optimizer=settings("schedule-free-adamw"),
    )
    state = train(steps=5, config=config)
    name = next(name for name in state.weights if name.endswith("up"))
    x, y, z = state.weights[name], *(state.optimizer.tensors[f"{name}.{key}"] for key in ("trained", "z"))
    beta = config.optimizer.betas[0]
    assert torch.allclose(y, beta * x + (1 - beta) * z, atol=1e-7) and not torch.equal(x, y)


def test_parameters_have_learning_rates_of_their_own():
    weights = parameters()
    optimizer = build_optimizer(weights, settings("sgd", weight_decay=0.0, betas=(0.0, 0.0)), {"a.up": 16.0})
    before = {name: p.detach().clone() for name, p in weights.items()}
    for p in weights.values():
        p.grad = torch.ones_like(p)
    set_lr(optimizer, 0.01)
    optimizer.step()
    moved = {name: float((before[name] - p).mean()) for name, p in weights.items()}
    assert moved == pytest.approx({"a.down": 0.01, "a.up": 0.16, "b.scale": 0.01}, rel=1e-3)


def test_a_rate_that_is_none_for_prodigy_is_told():
    [note] = optimizer_notes(OptimizerConfig(name="prodigy", lr=1e-4))
    assert not optimizer_notes(OptimizerConfig(name="prodigy", lr=0.1))
    assert "by the learning rate of 0.0001, so it will hardly learn anything; 1 is usual" in note
    assert (
        optimizer_notes(OptimizerConfig(name="prodigy", lr=1.0)) == optimizer_notes(OptimizerConfig()) == []
    )


def test_prodigy_refuses_several_learning_rates():
    with pytest.raises(ValueError, match="switch off LoRA"):
        build_optimizer(parameters(), settings("prodigy"), {"a.up": 16.0})


def test_lion_follows_its_paper():
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = build_optimizer(
        {"p": p}, OptimizerConfig(name="lion", lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    )
    for gradient in ([0.5, -3.0], [-0.04, 1.0]):
        p.grad = torch.tensor(gradient)
        optimizer.step()
    # m = 0.01 g1; update 2 = sign(0.9 m + 0.1 g2) = sign(0.0045 - 0.004), sign(-0.027 + 0.1)
    expected = [(1.0 * 0.95 - 0.1) * 0.95 - 0.1, (-2.0 * 0.95 + 0.1) * 0.95 - 0.1]
    assert p.tolist() == pytest.approx(expected, rel=1e-6)


def test_sgd_has_the_first_beta_as_its_momentum():
    p = nn.Parameter(torch.zeros(2))
    config = OptimizerConfig(name="sgd", lr=0.1, betas=(0.5, 0.9), weight_decay=0.0)
    optimizer = build_optimizer({"p": p}, config)
    for _ in range(2):
        p.grad = torch.tensor([1.0, -2.0])
        optimizer.step()
    assert p.tolist() == pytest.approx([-0.1 * (1 + 1.5), 0.2 * (1 + 1.5)])


def test_stable_adamw_follows_its_paper():
    p, eps = nn.Parameter(torch.tensor([1.0, -2.0])), 0.01
    config = OptimizerConfig(name="stable-adamw", lr=0.1, betas=(0.9, 0.99), eps=eps, weight_decay=0.5)
    optimizer = build_optimizer({"p": p}, config)
    expected, m, v = p.detach().clone(), 0.0, 0.0
    for t, gradient in enumerate(([0.5, -0.003], [-0.4, 1.0], [3.0, 0.2], [0.01, 0.1]), 1):
        p.grad = g = torch.tensor(gradient)
        optimizer.step()
        first, second = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in (0.9, 0.99))
        m, v = first * m + (1 - first) * g, second * v + (1 - second) * g * g
        rms = (g * g / v.clamp_min(eps**2)).mean().sqrt().item()
        expected -= 0.1 / max(1.0, rms) * (0.5 * expected + m / (v.sqrt() + eps))
    torch.testing.assert_close(p.detach(), expected)


def test_stable_adamw_shortens_the_step_of_a_sudden_gradient():
    p = nn.Parameter(torch.zeros(4))
    optimizer = build_optimizer({"p": p}, OptimizerConfig(name="stable-adamw", lr=0.1, weight_decay=0.0))
    for _ in range(50):
        p.grad = torch.full_like(p, 0.01)
        optimizer.step()
    before = p.detach().clone()
    p.grad = torch.full_like(p, 10.0)
    optimizer.step()
    v = optimizer.state[p]["exp_avg_sq"]
    m = optimizer.state[p]["exp_avg"]
    shortened = 0.1 / (10.0 / v.sqrt())
    assert torch.allclose(before - p, shortened * m / v.sqrt(), rtol=1e-4) and float(shortened[0]) < 0.02


def test_adafactor_takes_the_learning_rate_as_given():
    p = nn.Parameter(torch.zeros(8, 8))
    optimizer = build_optimizer({"p": p}, OptimizerConfig(name="adafactor", lr=0.01, weight_decay=0.0))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.allclose(p, torch.full_like(p, -0.01), rtol=1e-3)


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'adam' is unknown; choose one of adamw, adamw8bit"):
        build_optimizer(parameters(), OptimizerConfig(name="adam"))


@pytest.mark.parametrize(("name", "package"), PACKAGES.items())
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, package, monkeypatch):
    find = builtins.__import__

    def missing(wanted, *args, **options):
        if wanted.split(".")[0] == package:
            raise ImportError(f"No module named {wanted!r}")
        return find(wanted, *args, **options)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ValueError, match=f"pip install {INSTALLED_AS.get(package, package)}"):
        build_optimizer(parameters(), OptimizerConfig(name=name, lr=1.0))


def test_bf16_weights_are_rounded_in_training_and_resume_bit_equal(tmp_path):
    for name in ("adamw", "schedule-free-adamw"):
        config = TrainConfig(
            batch_size=2,
            gradient_accumulation=1,
            seed=0,
            adapter=AdapterConfig(rank=4),
            optimizer=settings(name, weights="bf16"),
        )
        state = train(steps=3, config=config)
        trained = [state.optimizer.tensors.get(f"{key}.trained", state.weights[key]) for key in state.weights]
        assert all(torch.equal(w.bfloat16().float(), w) and w.dtype == torch.float32 for w in trained)
        save_state(state, tmp_path)
        assert_same(train(load_state(tmp_path), steps=3, config=config), train(steps=6, config=config))


def test_what_starts_from_the_base_starts_at_nothing_in_bf16_too():
    adapter = adapter_config("pissa")
    config = TrainConfig(adapter=adapter, optimizer=settings("adamw", weights="bf16"))
    denoiser = TinyDenoiser()
    live = LiveState(denoiser, config, initial_state(denoiser, config), {})
    assert all(not adapter.product().any() for adapter in live.adapters.values())


def test_dora_keeps_the_lengths_of_the_base_in_float32():
    """A file holds them beside the base's own: rounded, a fresh one would change the picture."""
    config = TrainConfig(adapter=adapter_config("dora"), optimizer=settings("adamw", weights="bf16"))
    denoiser = TinyDenoiser()
    start = initial_state(denoiser, config)
    live = LiveState(denoiser, config, start, {})
    lengths = {name: tensor for name, tensor in start.weights.items() if name.endswith(".magnitude")}
    assert lengths and all(torch.equal(live.weights[name], tensor) for name, tensor in lengths.items())
    assert {p.dtype for n, p in live.weights.items() if n not in lengths} == {torch.bfloat16}
    state = train(steps=2, config=config)
    assert any(not torch.equal(t.bfloat16().float(), t) for n, t in state.weights.items() if n in lengths)


@pytest.mark.parametrize("name", ["adamw8bit", "lion8bit", "paged-adamw8bit"])
def test_only_paged_memory_is_waited_for(name, monkeypatch):
    waited, (weights, config) = [], (parameters(), settings(name))
    optimizer = build_optimizer(weights, config)
    monkeypatch.setattr("bitsandbytes.optim.optimizer.sync_gpu", waited.append)
    step(weights, optimizer, 2, config.lr)
    assert bool(waited) == (name == "paged-adamw8bit")


def test_a_run_takes_the_paged_memory_that_the_one_before_let_go_of(monkeypatch):
    """bitsandbytes never gives any back to the system."""
    config, taken = settings("paged-adamw8bit"), []

    def paged(optimizer, p, dtype=torch.float32):
        buffer = torch.zeros_like(p, dtype=dtype)
        buffer.is_paged = True
        taken.append(tuple(p.shape))
        return buffer

    monkeypatch.setattr("bitsandbytes.optim.optimizer.Optimizer8bit.get_state_buffer", paged)
    monkeypatch.setattr("bitsandbytes.functional.prefetch_tensor", lambda *args: None)
    monkeypatch.setattr(bits, "_unused", defaultdict(list))

    def run(state=None):
        weights = parameters()
        optimizer = build_optimizer(weights, config)
        if state is not None:
            load_optimizer(optimizer, config, state)
        step(weights, optimizer, 2, config.lr)
        return weights, save_optimizer(optimizer, config)

    first, state = run()
    gc.collect()
    count, again = len(taken), run()[0]
    gc.collect()
    assert count == 2 * len(SHAPES) and all(torch.equal(again[name], p) for name, p in first.items())
    run(state)  # resumed
    assert len(taken) == count


@pytest.mark.feature(130)
def test_bf16_weights_learn_what_float32_weights_learn():
    losses = {}
    for weights in ("fp32", "bf16"):
        optimizer = OptimizerConfig(lr=3e-4, weights=weights)
        config = TrainConfig(
            batch_size=4,
            gradient_accumulation=1,
            seed=0,
            adapter=AdapterConfig(rank=4, targets="all"),
            optimizer=optimizer,
        )
        losses[weights] = sum(train(steps=40, config=config).losses[-10:])
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)


@pytest.mark.parametrize(("max_norm", "decay", "setting"), [(0.0, 0.9, "EMA decay"), (1.0, 0.0, "max norm")])
def test_ema_and_max_norm_beside_an_averaging_optimizer_are_refused(max_norm, decay, setting):
    adapter, optimizer = AdapterConfig(rank=4, max_norm=max_norm), settings("schedule-free-adamw")
    with pytest.raises(ValueError, match=f"averages the weights itself; set the {setting} to 0"):
        train(steps=1, config=TrainConfig(adapter=adapter, optimizer=optimizer, ema=EmaConfig(decay=decay)))


class Overflowing(TinyDenoiser):
    """Gradients beyond what fp16 holds become infinite, as they do in an fp16 network."""

    limit = torch.inf

    def __init__(self):
        super().__init__()
        self.module.half().float()  # weights that fp16 can hold, so that only the scale differs

    def hold(self, dtype, *args):
        return super().hold(torch.float32, *args)

    def denoise(self, x_t, sigma, batch):
        output = super().denoise(x_t, sigma, batch)
        if output.requires_grad:
            output.register_hook(lambda g: torch.where(g.abs() > self.limit, torch.inf, g))
        return output


def fp16(limit, steps, state=None):
    config = TrainConfig(
        batch_size=2,
        gradient_accumulation=1,
        seed=0,
        adapter=AdapterConfig(rank=4),
        optimizer=OptimizerConfig(lr=1e-3),
        memory=MemoryConfig(dtype="fp16"),
    )
    denoiser = Overflowing()
    denoiser.limit = limit
    return train(state, steps=steps, config=config, denoiser=denoiser)


def test_loss_scaling_changes_nothing_but_the_scale():
    scaled = fp16(torch.inf, 3)
    assert scaled.loss_scale.value == 65536 and scaled.loss_scale.clean == 3
    plain = TrainConfig(
        batch_size=2,
        gradient_accumulation=1,
        seed=0,
        adapter=AdapterConfig(rank=4),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    unscaled = train(steps=3, config=plain, denoiser=Overflowing())
    assert scaled.losses == pytest.approx(unscaled.losses, rel=1e-6)
    assert all(torch.allclose(scaled.weights[n], unscaled.weights[n], atol=1e-7) for n in scaled.weights)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_network_in_half_precision_learns_what_it_does_in_float32(dtype):
    computed, losses = [], {}
    for name in (dtype, "fp32"):
        denoiser = TinyDenoiser()
        denoiser.module.blocks[0].register_forward_hook(lambda *call: computed.append(call[-1].dtype))
        config = TrainConfig(
            batch_size=4,
            gradient_accumulation=1,
            seed=0,
            adapter=AdapterConfig(rank=4),
            optimizer=OptimizerConfig(lr=1e-2),
            memory=MemoryConfig(dtype=name),
        )
        losses[name] = train(steps=20, config=config, denoiser=denoiser).losses
    assert computed == [DTYPES[dtype]] * 20 + [torch.float32] * 20
    assert losses[dtype] == pytest.approx(losses["fp32"], rel=0.02) and losses[dtype] != losses["fp32"]
    assert losses[dtype][-1] < 0.9 * losses[dtype][0]


def test_gradients_are_as_large_as_without_a_loss_scale():
    """Adam and clipping to a norm hide a factor; plain SGD does not."""
    sgd = OptimizerConfig(name="sgd", lr=0.01, max_grad_norm=0.0, weight_decay=0.0)
    config = TrainConfig(
        batch_size=2, gradient_accumulation=1, seed=0, adapter=AdapterConfig(rank=4), optimizer=sgd
    )
    plain = train(steps=3, config=config, denoiser=Overflowing())
    half = dataclasses.replace(config, memory=MemoryConfig(dtype="fp16"))
    scaled = train(steps=3, config=half, denoiser=Overflowing())
    assert all(torch.allclose(scaled.weights[n], plain.weights[n], atol=1e-7) for n in plain.weights)


@pytest.mark.feature(85)
def test_a_step_whose_gradients_overflow_is_computed_again_at_a_lower_scale():
    state = fp16(10.0, 3)
    assert 1 < state.loss_scale.value < 65536 and state.step == 3
    assert all(
        torch.allclose(state.weights[n], fp16(torch.inf, 3).weights[n], atol=1e-7) for n in state.weights
    )


def test_the_loss_scale_resumes_exactly(tmp_path):
    save_state(fp16(10.0, 2), tmp_path)
    resumed = fp16(10.0, 2, load_state(tmp_path))
    whole = fp16(10.0, 4)
    assert_same(resumed, whole)
    assert resumed.loss_scale == whole.loss_scale


def test_gradients_that_overflow_at_any_scale_stop_the_run():
    with pytest.raises(FloatingPointError, match="the gradient is"):
        fp16(0.0, 1)


def test_muon_makes_matrices_orthogonal_and_trains_vectors_by_adamw():
    config = settings("muon", betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    optimizer = build_optimizer(parameters(), config)
    found = {name: group for group in optimizer.param_groups for name in group["names"]}
    assert found["a.down"] is found["a.up"] and found["a.down"] is not found["b.scale"]
    assert found["a.down"]["use_muon"] and found["a.down"]["momentum"] == 0.8
    vector = found["b.scale"]
    assert not vector["use_muon"] and (vector["betas"], vector["eps"]) == ((0.8, 0.99), 1e-8)
    assert all(group["weight_decay"] == 0.1 for group in optimizer.param_groups)


def test_a_rate_that_breaks_a_lora_does_so_in_eight_bit_too():
    most = {name: row.most_lr for name, row in OPTIMIZERS.items()}
    assert most["adamw8bit"] == most["paged-adamw8bit"] == most["adamw"] and most["lion8bit"] == most["lion"]
    assert all(0 <= rate < 0.01 for rate in most.values())


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 2),
        ({"module_dropout": 0.1}, 8),
        ({"rank_dropout": 0.1, "rank": 1}, 8),
        ({"rank_dropout": 0.1}, 3),
    ],
)
def test_a_parameter_is_called_silent_only_when_dropout_can_hardly_be_the_reason(settings, steps):
    """0.1 to the 6th is a millionth; so is less than one step's chance that all of 16 ranks are dropped."""
    assert steps_needed(AdapterConfig(**{"rank": 16} | settings)) == steps


def test_prodigy_is_set_as_its_authors_advise_for_runs_with_a_warm_up():
    parameters = {"a": torch.nn.Parameter(torch.ones(2, 2))}
    [group] = build_optimizer(parameters, OptimizerConfig(name="prodigy", lr=1.0)).param_groups
    assert group["decouple"] and group["use_bias_correction"] and group["safeguard_warmup"]
