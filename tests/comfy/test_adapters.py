"""ComfyUI's stock loader renders what was trained: every method on every kind of layer, and on ComfyUI's own
modules."""

from __future__ import annotations

import dataclasses

import comfy.clip_model
import comfy.lora
import comfy.model_patcher
import comfy.ops
import pytest
import torch
from comfy.ldm.ace.attention import GLUMBConv
from comfy.ldm.modules.diffusionmodules.model import Encoder
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from safetensors.torch import save_file
from torch import nn

from graft.tests.support import dynamic_vram
from graft.tests.support.adapter_cases import LAYERS, METHODS, adapter_config, base_weight, trained_case
from graft.tests.support.tiny import FAMILY
from graft.training.adapters.build import attach, build_adapters, initialize, named_parameters
from graft.training.adapters.oft import OFT
from graft.training.comfy.model import weights
from graft.training.files.lora.read import LoraLayer, read_lora
from graft.training.files.lora.write import lora_key, lora_tensors
from graft.training.memory.weight_store import Store
from graft.training.state import TrainState
from graft.training.tools.merge import merge_weight

FACTORY = {"device": torch.device("cpu"), "dtype": torch.float32, "operations": comfy.ops.manual_cast}
CPU = torch.device("cpu")
NATIVE = dataclasses.replace(FAMILY, key_prefix="")


def stock(tensors, keys, caplog):
    """Load through ComfyUI's own loader; nothing in the file may be left over."""
    caplog.clear()
    patches = comfy.lora.load_lora(dict(tensors), keys)
    assert not caplog.records, caplog.text
    return patches


def patched(patches, key, weight, strength=1.0):
    return comfy.lora.calculate_weight([(strength, patches[key], 1.0, None, None)], weight.clone(), key)


@pytest.mark.feature(11, 30, 32, 42)
@pytest.mark.parametrize("prefix", ["lora_unet_", ""])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_the_stock_loader_gives_the_difference_that_was_trained(method, kind, prefix, caplog):
    layer, adapter, _ = trained_case(method, kind)
    family = dataclasses.replace(FAMILY, key_prefix=prefix)
    state = TrainState(1, adapter_config(method), "", named_parameters({"net.layer": adapter}))
    tensors = {name: tensor.detach() for name, tensor in lora_tensors(state, family).items()}
    base, key = base_weight(layer), "diffusion_model.net.layer.weight"
    patches = stock(tensors, {lora_key("net.layer", family): key}, caplog)
    delta = adapter.delta(base).detach()
    for strength in (1.0, 0.5):
        found = patched(patches, key, base, strength) - base
        expected = strength * delta
        if isinstance(adapter, OFT) and strength != 1:  # which ComfyUI applies in its own way, as we merge
            expected = adapter.change(dict(adapter.named_parameters()), base, strength).detach()
        assert (found - expected).norm() <= 1e-5 * delta.norm()


def saved_case(method, kind):
    """A trained adapter beside its layer, and the tensors of its file."""
    layer, adapter, _ = trained_case(method, kind)
    state = TrainState(1, adapter_config(method), "", named_parameters({"net.layer": adapter}))
    return layer, adapter, {n: t.detach() for n, t in lora_tensors(state, NATIVE).items()}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_weight_merged_by_graft_is_the_one_that_the_stock_loader_patches(method, kind, tmp_path, caplog):
    layer, adapter, tensors = saved_case(method, kind)
    save_file(tensors, tmp_path / "lora.safetensors")
    file = read_lora(tmp_path / "lora.safetensors")
    whole = [LoraLayer(name, tensors) for name, tensors in file.whole.items()]
    [read] = [*file.layers.values(), *whole]
    base, key = base_weight(layer), "diffusion_model.net.layer.weight"
    patches = stock(tensors, {"diffusion_model.net.layer": key}, caplog)
    delta = adapter.delta(base).detach().norm()
    for strength in (1.0, -0.5):
        ours, theirs = merge_weight(base, read, strength), patched(patches, key, base, strength)
        assert (ours - theirs).norm() <= 1e-5 * delta
    assert (merge_weight(base, read) - base - adapter.delta(base)).norm() <= 1e-5 * delta


SMALLEST_STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float8_e4m3fn: 2**-3}
"""Largest relative error of a number in each format: half a step, and a whole one in fp8, which ComfyUI
rounds stochastically."""


