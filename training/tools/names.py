"""What LoRA files call a saved checkpoint's weights, network's and text encoders', in every layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from ..family import FAMILIES, TEXT, Family
from ..lora_file import LoraFile, LoraLayer
from ..lora_file.formats import EXPORTS
from ..lora_file.start import Matched, Rows, match_names, spellings

Shapes = Mapping[str, tuple[int, ...]]
"""Key of a checkpoint -> shape of its weight."""

NETWORK_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
"""Before the network's own paths: in a full checkpoint, in ComfyUI, in a file of the network alone."""

LEFT_OUT = ("first_stage_model.", "vae.", "model_ema.")
"""Parts of a checkpoint that a LoRA cannot hold."""

NETWORK = ""
"""As the part of a layer: not a text encoder's."""


@dataclass(frozen=True)
class TextEncoder:
    """How one text encoder is called; each name ends where the layer's path begins."""

    peft: str
    kohya: tuple[str, ...]
    """With underscores for dots; the one to write first."""
    stored: tuple[str, ...]
    """In checkpoints."""


TEXT_ENCODERS: Mapping[str, TextEncoder] = {
    "clip_l": TextEncoder(
        "text_encoder.",
        ("lora_te1_", "lora_te_"),
        (
            "cond_stage_model.transformer.",
            "conditioner.embedders.0.transformer.",
            "text_encoders.clip_l.transformer.",
        ),
    ),
    "clip_g": TextEncoder(
        "text_encoder_2.",
        ("lora_te2_",),
        ("conditioner.embedders.1.model.", "text_encoders.clip_g.transformer."),
    ),
    "clip_h": TextEncoder("text_encoder.", ("lora_te_",), ("cond_stage_model.model.",)),
    "t5xxl": TextEncoder(
        "text_encoder_3.",
        ("lora_te3_", "lora_te2_"),
        ("text_encoders.t5xxl.transformer.",),
    ),
}
"""As in ComfyUI's `model_lora_keys_clip`; SD1.5's CLIP-L is lora_te_, OneTrainer's T5 of Flux lora_te2_."""

_OPEN_CLIP = {
    "attn.in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.out_proj": ("self_attn.out_proj",),
    "mlp.c_fc": ("mlp.fc1",),
    "mlp.c_proj": ("mlp.fc2",),
}
"""Layers of OpenCLIP, as SDXL and SD2 checkpoints store it -> those that files name, fused ones in order."""

_CLIP_PATH = re.compile(r"(text_model)[._](encoder)[._](layers)[._](\d+)[._](self_attn|mlp)[._](\w+)")
_T5_PATH = re.compile(
    r"(encoder)[._](block)[._](\d+)[._](layer)[._](\d+)[._](SelfAttention|DenseReluDense)[._](\w+)"
)


@dataclass(frozen=True)
class Place:
    """A layer as files name it, within a weight of a checkpoint."""

    part: str
    """Key of TEXT_ENCODERS, or NETWORK."""
    path: str
    first: int
    """Row of the weight."""
    rows: int

    def names(self) -> list[str]:
        """Return the layer's names in kohya, native and PEFT files."""
        if self.part == NETWORK:
            return spellings(self.path)
        encoder, flat = TEXT_ENCODERS[self.part], self.path.replace(".", "_")
        return [
            *(k + flat for k in encoder.kohya),
            native_prefix(self.part) + self.path,
            encoder.peft + self.path,
        ]


def native_prefix(part: str) -> str:
    """Return how ComfyUI's names of a text encoder's layers begin."""
    return f"{TEXT}{part}.transformer."


def kohya_prefix(part: str, keys: Iterable[str]) -> str:
    """Return how kohya's names of a part's layers begin, for the base whose checkpoint has these `keys`."""
    if part == NETWORK:
        return "lora_unet_"
    alone = any(key.startswith("cond_stage_model.") for key in keys)  # SD1 and SD2 have one text encoder
    return "lora_te_" if alone else TEXT_ENCODERS[part].kohya[0]


def places(key: str, shape: tuple[int, ...]) -> list[Place]:
    """Return a checkpoint weight's layers: none for what no LoRA holds, three for OpenCLIP's fused qkv."""
    if len(shape) < 2 or key.startswith(LEFT_OUT):
        return []
    path = key.removesuffix("_weight" if key.endswith("in_proj_weight") else ".weight")
    if path == key:
        return []
    for part, encoder in TEXT_ENCODERS.items():
        for stored in encoder.stored:
            if path.startswith(stored):
                return _encoder_places(part, path.removeprefix(stored), shape[0])
    prefix = next(prefix for prefix in NETWORK_PREFIXES if path.startswith(prefix))
    return [Place(NETWORK, path.removeprefix(prefix), 0, shape[0])]


