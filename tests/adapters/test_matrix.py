"""Every method on every kind of layer obeys the laws of docs/design.md section 5."""

from __future__ import annotations

import pytest
import torch

from graft.tests.support.tiny import TinyDataset, TinyDenoiser
from graft.training.adapters.build import attach, draws, for_layer, method_of
from graft.training.config import AdapterConfig
from graft.training.files.lora.write import cast_tensors, layer_tensors
from graft.training.loop import train

from ..support.adapter_cases import (
    LAYERS,
    METHODS,
    adapter_config,
    base_weight,
    case,
    fresh_state,
    merged_output,
    train_config,
    trained_case,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
matrix = pytest.mark.parametrize(("method", "kind"), [(m, k) for m in METHODS for k in LAYERS])


@matrix
def test_a_fresh_adapter_changes_nothing(method, kind):
    layer, adapter, x = case(method, kind)
    assert torch.equal(adapter(layer, x), layer.forward(x))


@matrix
def test_attached_equals_merged(method, kind):
    layer, adapter, x = trained_case(method, kind)
    with torch.no_grad():
        y, merged, plain = adapter(layer, x), merged_output(layer, adapter, x), layer.forward(x)
    assert (y - merged).norm() <= 1e-5 * (y - plain).norm()


@matrix
def test_alpha_over_rank_scales_the_difference(method, kind):
    layer, adapter, _ = trained_case(method, kind)
    twice = trained_case(method, kind, alpha=2 * adapter_config(method).alpha)[1]
    twice.load_state_dict(adapter.state_dict())
    strong = adapter.has_alpha and adapter.rank_in(dict(adapter.named_parameters())) is not None
    assert torch.allclose(twice.product(), (2.0 if strong else 1.0) * adapter.product(), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "strength"),
    [
        ({}, 1),
        ({"rank": 64}, 1),
        ({"rslora": True}, 1),
        ({"rslora": True, "rank": 64}, 0.5),
        ({"rslora": True, "rank": 64, "alpha": 8.0}, 1),
        ({"algorithm": "loha"}, 1 / 16),
        ({"algorithm": "loha", "alpha": 8.0}, 0.5),
        ({"algorithm": "dora"}, 1),
        ({"algorithm": "lokr"}, 1),
    ],
)
def test_without_an_alpha_a_method_has_its_own(settings, strength):
    config = AdapterConfig(**settings)
    assert method_of(config).effective_alpha(config) / config.rank == strength


@matrix
def test_saved_and_read_again_equals_the_adapter(method, kind):
    layer, adapter, _ = trained_case(method, kind)
    weights = {name: parameter.detach() for name, parameter in adapter.named_parameters()}
    config = for_layer(adapter.config, "net.layer")
    tensors = layer_tensors(weights, config)
    cls = method_of(adapter_config(method, init="default"))
    read = cls.from_file_tensors(tensors)
    rank = cls.rank_in(read) if cls.has_alpha else None
    scale = float(tensors["alpha"]) / rank if rank else 1.0
    if cls.multiplies_base:
        base = base_weight(layer)
        assert torch.allclose(scale * cls.change(read, base), adapter.delta(base), atol=1e-6)
    else:
        delta = scale * cls.compose(read).reshape(adapter.spec.shape)
        assert torch.allclose(delta, adapter.product(), atol=1e-6)


def test_a_small_change_of_length_counts_in_bf16():
    """Above 1, bf16 has no number below 1.0078."""
    layer, adapter, _ = case("dora", "linear")
    x = torch.randn(20_000, layer.spec.shape[1]).bfloat16()
    with torch.no_grad():
        adapter.magnitude *= 1.003
        plain, moved = layer.forward(x).float(), adapter(layer, x).float()
        product = plain - layer.bias(torch.float32, x.device)
    assert ((moved - plain) * product).sum() / product.square().sum() == pytest.approx(0.003, abs=0.0006)


def test_a_dora_file_in_bf16_rounds_the_difference_and_not_the_whole_weight():
    layer, adapter, _ = trained_case("dora", "linear")
    base = base_weight(layer)
    with torch.no_grad():
        adapter.up.mul_(0.01)
        adapter.magnitude.copy_(base.norm(dim=0, keepdim=True).reshape(adapter.magnitude.shape) * 1.003)
    exact = adapter.delta(base).detach()
    weights = {name: parameter.detach() for name, parameter in adapter.named_parameters()}
    read = type(adapter).from_file_tensors(
        cast_tensors(layer_tensors(weights, adapter.config), torch.bfloat16)
    )
    adapter.load_state_dict({name: tensor.float() for name, tensor in read.items()})
    assert (adapter.delta(base) - exact).norm() < 0.01 * exact.norm()


