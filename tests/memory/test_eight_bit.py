"""Weights that are multiplied in 8 bits train as those that are made whole, within a stated error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graft.tests.support.adapter_cases import METHODS, adapter_config, frozen_layer
from graft.tests.support.memory import measured, step_gradients
from graft.tests.support.runs import CONFIG, assert_same, run
from graft.tests.support.tiny import Network, TinyDataset, TinyDenoiser
from graft.training.adapters.build import attach, restore_adapters
from graft.training.config import AdapterConfig, MemoryConfig
from graft.training.frozen_base.frozen_layer import LayerSpec, Products
from graft.training.memory import eight_bit, precision
from graft.training.memory.eight_bit import FORMATS, EightBit, Format, quantize_rows, refusal, rotate
from graft.training.memory.estimate import estimate_step
from graft.training.memory.plan import MemoryPlan, candidates, make_estimator
from graft.training.memory.quantize import plain, quantize
from graft.training.memory.weight_store import Store
from graft.training.model import OFFLOAD_ALL
from graft.training.run.saved_state import load_state, save_state

CPU = torch.device("cpu")
ERRORS = {"int8": 0.02, "fp8": 0.03}
"""Of a product, against that of the dequantized weight."""

ONLY_CUDA = pytest.mark.skipif(torch.__version__ < "2.6", reason="PyTorch 2.5 multiplies fp8 on CUDA alone")
OFFERED = [pytest.param("int8"), pytest.param("fp8", marks=ONLY_CUDA)]

SHAPES = {
    "sdxl": [(640, 640), (640, 2048), (5120, 640), (640, 2560), (1280, 1280), (10240, 1280), (1280, 5120)],
    "sd35": [(1536, 1536), (4608, 1536), (13824, 1536), (6144, 1536), (1536, 6144), (2432, 9728)],
    "flux": [(3072, 3072), (9216, 3072), (3072, 12288), (21504, 3072), (3072, 15360)],
}
"""(out, in) of the layers in the blocks."""


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found, exact):
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


def both_passes(weight, x, grad):
    by = weight.multiplication
    return by.forward(weight.parts, x, None), by.backward(weight.parts, grad)


@pytest.mark.feature(150)
@pytest.mark.parametrize("family", SHAPES)
def test_int8_products_of_every_layer_shape_are_within_two_percent_in_both_passes(family):
    for out, inputs in SHAPES[family]:
        weight = quantize(random(out, inputs), "int8", torch.bfloat16)
        x, grad = (random(8, side, seed=1, dtype=torch.bfloat16) for side in (inputs, out))
        y, grad_x = both_passes(weight, x, grad)
        whole = weight.dequantize(torch.float32)
        assert error(y, x.float() @ whole.T) <= ERRORS["int8"], (out, inputs)
        assert error(grad_x, grad.float() @ whole) <= ERRORS["int8"], (out, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OFFERED)
def test_products_stay_within_their_stated_error_in_every_precision(name, dtype):
    weight = quantize(random(48, 320), name, dtype)
    x, grad = random(300, 320, seed=1, dtype=dtype), random(300, 48, seed=2, dtype=dtype)
    y, grad_x = both_passes(weight, x, grad)
    whole = weight.dequantize(torch.float32)
    assert y.dtype == grad_x.dtype == dtype
    assert error(y, x.float() @ whole.T) <= ERRORS[name]
    assert error(grad_x, grad.float() @ whole) <= ERRORS[name]


def test_each_token_has_its_own_scale_so_a_large_one_costs_the_others_nothing():
    x = random(64, 128, seed=1)
    x[3] *= 1000
    small, scales = quantize_rows(x, FORMATS["int8"])
    assert all(error(row, exact) <= 0.01 for row, exact in zip(small * scales, x, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(bad):
    weight = quantize(random(32, 64), "int8", torch.float32)
    x = random(8, 64, seed=1)
    exact = weight.multiplication.forward(weight.parts, x, None)
    x[2, 5] = bad
    y = weight.multiplication.forward(weight.parts, x, None)
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 1, 3, 4, 5, 6, 7]], exact[[0, 1, 3, 4, 5, 6, 7]])


def test_rows_of_zeros_give_zeros():
    weight = quantize(random(32, 64), "int8", torch.float32)
    assert all(not found.any() for found in both_passes(weight, torch.zeros(3, 64), torch.zeros(3, 32)))


@pytest.mark.parametrize("name", OFFERED)
def test_a_rotated_weight_is_multiplied_as_the_original(name):
    """As ConvRot's files: rotated over groups of inputs, then quantized."""
    original, group = random(48, 512), 256
    stored = quantize(rotate(original, group), name, torch.float32)
    by = EightBit(name, rotation=group)
    x, grad = random(40, 512, seed=1), random(40, 48, seed=2)
    whole = rotate(stored.dequantize(torch.float32), group)
    assert error(whole, original) <= ERRORS[name]
    assert error(by.forward(stored.parts, x, None), x @ whole.T) <= ERRORS[name]
    assert error(by.backward(stored.parts, grad), grad @ whole) <= ERRORS[name]


