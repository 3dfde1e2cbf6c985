"""Random draws as a pure function of what they are for.

A generator is keyed by the seed, what it is for, and the micro-batch, counted from the run's start. So no RNG
state is ever saved, and a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *key: int | str) -> torch.Generator:
    """Return a CPU generator seeded by `seed` and `key` alone: equal arguments, equal draws, on any machine.

    Draw on the CPU and move the result: CUDA generators differ between GPU models.
    """
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
