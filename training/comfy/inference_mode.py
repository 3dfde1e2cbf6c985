"""The switch out of inference mode, in which ComfyUI runs nodes and the engine cannot train.

A tensor that was made in inference mode can never take part in a backward pass, and the engine makes states,
adapters and conditionings in many places. So every node leaves the mode at once (`nodes/node.py`), and
nothing behind the border has to know about it. Only calls back into ComfyUI, to encode, sample or move
weights, enter it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def leave_inference_mode() -> Iterator[None]:
    """Compute outside inference mode, still without gradients; training turns them on."""
    with torch.inference_mode(False), torch.no_grad():
        yield
