"""A clip's first frame, given to a model by its stock node's own code, so that what is trained is sampled."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import Tensor


def give_first_frame(
    place: str, vae: Any, image: Tensor, size: tuple[int, int, int], positive: Any, negative: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Return positive and negative CONDITIONING and the LATENT of the node at `place` (`Family.first_frame`).

    `image` is (1, H, W, 3) in 0..1, `size` the clip's (width, height, frames).
    """
    known: dict[str, Any] = dict(zip(("width", "height", "length"), size, strict=True))
    known |= {"positive": positive, "negative": negative, "vae": vae, "batch_size": 1, "strength": 1.0}
    known |= {"start_image": image, "image": image}
    node = stock_node(place)
    wanted = inspect.signature(node.execute).parameters
    outputs = node.execute(**{name: value for name, value in known.items() if name in wanted}).result
    return outputs if "positive" in wanted else (positive, negative, outputs[-1])


def stock_node(place: str) -> Any:
    """Return the class of a node at "module.Class" in ComfyUI's comfy_extras."""
    module, _, name = place.partition(".")
    return getattr(importlib.import_module(f"comfy_extras.{module}"), name)
