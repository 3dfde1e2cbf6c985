"""Random draws as a pure function of their purpose.

A generator is keyed by the seed, the purpose and the micro-batch, counted from the start of the run. So RNG
state is never saved, and a resumed run draws what the uninterrupted one would have drawn.
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