def network_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the network's layers by their own paths."""
    found = {key: places(key, shape) for key, shape in shapes.items()}
    return {p[0].path: shapes[key] for key, p in found.items() if p and p[0].part == NETWORK}


def match_weights(file: LoraFile, shapes: Shapes) -> Matched:
    """Find the file's layers among the weights of a checkpoint.

    Raises ValueError when nothing matches, or a layer does not have its weight's shape.
    """
    swapped = {name for name, *_, turned in _parts(network_shapes(shapes)) if turned}
    layers = {n: _halves_swapped(layer) if n in swapped else layer for n, layer in file.layers.items()}
    matched = match_names(
        replace(file, layers=layers),
        weight_names(shapes),
        {key: shape[0] for key, shape in shapes.items() if shape},
        "the base",
    )
    for key, layer in matched.layers.items():
        rows, columns, found = shapes[key][0], math.prod(shapes[key][1:]), layer.shape
        if found != (rows, columns):
            raise ValueError(
                f"{file.name}: {layer.name}: made for {found[0]} outputs of {found[1]} weights, but {key} "
                f"has {rows} of {columns}; choose the base that the file was trained on."
            )
    return matched


def weight_names(shapes: Shapes) -> dict[str, Rows]:
    """Return every name that files use for a checkpoint's weights -> (key, first output, number of them)."""
    names: dict[str, Rows] = {}
    for key, shape in shapes.items():
        for place in places(key, shape):
            names.update(dict.fromkeys(place.names(), (key, place.first, place.rows)))
            if place.rows == shape[0]:
                names[key.removesuffix(".weight")] = (key, 0, shape[0])
    return {**names, **_diffusers_names(shapes)}


def text_encoder_layer(name: str) -> tuple[str, str] | None:
    """Return (key of TEXT_ENCODERS, path) of a text encoder's layer from its name in any layout, else None.

    Underscores are read back by what CLIP's and T5's layers are called.
    """
    for part, encoder in TEXT_ENCODERS.items():
        for prefix in (*encoder.kohya, native_prefix(part), encoder.peft, *encoder.stored):
            if name.startswith(prefix) and (path := _path(part, name.removeprefix(prefix))):
                return part, path
    return None


def export_family(paths: Mapping[str, object]) -> Family | None:
    """Return a family with diffusers names whose blocks these paths have."""
    if "input_blocks.2.0.op" in paths:  # KOALA: one residual block a level, two in the names' rule
        return None
    for family in FAMILIES.values():
        globs = [f"{glob}.*" for glob in family.blocks]
        if family.export and any(fnmatchcase(path, glob) for path in paths for glob in globs):
            return family
    return None


def _encoder_places(part: str, path: str, rows: int) -> list[Place]:
    found = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)", path)
    if not found or found[2] not in _OPEN_CLIP:
        return [Place(part, path, 0, rows)]
    layers = _OPEN_CLIP[found[2]]
    share = rows // len(layers)
    return [
        Place(part, f"text_model.encoder.layers.{found[1]}.{layer}", i * share, share)
        for i, layer in enumerate(layers)
    ]


def _path(part: str, rest: str) -> str | None:
    found = (_T5_PATH if part == "t5xxl" else _CLIP_PATH).fullmatch(rest)
    return ".".join(found.groups()) if found else None


def _diffusers_names(shapes: Shapes) -> dict[str, Rows]:
    """Return diffusers' names for the network's layers."""
    by_path = {
        place.path: key for key, s in shapes.items() for place in places(key, s) if place.part == NETWORK
    }
    return {
        name: (by_path[path], first, rows) for name, path, first, rows, _ in _parts(network_shapes(shapes))
    }


def _parts(shapes: Shapes) -> Iterator[tuple[str, str, int, int, bool]]:
    """Yield (diffusers' name, native path, first row, number of rows, whether its halves are swapped)."""
    if (family := export_family(shapes)) is None:
        return
    export = EXPORTS[family.export]
    for path, shape in shapes.items():
        for part in export.names(path, shape):
            rows = part.slice(shape[1], shape[0])
            first = rows.start or 0
            for prefix in (f"{export.prefix}.", "base_model.model.", "lora_transformer_", "lora_unet_"):
                name = part.name.replace(".", "_") if prefix.endswith("_") else part.name
                yield f"{prefix}{name}", path, first, rows.stop - first, part.swapped


def _halves_swapped(layer: LoraLayer) -> LoraLayer:
    if layer.algorithm != "lora":
        raise ValueError(
            f"{layer.name}: its outputs are in diffusers' order; only a plain LoRA can be reordered."
        )
    first, second = layer.tensors["lora_up.weight"].chunk(2)
    return replace(layer, tensors={**layer.tensors, "lora_up.weight": torch.cat((second, first))})