@pytest.mark.parametrize("dtype", SMALLEST_STEP)
@pytest.mark.parametrize("method", METHODS)
def test_a_base_of_few_bits_loses_its_rounding_and_no_more(method, dtype, caplog):
    _, adapter, tensors = saved_case(method, "linear")
    module = nn.ModuleDict({"layer": nn.Linear(16, 24, bias=False)}).requires_grad_(False)
    module["layer"].weight.data = module["layer"].weight.data.to(dtype)
    base = module["layer"].weight.float()
    exact = base + adapter.delta(base).detach()
    patcher = comfy.model_patcher.ModelPatcher(module, CPU, CPU)
    patcher.add_patches(stock(tensors, {"diffusion_model.net.layer": "layer.weight"}, caplog))
    patcher.patch_model(CPU)
    found = module["layer"].weight
    assert found.dtype == dtype
    assert ((found.float() - exact).abs() <= SMALLEST_STEP[dtype] * exact.abs() + 2e-3).all()


@dynamic_vram.off()
def unet():
    return UNetModel(
        image_size=8,
        in_channels=4,
        model_channels=32,
        out_channels=4,
        num_res_blocks=[1, 1],
        channel_mult=(1, 2),
        transformer_depth=[0, 1],
        transformer_depth_output=[0, 0, 1, 1],
        transformer_depth_middle=1,
        num_heads=4,
        use_spatial_transformer=True,
        context_dim=16,
        use_linear_in_transformer=True,
        **FACTORY,
    )


def vae():
    return Encoder(
        ch=32,
        out_ch=3,
        ch_mult=(1, 2),
        num_res_blocks=1,
        attn_resolutions=[],
        in_channels=3,
        resolution=16,
        z_channels=4,
    )


MODULES = {
    "unet": (unet, lambda m: m(torch.ones(2, 4, 8, 8), torch.tensor([3.0, 500.0]), torch.ones(2, 5, 16))),
    "vae": (vae, lambda m: m(torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16))),
    "audio": (
        lambda: GLUMBConv(8, 16, use_bias=True, **FACTORY),
        lambda m: m(torch.linspace(-1, 1, 48).reshape(1, 6, 8)),
    ),
    "clip": (
        dynamic_vram.off()(lambda: comfy.clip_model.CLIPEmbeddings(32, **FACTORY)),
        lambda m: m(torch.tensor([[49406, 7, 7, *[49407] * 74]])),
    ),
}
"""ComfyUI's own classes: linear and conv2d, conv2d with strides, conv1d with groups, token embedding."""


@pytest.mark.feature(11, 12, 13, 14, 28)
@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("lora-rs", "lora-gaussian")])
@pytest.mark.parametrize("name", MODULES)
def test_comfyui_modules_compute_the_same_attached_and_patched_by_the_stock_loader(name, method, caplog):
    if (name, method) == ("clip", "boft"):
        pytest.skip("49,408 = 2^8 * 193 outputs: their smallest blocks are of 386")
    make, compute = MODULES[name]
    torch.manual_seed(0)
    network = make()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    patcher = comfy.model_patcher.ModelPatcher(nn.ModuleDict({"net": network}), CPU, CPU)
    specs = {path: s for path, s in weights.layer_specs(network).items() if "position" not in path}
    config = adapter_config(method)
    adapters = build_adapters(specs, config)
    plain = compute(network)
    with weights.hold_weights(patcher, network, "net", Store("resident", (), torch.float32, CPU)) as base:
        initialize(adapters, 0, base.layers)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in (p for p in named_parameters(adapters).values() if p.requires_grad):
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        with attach(base.layers, adapters):
            attached = compute(network)
            attached.square().sum().backward()
    without = [n for n, p in named_parameters(adapters).items() if p.requires_grad and not p.grad.abs().sum()]
    assert not without

    family = dataclasses.replace(FAMILY, key_prefix="lora_unet_")
    state = TrainState(1, config, "", {n: p.detach() for n, p in named_parameters(adapters).items()})
    keys = {lora_key(path, family): f"{path}.weight" for path in specs}
    patches = stock(lora_tensors(state, family), keys, caplog)
    with torch.no_grad():
        for key, weight in network.state_dict().items():
            if key in patches:
                weight.copy_(patched(patches, key, weight))
        rendered = compute(network)
    assert (rendered - attached).norm() <= 1e-4 * (attached - plain).norm()


@pytest.mark.feature(15)
def test_every_kind_of_layer_is_found_in_comfyuis_modules():
    kinds = {
        name: {spec.kind for spec in weights.layer_specs(make()).values()}
        for name, (make, _) in MODULES.items()
    }
    assert kinds == {
        "unet": {"linear", "conv2d"},
        "vae": {"conv2d"},
        "audio": {"conv1d"},
        "clip": {"embedding"},
    }
