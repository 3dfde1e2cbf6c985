"""The same factors give the same difference as in LyCORIS and PEFT, and the right gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch
from lycoris.functional import boft, diag_oft, factorization, power2factorization
from lycoris.functional import loha as lycoris_loha
from lycoris.functional import lokr as lycoris_lokr
from lycoris.modules.glora import _glora_weight
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from graft.training.adapters.boft import BOFT
from graft.training.adapters.build import draws
from graft.training.adapters.glora import GLoRA
from graft.training.adapters.lokr import LoKr, factorize
from graft.training.adapters.oft import OFT
from graft.training.config import AdapterConfig
from graft.training.files.lora.write import layer_tensors
from graft.training.frozen_base.frozen_layer import LayerSpec

from ..support.adapter_cases import LAYERS, METHODS, base_weight, case, merged_output, trained_case

KINDS = [kind for kind in LAYERS if kind != "embedding"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [m for m in METHODS if m.startswith("loha")])
def test_loha_equals_lycoris(method, kind):
    _, adapter, _ = trained_case(method, kind)
    w = dict(adapter.named_parameters())
    t1, t2 = w.get("t1"), w.get("t2")
    factors = (w["w1_b"], w["w1_a"], w["w2_b"], w["w2_a"], t1, t2)
    theirs = lycoris_loha.diff_weight(*factors, gamma=torch.tensor(adapter.scale), backend="torch")
    assert torch.allclose(adapter.delta(), theirs.reshape(adapter.spec.shape), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [m for m in METHODS if m.startswith("lokr")])
def test_lokr_equals_lycoris(method, kind):
    _, adapter, _ = trained_case(method, kind)
    w = dict(adapter.named_parameters())
    names = ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")
    theirs = lycoris_lokr.kron_weight(*(w.get(name) for name in names), scale=adapter.scale, backend="torch")
    assert torch.allclose(adapter.delta(), theirs.reshape(adapter.spec.shape), atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d", "conv2d-1x1"])
@pytest.mark.parametrize("method", ["oft", "boft", "glora"])
def test_a_method_that_multiplies_the_base_equals_lycoris(method, kind):
    layer, adapter, _ = trained_case(method, kind)
    weight, (first, *factors) = base_weight(layer), adapter.parameters()
    if method == "oft":
        theirs = diag_oft.diff_weight(weight, first, None, constraint=0, backend="torch")
    elif method == "boft":
        theirs = boft.diff_weight(weight, first, None, constraint=0, backend="torch")
    else:
        theirs = _glora_weight(weight, first, *factors, None, adapter.scale)
    assert torch.allclose(adapter.delta(weight), theirs, atol=1e-5)


@pytest.mark.parametrize("outputs", [6, 24, 40, 96, 320, 640, 768, 1152, 1280, 1536, 2432, 3072])
@pytest.mark.parametrize("rank", [6, 16, 40])
def test_outputs_are_divided_into_the_blocks_of_lycoris(outputs, rank):
    size, number = factorization(outputs, rank)
    if size == 1:  # of one output, which cannot be turned
        size, number = number, size
    assert OFT.block_shape(outputs, rank) == (number, size, size)
    size, number = power2factorization(outputs, rank)
    if not number:
        with pytest.raises(
            ValueError, match=f"boft of rank {rank} cannot divide a layer with {outputs} outputs"
        ):
            BOFT.block_shape(outputs, rank)
    else:
        assert BOFT.block_shape(outputs, rank) == (int(math.log2(number)) + 1, number, size, size)


def test_a_layer_that_no_blocks_divide_is_refused():
    for method, outputs in ((OFT, 7), (OFT, 1), (BOFT, 7), (BOFT, 1)):
        with pytest.raises(ValueError, match="exclude that layer, or use LoRA for it"):
            method.block_shape(outputs, 4)


def test_orthogonal_methods_keep_the_angles_between_the_columns_of_the_weight():
    for method in ("oft", "boft"):
        layer, adapter, _ = trained_case(method, "linear")
        weight = base_weight(layer)
        moved = weight + adapter.delta(weight)
        assert torch.allclose(moved.T @ moved, weight.T @ weight, atol=1e-5)
        assert not torch.allclose(moved, weight, atol=0.1)


def test_glora_of_a_rank_that_comfyui_takes_for_an_older_layout_is_refused():
    with pytest.raises(ValueError, match="glora of rank 4 cannot be saved for a layer with 4 inputs"):
        GLoRA(LayerSpec("linear", (4, 4)), AdapterConfig(algorithm="glora", rank=4))


def test_a_tucker_core_of_lycoris_is_read_and_not_trained():
    w1, w2_a, w2_b, t2 = torch.randn(4, 4), torch.randn(2, 6), torch.randn(2, 5), torch.randn(2, 2, 3, 3)
    theirs = lycoris_lokr.kron_weight(w1, None, None, None, w2_a, w2_b, t2, backend="torch")
    ours = LoKr.compose({"w1": w1, "w2_a": w2_a, "w2_b": w2_b, "t2": t2})
    assert torch.allclose(ours.reshape(theirs.shape), theirs, atol=1e-5)
    with pytest.raises(ValueError, match="tucker is for LoRA and LoHa"):
        case("lokr", "conv2d", tucker=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["loha", "loha-tucker", "lokr", "lokr-factor", "lokr-both", "lokr-full"])
def test_a_lycoris_module_has_parameters_of_our_names_and_shapes(method, kind):
    from lycoris.modules.loha import LohaModule
    from lycoris.modules.lokr import LokrModule

    if method in ("lokr-full", "loha-tucker") and kind.startswith("conv1d"):
        pytest.skip(
            "ComfyUI misreads what LyCORIS writes here: a whole w2, or a Tucker core, in three dimensions"
        )
    layer, adapter, _ = case(method, kind)
    config = adapter.config
    options = {"lora_dim": config.rank, "alpha": config.alpha, "use_tucker": config.tucker}
    if method.startswith("lokr"):
        options |= {"factor": config.factor, "decompose_both": config.decompose_both}
        options |= {"full_matrix": config.full_matrix}
    module = (LohaModule if method.startswith("loha") else LokrModule)("net_layer", layer.module, **options)
    theirs = {name: p.shape for name, p in module.named_parameters() if name.startswith(("hada", "lokr"))}
    assert theirs == {adapter.suffixes[name]: p.shape for name, p in adapter.named_parameters()}


@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (6, 1024), (1024, 6)])
def test_lokr_keeps_a_factor_whole_where_lycoris_does(shape, rank):
    from lycoris.modules.lokr import LokrModule

    out, inputs = shape
    settings = {"factor": -1, "decompose_both": True}
    adapter = LoKr(LayerSpec("linear", shape), AdapterConfig(algorithm="lokr", rank=rank, **settings))
    module = LokrModule("net_layer", torch.nn.Linear(inputs, out), lora_dim=rank, **settings)
    theirs = {name: p.shape for name, p in module.named_parameters() if name.startswith("lokr")}
    assert theirs == {adapter.suffixes[name]: p.shape for name, p in adapter.named_parameters()}


def test_the_factors_of_a_size_are_those_of_lycoris():
    for size in (1, 2, 7, 12, 127, 128, 250, 360, 512, 640, 1024, 1280, 3072):
        for factor in (-1, 2, 3, 4, 8, 16, 32):
            assert factorize(size, factor) == factorization(size, factor), (size, factor)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d", "conv2d-1x1"])
def test_lora_equals_peft(kind, rslora):
    layer, adapter, x = trained_case("lora", kind, rslora=rslora)
    model = nn.ModuleDict({"layer": layer.module})
    config = LoraConfig(r=3, lora_alpha=1.5, target_modules=["layer"], use_rslora=rslora)
    peft = inject_adapter_in_model(config, model)["layer"]
    with torch.no_grad():
        peft.lora_A["default"].weight.copy_(adapter.down)
        peft.lora_B["default"].weight.copy_(adapter.up.reshape(peft.lora_B["default"].weight.shape))
        assert torch.allclose(adapter.delta(), peft.get_delta_weight("default"), atol=1e-6)
        if kind != "conv2d":  # PEFT's convolution leaves the dilation out of its down projection
            assert torch.allclose(adapter(layer, x), peft(x), atol=1e-5)


def test_embedding_lora_equals_peft():
    layer, adapter, ids = trained_case("lora", "embedding")
    model = nn.ModuleDict({"layer": layer.module})
    peft = inject_adapter_in_model(LoraConfig(r=3, lora_alpha=1.5, target_modules=["layer"]), model)["layer"]
    with torch.no_grad():
        peft.lora_embedding_A["default"].copy_(adapter.up.T)
        peft.lora_embedding_B["default"].copy_(adapter.down.T)
        assert torch.allclose(adapter(layer, ids), peft(ids), atol=1e-6)


def test_pissa_starts_where_peft_does():
    layer, adapter, _ = case("pissa", "linear")
    model = nn.ModuleDict({"layer": nn.Linear(16, 24)})
    model["layer"].load_state_dict(layer.module.state_dict())
    config = LoraConfig(r=3, lora_alpha=1.5, target_modules=["layer"], init_lora_weights="pissa")
    peft = inject_adapter_in_model(config, model)["layer"]
    start = adapter.scale * adapter.up @ adapter.down
    assert torch.allclose(start, peft.get_delta_weight("default"), atol=1e-6)
    assert torch.allclose(base_weight(layer) - start, peft.base_layer.weight, atol=1e-6)


def test_the_subspace_iteration_leaves_no_more_than_the_best_approximation():
    from graft.training.adapters.pissa import principal

    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(300, 300, generator=generator))[0] for _ in range(2))
    s = torch.arange(1, 301) ** -0.5
    matrix = u @ torch.diag(s) @ v
    left, values, right = principal(matrix, 8, generator)
    assert torch.allclose(values, s[:8], rtol=1e-3)
    assert (matrix - left @ torch.diag(values) @ right).norm() < 1.0001 * s[8:].norm()


def test_dora_keeps_the_lengths_of_the_columns_apart_from_their_directions():
    layer, adapter, _ = trained_case("dora", "linear")
    merged = base_weight(layer) + adapter.delta(base_weight(layer))
    assert torch.allclose(merged.norm(dim=0), adapter.magnitude.abs().flatten(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_equal_finite_differences(method, kind):
    layer, adapter, x = trained_case(method, kind, dropout=0.2, rank_dropout=0.3)
    layer.module.double(), adapter.double()
    parameters = [p for name, p in adapter.named_parameters() if p.requires_grad]
    if (
        method == "dora"
    ):  # its norm is a constant in the backward pass, as in the paper: the length alone is exact
        parameters = [adapter.magnitude]
    x = x.double().requires_grad_() if x.is_floating_point() else x

    def output(*_):
        with draws(0, 0):
            return adapter(layer, x).sin().sum()

    with draws(0, 0):
        inputs = (*parameters, x) if x.is_floating_point() else tuple(parameters)
        assert torch.autograd.gradcheck(output, inputs, fast_mode=True)


def test_dora_with_a_constant_norm_has_the_gradients_of_its_formula():
    layer, adapter, x = trained_case("dora", "linear")
    ours = torch.autograd.grad(adapter(layer, x).sin().sum(), [adapter.down, adapter.up])
    theirs = torch.autograd.grad(merged_output(layer, adapter, x).sin().sum(), [adapter.down, adapter.up])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs))


def test_rslora_is_folded_into_the_stored_alpha():
    _, adapter, _ = case("lora-rs", "linear")
    weights = {name: p.detach() for name, p in adapter.named_parameters()}
    stored = float(layer_tensors(weights, adapter.config)["alpha"])
    assert stored / 3 == pytest.approx(1.5 / math.sqrt(3)) == adapter.scale
