"""The plan that is chosen fits, is the fastest that does, and changes nothing but time."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from graft.tests.support.adapter_cases import adapter_config, train_config
from graft.tests.support.memory import BATCH, CONFIG, Sized
from graft.tests.support.tiny import TinyDenoiser
from graft.training.config import EmaConfig, MemoryConfig, OptimizerConfig
from graft.training.live_state import LiveState
from graft.training.loop import initial_state, train
from graft.training.memory.activation_checkpointing import MODES
from graft.training.memory.estimate import StepEstimate
from graft.training.memory.placement import Placement
from graft.training.memory.plan import (
    GIB,
    RESERVE,
    UNFILLED,
    Estimate,
    MemoryPlan,
    adapter_bytes,
    agree_on_plans,
    budget_of,
    candidates,
    count_trained,
    estimate_fastest,
    fits_surely,
    gib,
    make_estimator,
    optimizing_bytes,
    plans_that_fit,
)
from graft.training.memory.plan_table import format_plans
from graft.training.memory.tensor_counter import LiveTensors
from graft.training.memory.weight_store import COPIED, STORES, is_quantized, weight_bytes
from graft.training.model import OFFLOAD_ALL, OffloadOptions
from graft.training.optimizer.build import row_of


def with_memory(**settings):
    return replace(CONFIG, memory=MemoryConfig(**settings))


def estimates(denoiser, config=CONFIG):
    return [
        make_estimator(denoiser, denoiser.specs, config, BATCH)(plan) for plan in candidates(config.memory)
    ]


def chosen(denoiser, available, config=CONFIG):
    return list(plans_that_fit(denoiser, denoiser.specs, config, BATCH, available))


def test_the_peak_is_that_of_the_step_or_of_the_optimizer_beside_all_weights():
    step = StepEstimate(saved=0, peak=1000, flops=1)
    estimate = Estimate(MemoryPlan("resident", "none"), weights=300, adapters=20, step=step, optimizing=1500)
    assert (estimate.step_peak, estimate.peak) == (1500, 1820)
    assert replace(estimate, correction=1.6).peak == 1920


def test_a_plan_computes_everything_twice_or_thrice():
    for estimate in estimates(TinyDenoiser()):
        assert estimate.passes == (2 if estimate.plan.checkpointing in ("none", "selective") else 3)


def test_the_estimate_is_of_the_fastest_plan_that_fits_and_of_the_last_one_where_none_does():
    plans, asked = candidates(CONFIG.memory), []

    def estimate(plan):
        asked.append(plan)
        return SimpleNamespace(plan=plan, fits=lambda budget: plan is plans[2])

    find = partial(estimate_fastest, TinyDenoiser(), CONFIG, plans)
    assert find(GIB, estimate).plan is plans[2] and asked == list(plans[:3])
    asked.clear()
    assert find(0, estimate).plan is plans[-1] and asked == [plans[-1]]


def test_the_fastest_plan_that_fits_is_chosen(caplog):
    caplog.set_level("INFO")
    denoiser = TinyDenoiser()
    for estimate in estimates(denoiser):
        first = chosen(denoiser, int(estimate.peak / (1 - RESERVE)) + 1)[0]
        fits = [p.plan for p in estimates(denoiser) if p.peak <= estimate.peak + 1]
        assert first == fits[0] and f"{fits[0]} takes " in caplog.text


def test_where_nothing_fits_the_smallest_is_tried_and_the_user_told(caplog):
    assert chosen(TinyDenoiser(), 1000) == [MemoryPlan("offload", "block-offload")]
    assert "no plan fits into 0.0 MiB" in caplog.text and "'fp8' or 'nf4'" in caplog.text
    assert "takes least, base offload, checkpointing block-offload (" in caplog.text


def test_a_peak_in_the_reserve_does_not_fit():
    step = StepEstimate(saved=0, peak=0, flops=0)
    estimate = Estimate(MemoryPlan("resident", "none"), 960, 0, step)
    assert estimate.fits(1000) and not replace(estimate, weights=961).fits(1000)


def test_blocks_that_fill_their_share_to_the_last_byte_stay():
    step = StepEstimate(saved=0, peak=0, flops=0)
    estimate = Estimate(MemoryPlan("offload", "block"), 0, 0, step, blocks={"0": 450, "1": 450}, passes=2)
    assert estimate.blocks_on_device(1000) == {"0", "1"} and len(estimate.blocks_on_device(999)) == 1


def test_a_plan_is_the_same_with_blocks_on_the_device_and_without():
    plan = MemoryPlan("offload", "block")
    assert replace(plan, offload=OffloadOptions(blocks_on_device=frozenset("0"))) == plan


def test_processes_that_share_a_base_try_one_plan():
    denoiser = TinyDenoiser()
    assert len(agree_on_plans(denoiser, denoiser.specs, with_memory(base="sharded"), BATCH, GIB)) == 1


def test_copies_of_bf16_weights_count_in_the_optimizers_step():
    specs = TinyDenoiser().specs
    whole, half = (
        optimizing_bytes(specs, replace(CONFIG, optimizer=OptimizerConfig(weights=weights)))
        for weights in ("fp32", "bf16")
    )
    count = count_trained(specs, CONFIG)
    assert whole == count * (4 + row_of(CONFIG.optimizer).step_bytes) and half == whole + 2 * count


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (GIB // 10 - 1, "102.4 MiB"),
        (GIB // 10, "0.10 GiB"),
        (GIB // 11, "93.1 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
    ],
)
def test_sizes_are_in_gib_from_a_tenth_of_one(size, text):
    assert gib(size) == text


def offloading(blocks):
    """A run on an offloaded base, with memory for that and so many of its blocks."""
    config = with_memory(base="offload")
    estimate = estimates(TinyDenoiser(), config)[0]
    budget = (estimate.peak + blocks * max(estimate.blocks.values())) / (1 - UNFILLED) + 1
    return with_memory(base="offload", budget_gb=budget / GIB)


def test_blocks_of_an_offloaded_base_stay_where_they_fit():
    step = StepEstimate(saved=0, peak=0, flops=0)
    estimate = Estimate(
        MemoryPlan("offload", "block"), 100, 0, step, blocks={str(i): 10 for i in range(10)}, passes=3
    )
    there = sorted(map(int, estimate.blocks_on_device(int(145 / (1 - UNFILLED)))))
    assert len(there) == 4 and max(b - a for a, b in pairwise(there)) <= 3
    assert estimate.blocks_on_device(None) == estimate.blocks_on_device(100) == frozenset()
    assert estimate.blocks_on_device(10_000) == estimate.blocks.keys()
    assert estimate.seconds(1, 1, int(145 / (1 - UNFILLED))) == 3 * 60 and estimate.seconds(1, 1) == 3 * 100


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_run_keeps_as_many_blocks_on_the_device_as_fit(count, caplog):
    caplog.set_level("INFO")
    config = offloading(count)
    first, *rest = chosen(TinyDenoiser(), budget_of(TinyDenoiser(), config.memory), config)
    assert len(first.offload.blocks_on_device) == count and not any(
        plan.offload.blocks_on_device for plan in rest
    )
    assert (first in rest) == (count > 0), "without them it is tried again"
    state = train(TinyDenoiser(), Sized(), config, None, steps=2)
    expected = train(TinyDenoiser(), Sized(), CONFIG, None, steps=2)
    assert all(torch.equal(state.weights[name], tensor) for name, tensor in expected.weights.items())
    assert (f"{count} of 2 blocks stay on the device" in caplog.text) == (count > 0)


def test_where_blocks_on_the_device_do_not_fit_all_the_same_the_run_goes_on_without(caplog):
    class Full(TinyDenoiser):
        def hold(self, dtype, store="resident", offload=OFFLOAD_ALL, compute="full"):
            if offload.blocks_on_device:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().hold(dtype, store, offload)

    state = train(Full(), Sized(), offloading(1), None, steps=2)
    expected = train(TinyDenoiser(), Sized(), CONFIG, None, steps=2)
    assert all(torch.equal(state.weights[name], tensor) for name, tensor in expected.weights.items())
    assert "memory ran out with base offload with 1 block on the device, checkpointing none" in caplog.text


def test_the_budget_is_what_is_set_or_what_is_free_while_nothing_is_held():
    denoiser = TinyDenoiser()
    denoiser.hold, denoiser.free_bytes = None, lambda: GIB
    assert budget_of(denoiser, MemoryConfig()) == GIB
    assert budget_of(denoiser, MemoryConfig(budget_gb=3.0)) == 3 * GIB


def test_a_plan_that_the_user_fixed_is_kept():
    config = with_memory(base="resident", checkpointing="selective")
    assert chosen(TinyDenoiser(), 1000, config) == [MemoryPlan("resident", "selective")]


def test_host_memory_is_left_for_block_inputs(monkeypatch):
    monkeypatch.setattr("graft.training.memory.offload.SMALLEST_INPUT", 1)
    denoiser, holds = TinyDenoiser(), []
    hold = denoiser.hold
    denoiser.hold = lambda dtype, *how: holds.append(how) or hold(dtype, *how)
    fixed = with_memory(base="offload", checkpointing="block-offload")
    inputs = make_estimator(denoiser, denoiser.specs, CONFIG, BATCH)(MemoryPlan("resident", "none")).step.host
    for config in (CONFIG, fixed):
        (plan,) = chosen(denoiser, 1000, config)
        assert plan.offload.host_reserve == inputs > 0
        holds.clear()
        with Placement(denoiser, {}, [plan], torch.float32):
            assert holds == [("offload", OffloadOptions(inputs), "full")]


def test_what_waits_in_host_memory_is_told(monkeypatch):
    monkeypatch.setattr("graft.training.memory.offload.SMALLEST_INPUT", 1)
    by_plan = {p.plan: p for p in estimates(TinyDenoiser())}
    base, inputs = (
        by_plan[MemoryPlan("offload", "none")].host,
        by_plan[MemoryPlan("resident", "block-offload")].host,
    )
    assert base > 0 and inputs > 0 and by_plan[MemoryPlan("resident", "none")].host == 0
    assert by_plan[MemoryPlan("offload", "block-offload")].host == base + inputs


def test_with_ample_memory_nothing_is_estimated(monkeypatch):
    monkeypatch.setattr("graft.training.memory.plan.estimate_step", None)
    denoiser = TinyDenoiser()
    assert fits_surely(denoiser, denoiser.specs, CONFIG, BATCH, GIB)
    assert chosen(denoiser, GIB) == list(candidates(CONFIG.memory))


def test_memory_is_not_ample_where_the_fastest_plan_would_not_fit():
    denoiser = TinyDenoiser()
    sure = partial(fits_surely, denoiser, denoiser.specs, CONFIG)
    assert not sure(BATCH, estimates(denoiser)[0].peak)
    text = [{**each, "text": torch.zeros(1, 500, 8)} for each in BATCH.conditioning]
    ample = next(size for size in range(0, GIB, 1 << 16) if sure(BATCH, size))
    assert not sure(replace(BATCH, conditioning=text), 2 * ample)


def test_an_ample_budget_is_one_for_every_layers_input_and_output_six_times():
    """At the largest of all texts, beside the base and twice the adapters."""
    denoiser = TinyDenoiser()
    texts = [{**each, "text": torch.zeros(1, 9 + 20 * i, 8)} for i, each in enumerate(BATCH.conditioning)]
    batch = replace(BATCH, conditioning=texts)
    positions = len(batch.latents) * (batch.latents[0, 0].numel() + 29)
    widths = sum(spec.shape[0] + spec.shape[1] for spec in denoiser.specs.values())
    base = weight_bytes(denoiser.specs, denoiser.family.blocks, "resident", torch.float32)
    enough = base + 2 * adapter_bytes(denoiser.specs, CONFIG) + 6 * 4 * positions * widths
    sure = partial(fits_surely, denoiser, denoiser.specs, CONFIG, batch)
    assert sure(enough) and not sure(enough - 1)


def test_a_step_lasts_as_long_as_the_slower_of_computing_and_copying():
    plain, copying = (p for p in estimates(TinyDenoiser()) if p.plan.checkpointing == "block")
    flops, moved = plain.step.flops, copying.moved()
    assert plain.seconds(flops, 1.0) == 1 and copying.seconds(flops, moved) == 1
    assert copying.seconds(flops, moved / 2) == 2 and copying.seconds(flops / 3, moved) == 3


def test_the_base_is_copied_once_more_where_blocks_are_computed_again():
    by_plan = {p.plan: p.moved() for p in estimates(TinyDenoiser())}
    weights = sum(spec.numel for spec in TinyDenoiser().specs.values()) * 4
    assert by_plan[MemoryPlan("offload", "none")] == by_plan[MemoryPlan("offload", "selective")]
    assert (
        by_plan[MemoryPlan("offload", "block")]
        == by_plan[MemoryPlan("offload", "none")] * 3 / 2
        <= 3 * weights
    )


def test_a_quantized_layer_is_counted_dequantized_too_while_it_is_used(monkeypatch):
    monkeypatch.setattr("graft.training.memory.weight_store.SMALLEST", 1)
    denoiser = TinyDenoiser()
    estimate = make_estimator(denoiser, denoiser.specs, CONFIG, BATCH)(MemoryPlan("fp8", "none"))
    stored = weight_bytes(denoiser.specs, denoiser.family.blocks, "fp8", torch.float32)
    largest = max(spec.numel for spec in denoiser.specs.values() if is_quantized(spec, "fp8"))
    assert estimate.weights == stored + 2 * 4 * largest + estimate.step.loose


def test_where_nobody_knows_how_much_is_free_the_fastest_plan_is_tried_first():
    assert chosen(TinyDenoiser(), None) == list(candidates(CONFIG.memory))


def test_a_network_that_cannot_be_estimated_starts_with_the_fastest_plan(monkeypatch, caplog):
    def fails(*args, **options):
        raise RuntimeError("depends on numbers")

    monkeypatch.setattr("graft.training.memory.plan.estimate_step", fails)
    assert chosen(TinyDenoiser(), 100_000) == list(candidates(CONFIG.memory))
    assert "cannot be estimated (depends on numbers)" in caplog.text


@pytest.mark.parametrize("base", STORES)
def test_every_plan_is_estimated(base):
    config = with_memory(base=base)
    every = estimates(TinyDenoiser(), config)
    assert [p.plan.checkpointing for p in every] == list(MODES)
    assert every[0].peak > every[1].peak > every[2].peak >= every[3].peak
    assert all(bool(p.blocks) == (base in COPIED) for p in every)


def test_the_table_says_what_fits_and_how_long_it_takes():
    every = estimates(TinyDenoiser())
    lines = format_plans(every, every[2].peak * 2, None, 1.0).splitlines()
    assert len(lines) == 1 + len(every) and lines[1].split()[:2] == ["resident", "none"]
    assert "x 1.00" in lines[1] and lines[3].endswith("fits")
    assert " s" in format_plans(every, None, 1e9, 1e9) and "fits" not in format_plans(every, None, 1e9, 1e9)
    assert format_plans(every, 1000, None, 1.0).count("too large") == len(every)


@pytest.mark.parametrize("name", ["adamw", "lion", "stable-adamw", "sgd"])
def test_adapters_take_what_is_counted(name):
    denoiser, config = TinyDenoiser(), replace(CONFIG, optimizer=OptimizerConfig(name=name))
    state = train(denoiser, Sized(), config, None, steps=2)
    tensors = [*state.weights.values(), *state.optimizer.tensors.values()]
    counted = adapter_bytes(denoiser.specs, config)
    assert abs(sum(t.nbytes for t in tensors) - counted) <= 0.05 * counted + 1000
    averaged = adapter_bytes(denoiser.specs, replace(config, ema=EmaConfig(decay=0.9)))
    assert abs(averaged - counted - sum(t.nbytes for t in state.weights.values())) <= 1000


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_an_optimizer_step_takes_what_is_counted(weights):
    optimizer = OptimizerConfig(name="sgd", weights=weights)
    config = replace(CONFIG, optimizer=optimizer)
    denoiser = TinyDenoiser()
    live = LiveState(denoiser, config, initial_state(denoiser, config), {})
    live.optimizer.param_groups[0]["foreach"] = True  # as on a card
    largest = max(p.numel() for p in live.parameters.values())
    with LiveTensors() as counter:
        for _ in range(2):  # the first one makes the optimizer's memory
            before = counter.now
            for parameter in live.parameters.values():
                parameter.grad = torch.ones_like(parameter)
            counter.peak = counter.now
            live.optimize(1e-3, 0.0)
    counted = optimizing_bytes(denoiser.specs, config)
    assert abs(counter.peak - before - counted) <= 12 * largest < counted / 4


def test_a_plan_takes_what_its_worst_moment_does():
    estimate = estimates(TinyDenoiser())[-1]
    assert estimate.peak == estimate.weights + estimate.adapters + estimate.step.peak
    assert replace(estimate, optimizing=10 * estimate.step.peak).peak > 10 * estimate.step.peak


def test_what_is_free_is_asked_before_the_adapters_take_their_part_of_it(monkeypatch):
    """They are counted in every plan; a run that goes on has the optimizer's memory there, too."""
    free, budgets = GIB, []

    def start(*args):
        nonlocal free
        free -= GIB // 4
        return LiveState(*args)

    def record(denoiser, adapted, config, batch, budget):
        budgets.append(budget)
        return candidates(config.memory)

    monkeypatch.setattr(TinyDenoiser, "free_bytes", lambda denoiser: free)
    monkeypatch.setattr("graft.training.loop.LiveState", start)
    monkeypatch.setattr("graft.training.loop.agree_on_plans", record)
    train(TinyDenoiser(), Sized(), CONFIG, None, steps=1)
    assert budgets == [GIB]


