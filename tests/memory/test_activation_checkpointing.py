"""Every mode gives the same gradients to the bit, and keeps as much as it says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from graft.tests.support.adapter_cases import METHODS, adapter_config, frozen_layer, train_config
from graft.tests.support.memory import saved_bytes, step_gradients
from graft.tests.support.tiny import TinyDataset, TinyDenoiser
from graft.training.memory.activation_checkpointing import MODES, checkpoint_blocks, repeated_blocks

BATCH = TinyDataset().batch(2, seed=0, index=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_without_checkpointing(method, mode):
    config = train_config(adapter_config(method, dropout=0.1, rank_dropout=0.1))
    value, expected = step_gradients(TinyDenoiser(), BATCH, config)
    again, gradients = step_gradients(TinyDenoiser(), BATCH, config, mode)
    assert value == again
    assert all(g is None or torch.equal(gradients[name], g) for name, g in expected.items())


@pytest.mark.parametrize("mode", MODES)
def test_forwards_are_as_before_on_every_exit(mode):
    network = TinyDenoiser().module
    before = {name: dict(vars(module)) for name, module in network.named_modules()}
    with pytest.raises(KeyError), checkpoint_blocks(network, ("blocks.*",), mode):
        assert ("forward" in vars(network.blocks[0])) == (mode != "none")
        raise KeyError
    assert {name: dict(vars(module)) for name, module in network.named_modules()} == before


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_a_block_just_computes(mode):
    denoiser, x = TinyDenoiser(), torch.full((2,), 0.5)
    plain = denoiser.denoise(BATCH.latents, x, BATCH)
    with torch.no_grad(), checkpoint_blocks(denoiser.module, ("blocks.*",), mode):
        assert torch.equal(denoiser.denoise(BATCH.latents, x, BATCH), plain)


def test_an_unknown_mode_is_refused_by_name():
    with pytest.raises(ValueError, match="'blok' is unknown; choose one of auto, none, selective, block"):
        checkpoint_blocks(TinyDenoiser().module, ("blocks.*",), "blok").__enter__()


def test_blocks_are_found_by_segments_of_their_path():
    assert list(repeated_blocks(TinyDenoiser().module, ("blocks.*",))) == ["blocks.0", "blocks.1"]


def test_inputs_given_by_name_are_kept_as_others_are_so_that_they_can_wait_in_host_memory():
    class Block(nn.Module):
        def forward(self, img, vec=None):
            return img * vec

    network, saved = nn.ModuleList([Block()]), []
    img, vec = (torch.randn(4, requires_grad=True) * 1 for _ in range(2))
    with (
        checkpoint_blocks(network, ("0",), "block"),
        saved_tensors_hooks(lambda t: saved.append(t) or t, bool),
    ):
        network[0](vec=vec, img=img)
    assert {t.data_ptr() for t in saved} >= {img.data_ptr(), vec.data_ptr()}


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return operation(*args, **(kwargs or {}))


class Heads(nn.Module):
    """Attention with heads, as the models have it, and a product that is changed in place."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(F.layer_norm(x, (32,))).view(2, 6, 3, 2, 16).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 32)
        return x + F.silu(self.out(x).mul_(2))


def counts(mode):
    """Return what three blocks compute by name, how often weights are fetched, and the input's gradient."""
    torch.manual_seed(0)
    network = nn.ModuleDict({"blocks": nn.ModuleList(Heads() for _ in range(3))})
    fetched = {"qkv": 0, "out": 0}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            layer = frozen_layer(module)
            module.forward, layer.weight = layer.forward, counted(fetched, name.split(".")[-1], layer.weight)
    start = x = torch.randn(2, 6, 32, requires_grad=True)
    with Counting() as counting, checkpoint_blocks(network, ("blocks.*",), mode):
        for block in network["blocks"]:
            x = block(x)
        x.sum().backward()
    return counting.counts, fetched, start.grad


def counted(counts, name, fetch):
    def counting(dtype, device):
        counts[name] += 1
        return fetch(dtype, device)

    return counting


def test_selective_checkpointing_computes_no_attention_twice_and_a_block_does():
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert [counts(mode)[0][attention] for mode in ("none", "selective", "block")] == [3, 3, 6]


def test_what_selective_checkpointing_keeps_it_does_not_fetch_the_weight_of_again():
    fetched = [counts(mode)[1]["qkv"] for mode in ("none", "selective", "block")]
    assert fetched == [6, 6, 9]


def test_what_was_changed_in_place_is_computed_again():
    (_, fetched, gradient), (_, _, expected) = counts("selective"), counts("none")
    assert fetched["out"] == 9
    assert torch.equal(gradient, expected)


def test_a_block_keeps_its_input_only():
    network = nn.ModuleDict({"blocks": nn.ModuleList([Heads()])})
    x = torch.randn(2, 6, 32, requires_grad=True) * 1
    with checkpoint_blocks(network, ("blocks.*",), "block"):
        assert saved_bytes(lambda: network["blocks"][0](x))[0] == x.nbytes
