"""The weights of a checkpoint file under the names of LoRA files: the network's and its text encoders'."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..files.lora.match import Matched, match_lora
from ..files.lora.names import TEXT_ENCODERS, Shape, Shapes, Target, network_names, text_names
from ..files.lora.read import LoraFile
from ..user_error import UserError

NETWORK_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
"""Prefixes of the network's own paths: in a full checkpoint, in ComfyUI, in a file of the network alone."""

LEFT_OUT = ("first_stage_model.", "vae.", "model_ema.")
"""Parts of a checkpoint that a LoRA cannot hold."""

NETWORK = ""
"""`Place.part` of the network's own layers."""

_OPEN_CLIP = {
    "attn.in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.out_proj": ("self_attn.out_proj",),
    "mlp.c_fc": ("mlp.fc1",),
    "mlp.c_proj": ("mlp.fc2",),
}
"""Layers of OpenCLIP, as SDXL and SD2 checkpoints store them -> layers of LoRA files, fused ones in order."""


@dataclass(frozen=True)
class Place:
    """A layer of LoRA files, within a weight of a checkpoint."""

    part: str
    """A key of TEXT_ENCODERS, or NETWORK."""
    path: str
    first: int
    """First row of the weight."""
    rows: int


def kohya_prefix(part: str, keys: Iterable[str]) -> str:
    """Return kohya's prefix for a part's layers, for a base whose checkpoint has these `keys`."""
    if part == NETWORK:
        return "lora_unet_"
    alone = any(key.startswith("cond_stage_model.") for key in keys)  # SD1 and SD2 have one text encoder
    return "lora_te_" if alone else TEXT_ENCODERS[part].kohya[0]


def places(key: str, shape: Shape) -> list[Place]:
    """Return a weight's layers: three for OpenCLIP's fused qkv, none for a weight that LoRA cannot change."""
    return _places(key, shape) if len(shape) >= 2 else []


def _places(key: str, shape: Shape) -> list[Place]:
    if not shape or key.startswith(LEFT_OUT):
        return []
    path = key.removesuffix("_weight" if key.endswith("in_proj_weight") else ".weight")
    if path == key:
        return []
    for part, encoder in TEXT_ENCODERS.items():
        for stored in encoder.checkpoint:
            if path.startswith(stored):
                return _encoder_places(part, path.removeprefix(stored), shape[0])
    return [Place(NETWORK, network_path(key), 0, shape[0])]


def network_path(key: str) -> str:
    """Return the network's own path of a weight."""
    prefix = next(prefix for prefix in NETWORK_PREFIXES if key.startswith(prefix))
    return key.removeprefix(prefix).removesuffix(".weight")


def _encoder_places(part: str, path: str, rows: int) -> list[Place]:
    match = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)", path)
    if not match or match[2] not in _OPEN_CLIP:
        return [Place(part, path, 0, rows)]
    layers = _OPEN_CLIP[match[2]]
    share = rows // len(layers)
    return [
        Place(part, f"text_model.encoder.layers.{match[1]}.{layer}", i * share, share)
        for i, layer in enumerate(layers)
    ]


def network_shapes(shapes: Shapes) -> dict[str, Shape]:
    """Return the network's weights, norms too, by their own paths."""
    places = {key: _places(key, shape) for key, shape in shapes.items()}
    return {p[0].path: shapes[key] for key, p in places.items() if p and p[0].part == NETWORK}


def weight_names(shapes: Shapes) -> dict[str, Target]:
    """Return every name that files use for a checkpoint's weights."""
    names: dict[str, Target] = {}
    key_of: dict[str, str] = {}
    for key, shape in shapes.items():
        for place in _places(key, shape):
            if place.part == NETWORK:
                key_of[place.path] = key
            else:
                target = Target(key, place.first, place.rows)
                names.update(dict.fromkeys(text_names(place.part, place.path), target))
            if place.rows == shape[0]:
                names[key.removesuffix(".weight")] = Target(key, 0, shape[0])
    network = network_names(network_shapes(shapes))
    return {
        **names,
        **{name: Target(key_of[weight.key], *weight[1:]) for name, weight in network.items()},
    }


def match_weights(file: LoraFile, shapes: Shapes) -> Matched:
    """Find the file's layers among the weights of a checkpoint.

    Raises UserError when nothing matches, and for a layer that does not have its weight's shape.
    """
    outputs = {key: shape[0] for key, shape in shapes.items() if shape}
    matched = match_lora(file, weight_names(shapes), outputs, "the base")
    for key, layer in matched.layers.items():
        rows, columns, shape = shapes[key][0], math.prod(shapes[key][1:]), layer.shape
        if not layer.is_for(rows, columns):
            raise UserError(
                f"{file.name}: {layer.name}: made for {shape[0]} outputs of {shape[1]} weights, but {key} "
                f"has {rows} of {columns}; choose the base that the file was trained on."
            )
    return matched