def test_a_rotation_halves_the_error_of_an_outlier():
    x = random(40, 512, seed=1)
    x[:, 7] *= 60
    errors = []
    for rotation in (0, 256):
        original = random(48, 512)
        stored = quantize(rotate(original, 256) if rotation else original, "int8", torch.float32)
        whole = stored.dequantize(torch.float32)
        exact = x @ (rotate(whole, 256) if rotation else whole).T
        found = EightBit("int8", rotation).forward(stored.parts, x, None)
        errors.append(error(found - 0, exact))
    assert errors[1] < 0.5 * errors[0]


LAYERS = {
    "linear": lambda: (nn.Linear(32, 48), random(2, 5, 32, seed=1)),
    "conv1d-1x1": lambda: (nn.Conv1d(32, 48, 1), random(2, 32, 7, seed=1)),
    "conv2d-1x1": lambda: (nn.Conv2d(32, 48, 1, bias=False), random(2, 32, 3, 5, seed=1)),
}


def eight_bit_layer(module, name="int8", rotation=0):
    layer = frozen_layer(module)
    whole = module.weight.detach().flatten(1)
    stored = quantize(rotate(whole, rotation) if rotation else whole, name, torch.float32)
    by = EightBit(name, rotation)
    layer.products = Products(
        lambda rows, bias: by.forward(stored.parts, rows, bias),
        lambda grads: by.backward(stored.parts, grads),
    )
    return layer


@pytest.fixture
def unrounded(monkeypatch):
    """8-bit arithmetic with numbers that keep 32: all that it does but round."""
    row = Format(torch.float32, 127, lambda rows, weight: rows @ weight.float())
    monkeypatch.setattr(eight_bit, "FORMATS", {"int8": row})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_finite_differences_of_the_output(kind, method, unrounded, monkeypatch):
    module, x = LAYERS[kind]()
    if "tucker" in method and kind != "conv2d-1x1":
        pytest.skip("a kernel is needed")
    layer = eight_bit_layer(module, rotation=16)
    monkeypatch.setattr(layer, "weight", lambda dtype, device: module.weight.detach().to(dtype))
    specs = {layer.name: layer.spec}
    state = {n: 0.3 * random(*w.shape, seed=3) for n, w in fresh_weights(specs, method).items()}
    adapters = restore_adapters(specs, adapter_config(method), state, CPU)
    x = x.requires_grad_()
    direction = random(*x.shape, seed=5)
    with attach({layer.name: layer}, adapters):
        weigh = random(*module(x).shape, seed=6)

        def value(step):
            with torch.no_grad():
                return (module(x + step * direction).double() * weigh).sum().item()

        (module(x) * weigh).sum().backward()
        slope = (value(0.05) - value(-0.05)) / 0.1
    assert (x.grad.double() * direction).sum().item() == pytest.approx(slope, rel=2e-3, abs=1e-2)