LARGE = replace(train_config(adapter_config("lora", targets="all", rank=32)), batch_size=1)


class Card(TinyDenoiser):
    """A device on which the base, where it is resident, leaves `left` bytes for everything else."""

    def __init__(self, left):
        super().__init__()
        self.left, self.stores = left, []

    @contextmanager
    def hold(self, dtype, store, offload=OFFLOAD_ALL, compute="full"):
        self.stores.append(store)
        self.live.limit = self.left if store == "resident" else None
        try:
            with super().hold(dtype, store) as base:
                yield base
        finally:
            self.live.limit = None

    def train(self):
        with LiveTensors() as self.live:
            return train(self, Sized(), LARGE, None, steps=2)


def test_room_for_the_optimizer_runs_out_before_a_weight_has_moved():
    expected = Card(None).train()
    weights = sum(t.nbytes for t in expected.weights.values())
    memory = sum(t.nbytes for t in expected.optimizer.tensors.values())
    card = Card(weights + weights + memory - 1000)  # enough for the passes, but not for the optimizer's step
    state = card.train()
    assert card.stores[-1] == "offload"
    assert all(torch.equal(state.weights[name], tensor) for name, tensor in expected.weights.items())


class Budget:
    """A device of so many bytes: an operation beyond it raises out-of-memory."""

    def __init__(self, denoiser, limit):
        self.denoiser, self.limit, self.steps = denoiser, limit, 0
        denoise = denoiser.denoise

        def limited(*args):
            self.steps += 1
            with LiveTensors(self.limit) as self.live:
                return denoise(*args)

        denoiser.denoise = limited


def kept_by_forward(mode):
    denoiser = TinyDenoiser()
    budget = Budget(denoiser, None)
    state = train(denoiser, Sized(), with_memory(checkpointing=mode), None, steps=2)
    return budget.live.peak, state


@pytest.mark.parametrize("mode", ["selective", "block"])
def test_under_any_budget_a_run_ends_in_the_state_of_a_large_one(mode):
    (large, expected), (small, _) = kept_by_forward("none"), kept_by_forward(mode)
    denoiser = TinyDenoiser()
    budget = Budget(denoiser, (small + large) // 2)
    plans = []
    watched = {"on_step": lambda progress, handles: plans.append(progress.plan)}
    state = train(denoiser, Sized(), CONFIG, None, steps=2, **watched)
    assert small < large and budget.steps > 2
    assert set(plans) <= {"resident, selective", "resident, block"} and plans
    assert all(torch.equal(state.weights[name], tensor) for name, tensor in expected.weights.items())
    assert state.losses == expected.losses
