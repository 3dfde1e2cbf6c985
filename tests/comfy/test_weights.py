"""Owning the base weights of ComfyUI's own classes, wherever they are kept meanwhile."""

from __future__ import annotations

import pytest
import torch

from graft.tests.comfy.tiny_models import TINY
from graft.tests.memory.helpers import step_gradients
from graft.training.comfy.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig, TrainConfig
from graft.training.memory.store import STORES

CONFIG = TrainConfig(adapter=AdapterConfig(rank=4))
ERRORS = {"resident": 0.0, "offload": 0.0, "fp8": 0.03, "int8": 0.012, "nf4": 0.10}
"""As stated in memory/quantize.py."""


class Kept(ComfyDenoiser):
    """Holds its weights in one store, whatever it is asked for."""

    store = "resident"

    def hold(self, dtype):
        return super().hold(dtype, self.store)


def gradients(patcher, store, name):
    denoiser = Kept(patcher)
    denoiser.store = store
    value, found = step_gradients(denoiser, TINY[name].batch(), CONFIG)
    return value, torch.cat([gradient.flatten() for gradient in found.values() if gradient is not None])


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", ["sd3", "sdxl", "flux", "zimage"])
def test_every_layer_is_within_the_stated_error_of_the_base(name, store):
    denoiser = ComfyDenoiser(TINY[name]())
    exact = {path: denoiser.network.get_submodule(path).weight.clone() for path in denoiser.specs}
    with denoiser.hold(torch.float32, store) as base:
        for path, layer in base.layers.items():
            found = layer.weight(torch.float32, torch.device("cpu"))
            assert (found - exact[path]).norm() <= ERRORS[store] * exact[path].norm(), path


@pytest.mark.parametrize("store", ["resident", "offload"])
@pytest.mark.parametrize("name", ["sd3", "sdxl", "flux", "zimage"])
def test_gradients_are_bit_equal_where_weights_are_only_moved(name, store):
    patcher = TINY[name]()
    exact, found = gradients(patcher, "resident", name), gradients(patcher, store, name)
    assert exact[0] == found[0] and torch.equal(exact[1], found[1])


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