def fresh_weights(specs, method):
    from graft.training.adapters.build import build_adapters, named_parameters

    return named_parameters(build_adapters(specs, adapter_config(method)))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_pointwise_layer_is_that_layer(kind):
    module, x = LAYERS[kind]()
    layer = eight_bit_layer(module)
    x.requires_grad_()
    y = layer.forward(x)
    exact = module(x.detach().clone().requires_grad_())
    assert y.shape == exact.shape and y.is_contiguous() and error(y, exact) <= 0.02
    y.backward(weigh := random(*y.shape, seed=4))
    grad_x = layer.kind.input_gradient(weigh, module.weight, x.shape, **layer.spec.options)
    assert error(x.grad, grad_x) <= 0.02


def test_kernels_strides_padding_and_groups_make_a_convolution_not_pointwise():
    def spec(*shape, **options):
        return LayerSpec("conv2d", shape, {"stride": (1, 1), "padding": (0, 0), "groups": 1, **options})

    assert spec(32, 32, 1, 1).is_pointwise and LayerSpec("linear", (32, 32)).is_pointwise
    assert not any(
        each.is_pointwise
        for each in (
            spec(32, 32, 3, 3),
            spec(32, 32, 1, 1, stride=(2, 2)),
            spec(32, 32, 1, 1, padding=1),
            spec(32, 16, 1, 1, groups=2),
            spec(32, 32, 1, 1, padding="same"),
            LayerSpec("embedding", (32, 32)),
        )
    )


class Wide(TinyDenoiser):
    """Wide enough to be quantized; held in one way, whatever it is asked for."""

    compute = "int8"

    def __init__(self, seed=0):
        super().__init__(seed)
        self.module = Network(64).requires_grad_(False)

    def hold(self, dtype, store="resident", offload=OFFLOAD_ALL, compute=None):
        return super().hold(dtype, store, offload, compute or self.compute)


def int8(**memory):
    return replace(CONFIG, memory=MemoryConfig(compute="int8", **memory))


@pytest.mark.parametrize("base", ["resident", "int8", "offload"])
def test_a_run_is_the_same_in_two_parts_from_disk_and_wherever_its_weights_are(base, tmp_path):
    whole = run(steps=6, config=int8(base=base), denoiser=Wide())
    save_state(run(steps=2, config=int8(), denoiser=Wide()), tmp_path / "state")
    rest = run(load_state(tmp_path / "state"), steps=4, config=int8(checkpointing="block"), denoiser=Wide())
    assert_same(rest, whole)
    full = run(steps=6, config=CONFIG, denoiser=Wide())
    assert whole.losses != full.losses
    assert whole.losses == pytest.approx(full.losses, rel=0.01)


def test_only_weights_that_count_are_multiplied_so():
    store = Store("resident", ("blocks.*",), torch.float32, CPU, compute="int8")
    for path, shape in {
        "blocks.0.mlp": (64, 64),
        "blocks.0.small": (32, 32),
        "blocks.0.uneven": (64, 72),
        "blocks.0.kernel": (64, 64, 3),
        "head": (64, 64),
    }.items():
        kind = "conv1d" if len(shape) == 3 else "linear"
        options = {"stride": 1, "padding": 1, "groups": 1} if kind == "conv1d" else {}
        fetch = store.make_fetch(path, LayerSpec(kind, shape, options), plain(random(*shape)))
        assert fetch(torch.float32, CPU).shape == shape
    assert set(store.products) == {"blocks.0.mlp"}


@pytest.mark.parametrize("mode", ["none", "block"])
def test_the_memory_of_a_step_is_estimated_within_a_tenth(mode):
    denoiser, batch = Wide(), TinyDataset().batch(4, seed=0, index=0)
    found = estimate_step(
        denoiser, denoiser.specs, CONFIG.adapter, batch, mode, torch.float32, compute="int8"
    )
    live, saved = measured(denoiser, batch, CONFIG, mode)
    assert found.saved == pytest.approx(saved, rel=0.1) and found.peak == pytest.approx(live.peak, rel=0.1)


