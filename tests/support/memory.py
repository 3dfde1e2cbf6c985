"""Measuring what a step keeps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.autograd.graph import saved_tensors_hooks

from graft.tests.support.adapter_cases import adapter_config, train_config
from graft.tests.support.tiny import TinyDataset, TinyDenoiser
from graft.training.adapters.build import attach, draws, restore_adapters
from graft.training.adapters.strength import at_strength
from graft.training.config import MemoryConfig
from graft.training.loop import initial_state, train
from graft.training.memory.activation_checkpointing import checkpoint_blocks
from graft.training.memory.compiling import Compiled
from graft.training.memory.tensor_counter import LiveTensors
from graft.training.objective.loss import draw_loss
from graft.training.objective.parts import parts_of


def saved_bytes(compute):
    """Return the bytes that autograd keeps of what `compute` makes, each storage once, and the result.

    Hooks of others (checkpointing) hide from this what they keep themselves.
    """
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values()), result


def step_gradients(denoiser, batch, config, mode="none", dtype=torch.float32):
    """Return the loss and the gradient of every adapter weight, away from the start where most are 0."""
    state = initial_state(denoiser, config)
    generator = torch.Generator().manual_seed(1)
    weights = {n: w + 0.05 * torch.randn(w.shape, generator=generator) for n, w in state.weights.items()}
    adapters = restore_adapters(denoiser.specs, state.adapter, weights, denoiser.device)
    with torch.enable_grad(), denoiser.hold(dtype) as base:
        units = denoiser.family.checkpointed
        blocks = Compiled().compile_blocks(base, units) if config.memory.compile else nullcontext()
        with attach(base.layers, adapters), blocks, checkpoint_blocks(base.module, units, mode), draws(0, 0):
            value, _ = draw_loss(denoiser, batch, config.objective, seed=0, index=0)
            value.backward()
    return value.item(), {f"{p}.{n}": t.grad for p, a in adapters.items() for n, t in a.named_parameters()}


def measured(denoiser, batch, config, mode, dtype=torch.float32):
    """Return the live tensors of a step as it is really computed, and the bytes kept between its passes."""
    state = initial_state(denoiser, config)
    adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, denoiser.device)
    kept = []
    with torch.enable_grad(), denoiser.hold(dtype) as base:
        units = denoiser.family.checkpointed
        with attach(base.layers, adapters), checkpoint_blocks(base.module, units, mode), draws(0, 0):
            with LiveTensors() as live:
                for part in parts_of(batch, config.objective):
                    with at_strength(part.strength):
                        value, _ = draw_loss(
                            denoiser, batch, config.objective, seed=0, index=0, compute=part.compute
                        )
                        kept.append(live.now)
                        value.backward()
    return live, max(kept)


def config(**memory):
    return train_config(adapter_config("lora", targets="all"), memory=MemoryConfig(**memory))


def trained(memory, denoiser=None, steps=3, **options):
    found = train(denoiser or TinyDenoiser(), TinyDataset(), config(**memory), None, steps=steps, **options)
    return {**found.weights, "losses": torch.tensor(found.losses)}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Sized(TinyDataset):
    """Knows how large its batches get."""

    def largest_batch(self, size):
        return self.batch(size, seed=0, index=0)


BATCH = Sized().largest_batch(2)


CONFIG = replace(train_config(adapter_config("lora", targets="all")), batch_size=2)
