"""Owning the base weights of ComfyUI's own classes, wherever they are kept meanwhile."""

from __future__ import annotations

import comfy.lora
import pytest
import torch

from graft.tests.support.memory import step_gradients
from graft.tests.support.tiny_models import TINY
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig, TrainConfig
from graft.training.memory.weight_store import STORES, UNPLACED

CONFIG = TrainConfig(adapter=AdapterConfig(rank=4))
ERRORS = {"stream": 0.0, "resident": 0.0, "offload": 0.0, "fp8": 0.03, "int8": 0.012, "nf4": 0.10}
"""As stated in memory/quantize.py."""


class Kept(ComfyDenoiser):
    """Holds its weights in one store, whatever it is asked for."""

    store, compute = "resident", "full"

    def hold(self, dtype, *_):
        return super().hold(dtype, self.store, compute=self.compute)


def gradients(patcher, store, name):
    denoiser = Kept(patcher)
    denoiser.store = store
    value, found = step_gradients(denoiser, TINY[name].batch(), CONFIG)
    return value, torch.cat([gradient.flatten() for gradient in found.values() if gradient is not None])


@pytest.mark.feature(10, 86)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", ["sd3", "sdxl", "flux", "zimage"])
def test_every_layer_is_within_the_stated_error_of_the_base(name, store):
    denoiser = ComfyDenoiser(TINY[name]())
    exact = {path: denoiser.network.get_submodule(path).weight.clone() for path in denoiser.specs}
    with denoiser.hold(torch.float32, store) as base:
        for path, layer in base.layers.items():
            found = layer.weight(torch.float32, torch.device("cpu"))
            assert (found - exact[path]).norm() <= ERRORS[store] * exact[path].norm(), path


@pytest.mark.feature(87)
@pytest.mark.parametrize("store", ["resident", "offload", "stream"])
@pytest.mark.parametrize("name", ["sd3", "sdxl", "flux", "zimage"])
def test_gradients_are_bit_equal_where_weights_are_only_moved(name, store):
    patcher = TINY[name]()
    exact, found = gradients(patcher, "resident", name), gradients(patcher, store, name)
    assert exact[0] == found[0] and torch.equal(exact[1], found[1])


@pytest.mark.feature(10)
@pytest.mark.parametrize("store", STORES)
def test_the_base_is_byte_identical_afterwards(store):
    patcher = TINY["sd3"]()
    network = patcher.model.diffusion_model
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in network.state_dict().items()}
    gradients(patcher, store, "sd3")
    for name, tensor in network.state_dict().items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1])


@pytest.mark.parametrize("store", STORES)
def test_patches_on_the_model_count_wherever_the_weights_are_kept(store):
    patcher = TINY["sd3"]().clone()
    weights, layer = patcher.model.state_dict(), "joint_blocks.0.x_block.attn.qkv.weight"
    key = next(key for key in weights if key.endswith(layer))
    plain = gradients(patcher, store, "sd3")[0]
    patcher.add_patches({key: ("diff", (torch.ones_like(weights[key]),))}, 0.5)
    assert gradients(patcher, store, "sd3")[0] != plain


def test_a_forecast_computes_no_patches_and_who_reads_a_weight_gets_it_patched(monkeypatch):
    patcher = TINY["sd3"]().clone()
    layer = "joint_blocks.0.x_block.attn.qkv"
    whole = patcher.model.diffusion_model.get_submodule(layer).weight
    patcher.add_patches({f"diffusion_model.{layer}.weight": ("diff", (torch.ones_like(whole),))}, 0.5)
    calls, compute = [], comfy.lora.calculate_weight
    monkeypatch.setattr(comfy.lora, "calculate_weight", lambda *args: calls.append(args) or compute(*args))
    with ComfyDenoiser(patcher).hold(torch.float32, UNPLACED) as base:
        assert not calls
        assert torch.equal(base.layers[layer].weight(torch.float32, whole.device), whole + 0.5)


@pytest.mark.parametrize("store", STORES)
def test_weights_that_comfyui_keeps_in_fp8_are_trained_on_as_they_are(store):
    """A mixed-precision checkpoint's weights are tensors of a class of ComfyUI's own."""
    layouts = pytest.importorskip("comfy.quant_ops")
    plain, quantized = TINY["flux"](), TINY["flux"]()
    specs = ComfyDenoiser(plain).specs
    found = [path for path, spec in specs.items() if spec.kind == "linear" and "blocks" in path]
    for path in found:
        ours, theirs = (p.model.diffusion_model.get_submodule(path) for p in (plain, quantized))
        small = layouts.QuantizedTensor.from_float(ours.weight.detach(), "TensorCoreFP8Layout")
        ours.weight.data = small.dequantize().to(ours.weight.dtype)
        theirs.weight = torch.nn.Parameter(small, requires_grad=False)
    in_file = ComfyDenoiser(quantized).specs
    assert all(in_file[path].quantized_bytes == specs[path].numel + 4 for path in found)
    if store in ("resident", "offload", "stream", "fp8", "int8"):  # nf4 rounds again
        exact, same = gradients(plain, "resident", "flux"), gradients(quantized, store, "flux")
        assert exact[0] == same[0] and torch.equal(exact[1], same[1])
    patched = quantized.clone()
    patched.patches = {f"diffusion_model.{found[0]}.weight": []}
    assert ComfyDenoiser(patched).specs[found[0]].quantized_bytes is None


