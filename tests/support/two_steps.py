"""Two steps of any family on random samples."""

import dataclasses

import torch

from graft.training.config import AdapterConfig, MemoryConfig, OptimizerConfig, TrainConfig
from graft.training.loop import initial_state, train

CONFIG = TrainConfig(
    batch_size=2,
    seed=3,
    adapter=AdapterConfig(rank=4, alpha=4.0, targets="all"),
    optimizer=OptimizerConfig(lr=1e-2),
    memory=MemoryConfig(dtype="fp32"),
)


class Samples:
    """Two images of a tiny family, the same in every batch."""

    fingerprint = "tiny"

    def __init__(self, tiny, indices=(0, 1)):
        self.tiny, self.indices = tiny, indices

    def batch(self, size, *, seed, index):
        return self.tiny.batch(self.indices)


def two_steps(denoiser, tiny, checkpointing="none", algorithm="lora"):
    """Train it in a checkpointing mode; return the state."""
    memory = MemoryConfig(dtype="fp32", checkpointing=checkpointing)
    rank = 18 if algorithm == "boft" else CONFIG.adapter.rank  # of which its smallest blocks are
    adapter = dataclasses.replace(CONFIG.adapter, algorithm=algorithm, rank=rank)
    config = dataclasses.replace(CONFIG, memory=memory, adapter=adapter)
    return train(denoiser, Samples(tiny), config, None, steps=2)


def unmoved(denoiser, state):
    """The adapter parameters that are as in a fresh adapter."""
    start = initial_state(denoiser, CONFIG).weights
    return [key for key, tensor in state.weights.items() if torch.equal(tensor, start[key])]
