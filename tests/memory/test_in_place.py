"""A network that changes in place what its backward pass needs trains as one that does not, in every mode.

One that autograd cannot follow is refused by name.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graft.tests.support.memory import config, same, step_gradients, trained
from graft.tests.support.tiny import Block, TinyDataset, TinyDenoiser
from graft.training.memory.activation_checkpointing import MODES, checkpoint_blocks
from graft.training.memory.in_place import is_changed_in_place
from graft.training.memory.plan import candidates, make_estimator
from graft.training.memory.plan_table import probe

BATCH = TinyDataset().batch(2, seed=0, index=0)


class Adding(Block):
    """Adds to its input, which its norm, its activation and its adapters have kept."""

    def forward(self, x):
        x += self.attention(x)
        x += self.mlp(F.silu(x))
        return x.add_(self.conv1d(x.transpose(1, 2)).transpose(1, 2))


class Rounding(Block):
    """Has an operation without a backward pass."""

    def forward(self, x):
        return super().forward(NoBackward.apply(x))


class Tiling(Block):
    """Computes in tiles of another size each time."""

    tiles = 1

    def forward(self, x):
        Tiling.tiles = 3 - Tiling.tiles
        return torch.cat([super(Tiling, self).forward(part) for part in x.chunk(Tiling.tiles)])


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("Trying to backward through tiny.round but no autograd formula was registered.")


def denoiser_of(kind):
    """A tiny denoiser with other blocks of the same weights."""
    denoiser = TinyDenoiser()
    for block in denoiser.module.blocks:
        block.__class__ = kind
    return denoiser


@pytest.mark.parametrize("mode", MODES)
def test_a_network_that_computes_in_place_trains_as_one_that_does_not(mode):
    assert same(trained({"checkpointing": mode}, denoiser_of(Adding)), trained({}))


@pytest.mark.parametrize("mode", MODES)
def test_without_copies_a_change_is_an_error_in_every_mode(mode):
    """torch's checkpoint alone hands on what the second pass kept as it is by then, and says nothing."""
    with pytest.raises(RuntimeError) as error:
        step_gradients(denoiser_of(Adding), BATCH, config(), mode)
    assert is_changed_in_place(error.value)


@pytest.mark.parametrize("mode", MODES)
def test_inputs_that_come_together_are_copied_too(mode):
    """As those of blocks of sound and video, which take both at once."""

    class Both(nn.Module):
        def forward(self, streams, scale):
            one, other = streams
            one += scale * other.square()
            other.mul_(one.exp())
            return one, other

    network = nn.ModuleDict({"blocks": nn.ModuleList([Both()])})
    leaves = [torch.full((2,), 0.5, requires_grad=True), torch.full((2,), 0.25, requires_grad=True)]
    one, other = leaves
    expected = torch.autograd.grad((other * (one + 3 * other.square()).exp()).sum(), leaves)
    with checkpoint_blocks(network, ("blocks.*",), mode, copies=True):
        found = torch.autograd.grad(network["blocks"][0]((one * 1, other * 1), 3.0)[1].sum(), leaves)
    for gradient, value in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, value)


@pytest.mark.parametrize("mode", MODES)
def test_a_network_that_autograd_cannot_follow_is_refused_by_name(mode):
    with pytest.raises(ValueError, match=r"tiny cannot be trained: .*tiny.round.* Update ComfyUI"):
        trained({"checkpointing": mode}, denoiser_of(Rounding))


@pytest.mark.parametrize("mode", ["selective", "block", "block-offload"])
def test_a_network_that_computes_in_another_way_each_time_is_told_what_to_do(mode):
    with pytest.raises(ValueError, match=r"tiny computed .* HyperTile .* checkpointing .* to 'none'"):
        trained({"checkpointing": mode}, denoiser_of(Tiling))
    trained({"checkpointing": "none"}, denoiser_of(Tiling))


def test_measuring_its_memory_refuses_it_too():
    denoiser, settings = denoiser_of(Rounding), config()
    with pytest.raises(ValueError, match="tiny cannot be trained"):
        probe(denoiser, denoiser.specs, settings, BATCH, candidates(settings.memory))


def test_the_memory_of_copies_is_estimated():
    settings, peaks = config(), {}
    for kind in (Block, Adding):
        denoiser = denoiser_of(kind)
        estimate = make_estimator(denoiser, denoiser.specs, settings, BATCH)
        peaks[kind] = [estimate(plan).step.peak for plan in candidates(settings.memory)]
    assert all(copied > plain for copied, plain in zip(peaks[Adding], peaks[Block], strict=True))
