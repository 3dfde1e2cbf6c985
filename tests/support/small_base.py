"""A small base in the place of the starter's own: a step takes a tenth of the time, and only what is drawn
differs.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save

import graft

STARTER = Path(graft.__file__).parent / "starter" / "base" / "graft_tiny_sd3.safetensors"


def put_small_base(folder):
    """Write it under the name of the starter's into a folder that ComfyUI searches before the starter's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STARTER.name).write_bytes(_small_base())


@cache
def _small_base():
    """The starter's last two blocks of six, with the first 128 of 384 features everywhere."""
    small = {}
    for key, weight in load_file(STARTER).items():
        if key.startswith("model.diffusion_model."):
            weight = weight[tuple(slice(size // 3 if size % 384 == 0 else size) for size in weight.shape)]
            key = re.sub(r"(?<=joint_blocks\.)\d", lambda block: str(int(block[0]) - 4), key)
        if "joint_blocks.-" not in key:
            small[key] = weight.contiguous()
    return save(small)