def quantized_flux(layout, **options):
    """Return a tiny Flux, one whose blocks ComfyUI has quantized, and the paths of their layers."""
    layouts = pytest.importorskip("comfy.quant_ops")
    plain, quantized = TINY["flux"](), TINY["flux"]()
    specs = ComfyDenoiser(plain).specs
    found = [path for path, spec in specs.items() if spec.kind == "linear" and "blocks" in path]
    for path in found:
        ours, theirs = (p.model.diffusion_model.get_submodule(path) for p in (plain, quantized))
        try:
            small = layouts.QuantizedTensor.from_float(ours.weight.detach(), layout, **options)
        except KeyError:
            pytest.skip(f"this ComfyUI has no {layout}")
        ours.weight.data = small.dequantize().to(ours.weight.dtype)
        theirs.weight = torch.nn.Parameter(small, requires_grad=False)
    return plain, quantized, found


LAYOUTS = {
    "fp8": ("TensorCoreFP8Layout", {}, 0.1),
    "int8": ("TensorWiseINT8Layout", {}, 0.02),
    "convrot": (
        "TensorWiseINT8Layout",
        {"per_channel": True, "convrot": True, "convrot_groupsize": 64},
        0.02,
    ),
    "mxfp8": ("TensorCoreMXFP8Layout", {}, 0.1),
    "nvfp4": ("TensorCoreNVFP4Layout", {}, 0.25),
}
"""Name -> layout of a file, its options, and the error of gradients when it is multiplied as it is."""


@pytest.mark.feature(150)
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_of_quantized_files_are_multiplied_as_they_are(name):
    layout, options, error = LAYOUTS[name]
    plain, quantized, found = quantized_flux(layout, **options)
    held = Kept(quantized)
    held.compute = "file"
    specs = held.specs
    assert {specs[path].format for path in found} == {"int8" if name == "convrot" else name}
    before = [part.clone() for path in found for part in parts_of(quantized, path)]
    with held.hold(torch.float32) as base:
        multiplied = {path for path, layer in base.layers.items() if layer.products}
    assert multiplied == {p for p in found if not any(side % 16 for side in specs[p].shape)} != set()
    batch = TINY["flux"].batch()
    exact, same = step_gradients(ComfyDenoiser(plain), batch, CONFIG), step_gradients(held, batch, CONFIG)
    assert same[0] == pytest.approx(exact[0], rel=error)
    whole, small = (
        torch.cat([g.flatten() for g in each[1].values() if g is not None]) for each in (exact, same)
    )
    assert (whole - small).norm() <= error * whole.norm() and not torch.equal(whole, small)
    after = [part for path in found for part in parts_of(quantized, path)]
    assert all(
        torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))
        for one, two in zip(before, after)
    )


def parts_of(patcher, path):
    weight = patcher.model.diffusion_model.get_submodule(path).weight
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


def test_a_quantized_file_without_its_scales_is_refused_by_name():
    _, quantized, found = quantized_flux("TensorCoreFP8Layout")
    weight = quantized.model.diffusion_model.get_submodule(found[0]).weight
    if not hasattr(weight, "_params"):
        pytest.skip("older versions fill them in")
    object.__setattr__(weight._params, "scale", None)
    with pytest.raises(
        ValueError, match=f"^{found[0]}: the file has quantized this weight but lacks its scale"
    ):
        _ = ComfyDenoiser(quantized).specs


class Loaded(torch.Tensor):
    """A weight as ComfyUI-GGUF keeps it: quantized bytes that say the shape of what they stand for."""

    tensor_shape = None

    @property
    def shape(self):
        return self.tensor_shape or self.size()

    def detach(self):
        return self


def as_gguf(weight, kind):
    """Pack a weight by ggml's own writer."""
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    quantized = torch.from_numpy(quants.quantize(weight.float().numpy(), GGMLQuantizationType[kind]))
    loaded = quantized.as_subclass(Loaded)
    loaded.tensor_type, loaded.tensor_shape = GGMLQuantizationType[kind], weight.shape
    whole = torch.from_numpy(quants.dequantize(quantized.numpy(), GGMLQuantizationType[kind]))
    return loaded, whole


@pytest.mark.feature(86, 108)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_base_from_a_gguf_file_is_trained_on_as_it_is(kind):
    plain, quantized = TINY["flux"](), TINY["flux"]()
    found = {}
    for path, spec in ComfyDenoiser(plain).specs.items():
        if spec.kind != "linear" or spec.shape[1] % 32:
            continue
        module = quantized.model.diffusion_model.get_submodule(path)
        loaded, whole = as_gguf(module.weight.detach(), kind)
        module._parameters["weight"] = loaded
        plain.model.diffusion_model.get_submodule(path).weight.data = whole
        found[path] = loaded
    exact, same = gradients(plain, "resident", "flux"), gradients(quantized, "resident", "flux")
    assert found and exact[0] == pytest.approx(same[0], rel=1e-5)
    assert (exact[1] - same[1]).norm() <= 1e-5 * exact[1].norm()
    for path, loaded in found.items():
        assert quantized.model.diffusion_model.get_submodule(path)._parameters["weight"] is loaded