def test_the_plan_counts_a_byte_a_weight_and_no_dequantizing():
    denoiser, batch = Wide(), TinyDataset().batch(1, seed=0, index=0)
    estimate = make_estimator(denoiser, denoiser.specs, CONFIG, batch)
    blocks = sum(64 * 64 * 4 for _ in range(2))  # qkv and mlp of both
    full, small, stored = (
        estimate(MemoryPlan(base, "none", compute=compute)).weights
        for base, compute in (("resident", "full"), ("resident", "int8"), ("int8", "full"))
    )
    assert full - small == 3 * blocks
    assert stored > small, "base int8 alone makes each weight whole"
    offloaded = (estimate(MemoryPlan("offload", "none", compute=c)).host for c in ("full", "int8"))
    assert next(offloaded) - next(offloaded) == 3 * blocks


def test_dora_reads_the_weight_that_is_multiplied():
    config = replace(int8(), adapter=AdapterConfig(algorithm="dora", rank=4, targets="attn-mlp"))
    denoiser = Wide()
    denoiser.compute = "full"
    exact = step_gradients(denoiser, TinyDataset().batch(2, seed=0, index=0), config)
    found = step_gradients(Wide(), TinyDataset().batch(2, seed=0, index=0), config)
    assert found[0] == pytest.approx(exact[0], rel=0.01)
    for name, gradient in exact[1].items():
        assert error(found[1][name], gradient) <= 0.1, name


def test_a_weight_stored_in_one_format_is_not_multiplied_in_another():
    for base in ("fp8", "nf4", "stream"):
        with pytest.raises(ValueError, match=f"^compute: 'int8' multiplies .* base is '{base}'"):
            run(steps=1, config=int8(base=base), denoiser=Wide())
    assert [plan.base for plan in candidates(int8(base="int8").memory, "int8")][:1] == ["int8"]


def test_a_device_without_such_products_is_refused_before_a_step(monkeypatch):
    def refuse(*args):
        raise RuntimeError("_int_mm is not implemented for this device\nand more")

    row = replace(FORMATS["int8"], multiply=refuse)
    monkeypatch.setattr(eight_bit, "FORMATS", {"int8": row})
    refusal.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"^compute: cpu cannot multiply int8 numbers \(_int_mm is not"):
            run(steps=1, config=int8(), denoiser=Wide())
    finally:
        refusal.cache_clear()


def test_auto_takes_the_files_own_format_where_the_device_is_faster_so():
    denoiser = Wide()
    assert precision.compute_format(MemoryConfig(), denoiser) == "full"
    specs = {**denoiser.specs, "q": LayerSpec("linear", (64, 64), {}, 4096, format="fp8")}
    for faster, chosen in ((True, "file"), (False, "full")):
        found = type("Found", (), {"specs": specs, "is_faster": lambda self, format, f=faster: f})()
        assert precision.compute_format(MemoryConfig(), found) == chosen
        assert precision.compute_format(MemoryConfig(compute="full"), found) == "full"


def test_a_loras_change_is_the_same_on_the_base_as_it_was():
    """Trained on int8, applied to the original."""
    state = run(steps=20, config=int8(), denoiser=Wide())
    denoiser = Wide()
    batch = TinyDataset().batch(4, seed=0, index=0)

    def change(compute):
        with torch.no_grad(), denoiser.hold(torch.float32, compute=compute) as base:
            before = denoiser.denoise(batch.latents, torch.full((4,), 0.5), batch)
            adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, CPU)
            with attach(base.layers, adapters):
                return denoiser.denoise(batch.latents, torch.full((4,), 0.5), batch) - before

    cosine = F.cosine_similarity(change("int8").flatten(), change("full").flatten(), 0)
    assert cosine >= 0.97