def test_a_file_holds_matrices_for_a_linear_layer_and_a_1x1_up_for_a_convolution():
    """As sd-scripts and diffusers write them."""
    for kind, down, up in (
        ("linear", (3, 16), (24, 3)),
        ("conv1d", (3, 16, 3), (24, 3, 1)),
        ("conv2d", (3, 16, 3, 3), (24, 3, 1, 1)),
    ):
        _, adapter, _ = trained_case("lora", kind)
        tensors = layer_tensors(dict(adapter.named_parameters()), adapter.config)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
            "lora_down.weight": down,
            "lora_up.weight": up,
            "alpha": (),
        }


@matrix
def test_every_trained_parameter_has_a_gradient(method, kind):
    layer, adapter, x = trained_case(method, kind)
    adapter(layer, x).sin().sum().backward()
    for name, parameter in adapter.named_parameters():
        assert not parameter.requires_grad or parameter.grad.abs().sum() > 0, name


@matrix
def test_the_gradients_are_those_of_the_merged_weight(method, kind):
    layer, adapter, x = trained_case(method, kind)
    trained = [parameter for parameter in adapter.parameters() if parameter.requires_grad]
    ours = torch.autograd.grad(adapter(layer, x).sin().sum(), trained)
    plain = torch.autograd.grad(merged_output(layer, adapter, x).sin().sum(), trained)
    for one, other in zip(ours, plain):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * other.abs().max())


@pytest.mark.parametrize(
    "kind", [kind for kind in LAYERS if kind != "embedding"]
)  # token ids have no gradient
@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_of_the_input_is_that_of_the_merged_weight(method, kind):
    layer, adapter, x = trained_case(method, kind)
    x.requires_grad_()
    ours = torch.autograd.grad(adapter(layer, x).sin().sum(), x)[0]
    plain = torch.autograd.grad(merged_output(layer, adapter, x).sin().sum(), x)[0]
    assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-4 * plain.abs().max())


@pytest.mark.feature(22)
@matrix
def test_dropout_acts_inside_draws_only(method, kind):
    layer, adapter, x = trained_case(method, kind, dropout=0.4, rank_dropout=0.4, module_dropout=0.2)
    plain = trained_case(method, kind)[1]
    assert torch.equal(adapter(layer, x), plain(layer, x))
    with draws(0, 0):
        outputs = [adapter(layer, x)]
    for index in range(1, 16):
        with draws(0, index):
            outputs.append(adapter(layer, x))
    assert any(not torch.equal(output, outputs[0]) for output in outputs[1:])
    with draws(0, 0):
        assert torch.equal(adapter(layer, x), outputs[0])


@pytest.mark.parametrize("setting", ["dropout", "rank_dropout", "module_dropout"])
@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("lokr-full", "full")])  # without a rank
def test_each_kind_of_dropout_acts_by_itself(method, setting):
    layer, adapter, x = trained_case(method, "linear", **{setting: 0.4})
    plain, changed = adapter(layer, x), False
    for index in range(16):
        with draws(0, index):
            changed |= not torch.equal(adapter(layer, x), plain)
    assert changed


@pytest.mark.parametrize("method", METHODS)
def test_training_in_two_parts_equals_training_at_once(method):
    denoiser = TinyDenoiser()
    config = train_config(adapter_config(method))
    start = fresh_state(denoiser, config)
    whole = train(denoiser, TinyDataset(), config, start, steps=4)
    half = train(denoiser, TinyDataset(), config, start, steps=2)
    rest = train(denoiser, TinyDataset(), config, half, steps=2)
    assert rest.losses == whole.losses
    assert all(torch.equal(rest.weights[name], whole.weights[name]) for name in whole.weights)
    moved = [name for name in whole.weights if not torch.equal(whole.weights[name], start.weights[name])]
    assert {name for name in whole.weights if name not in moved} == {
        name for name in whole.weights if name.endswith(("down0", "up0"))
    }


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_as_large_as_the_weight_is_kept_for_the_backward_pass(method, kind):
    layer, adapter, x = trained_case(method, kind)
    own = {parameter.data_ptr() for parameter in adapter.parameters()}
    limit = max(layer.spec.numel, 1 + adapter.product().numel() if method == "boft" else 0)  # its matrices
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        adapter(layer, x[:1])
    assert all(tensor.numel() < limit for tensor in kept if tensor.data_ptr() not in own)


def test_an_adapted_embedding_answers_in_the_format_it_is_asked_for():
    layer, adapter, x = trained_case("lora", "embedding")
    with torch.no_grad(), attach({layer.name: layer}, {layer.name: adapter}):
        assert torch.equal(layer.module(x, out_dtype=torch.float64), layer.module(x).double())


def test_base_weights_are_read_and_never_written():
    for method in METHODS:
        layer, adapter, x = trained_case(method, "linear")
        before = base_weight(layer)
        adapter(layer, x).sum().backward()
        assert torch.equal(before, base_weight(layer))
