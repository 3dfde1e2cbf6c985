"""Convert a LoRA between layouts and number formats: names and factors change, what it computes does not.

| layout | name of a layer | factors | alpha |
| kohya  | lora_unet_<path with underscores> | lora_down, lora_up | kept |
| native | diffusion_model.<path> | lora_A, lora_B | kept |
| peft   | base_model.model.<path> | lora_A, lora_B | multiplied into lora_B |
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..lora_file import LoraFile, LoraLayer, read_lora, read_tensors, write_lora
from ..memory.precision import DTYPES
from .names import TEXT_ENCODERS, match_weights, split_key

LAYOUTS = ("kohya", "native", "peft")

_UNDERSCORED = (
    "lora_unet_",
    "lora_te_",
    "lora_te1_",
    "lora_te2_",
    "lora_te3_",
    "lycoris_",
    "lora_transformer_",
)
_DOTTED = (
    "base_model.model.diffusion_model.",
    "base_model.model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
)


def convert(
    file: LoraFile,
    layout: str,
    *,
    dtype: torch.dtype | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the file's tensors in `layout` and `dtype` (None: as they are).

    kohya's underscores cannot be read back without the model's own names: `weights` is a checkpoint that has
    them. Raises ValueError when they are needed and missing, or the layout cannot hold a layer.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}.")
    tensors = {key: tensor if dtype is None else tensor.to(dtype) for key, tensor in file.other.items()}
    for name, layer in _named(file, layout, weights).items():
        for suffix, tensor in _spelled(layer, layout, f"{file.name}: {layer.name}").items():
            small = dtype is None or suffix == ".alpha"
            tensors[f"{name}{suffix}"] = (tensor if small else tensor.to(dtype)).contiguous()
    return tensors


def _named(file: LoraFile, layout: str, weights: Mapping[str, Tensor] | None) -> dict[str, LoraLayer]:
    if weights is not None:
        layers, unmatched = match_weights(file, weights)
        if unmatched:
            raise ValueError(f"{file.name}: the base has no layer for {', '.join(unmatched)}.")
        paths = {key: split_key(key) or ("", key) for key in layers}
        return {_name(*paths[key], layout): layer for key, layer in layers.items()}
    if layout == "kohya":
        return {_underscored(name): layer for name, layer in file.layers.items()}
    if found := [name for name in file.layers if name.startswith(_UNDERSCORED)]:
        raise ValueError(
            f"{file.name}: {found[0]}: where the dots were is not written in the file; give a checkpoint of "
            "its base (--base)."
        )
    return {_name("", _bare(name), layout): layer for name, layer in file.layers.items()}


def _name(prefix: str, path: str, layout: str) -> str:
    encoder = TEXT_ENCODERS.get(prefix)
    if layout == "kohya":
        return (encoder[0] if encoder else "lora_unet_") + path.replace(".", "_")
    if encoder:
        return f"{prefix}{path}" if layout == "native" else f"text_encoder.{path}"
    return f"{'diffusion_model' if layout == 'native' else 'base_model.model'}.{path}"


def _underscored(name: str) -> str:
    return name if name.startswith(_UNDERSCORED) else f"lora_unet_{_bare(name).replace('.', '_')}"


def _bare(name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in _DOTTED if name.startswith(prefix)), name)


def _spelled(layer: LoraLayer, layout: str, where: str) -> dict[str, Tensor]:
    tensors = {f".{suffix}": tensor for suffix, tensor in layer.tensors.items()}
    if layout == "kohya":
        if "alpha" not in layer.tensors and layer.rank is not None:
            tensors[".alpha"] = torch.tensor(float(layer.rank))
        return tensors
    if layer.algorithm == "lora" and "mid" not in layer.weights:
        down, up = tensors.pop(".lora_down.weight"), tensors.pop(".lora_up.weight")
        if layout == "peft":
            tensors.pop(".alpha", None)
            up = up if layer.scale == 1 else (up.float() * layer.scale).to(up.dtype)
        return {".lora_A.weight": down, ".lora_B.weight": up, **tensors}
    if layout == "peft":
        raise ValueError(
            f"{where}: PEFT has no place for {layer.algorithm} in this form; keep kohya or native."
        )
    return tensors


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--layout", choices=LAYOUTS, default="kohya")
    parser.add_argument("--dtype", choices=list(DTYPES), help="as in the file where it is not given")
    parser.add_argument("--base", type=Path, help="a checkpoint of the base, for the names of its layers")


def run(args: argparse.Namespace) -> None:
    file = read_lora(args.lora)
    weights = read_tensors(args.base, finite=False)[0] if args.base else None
    dtype = DTYPES[args.dtype] if args.dtype else None
    tensors = convert(file, args.layout, dtype=dtype, weights=weights)
    write_lora(args.output, tensors, file.metadata)
    print(f"{args.output.name}: {len(file.layers)} layers as {args.layout}")
