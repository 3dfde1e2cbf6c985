"""Convert a LoRA between layouts and number formats: names and factors change, what it computes does not.

| layout    | name of a layer                       | factors            | alpha                   |
| kohya     | lora_unet_<path with underscores>     | lora_down, lora_up | kept                    |
| native    | diffusion_model.<path>                | lora_A, lora_B     | kept                    |
| peft      | base_model.model.<path>               | lora_A, lora_B     | multiplied into lora_B  |
| diffusers | <transformer or unet>.<its own path>  | lora_A, lora_B     | multiplied into lora_B  |

Text encoders keep their layers' paths in all of them (`names.TEXT_ENCODERS`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..lora_file import EXACT, LoraFile, LoraLayer, read_lora
from ..lora_file.formats import to_diffusers
from ..lora_file.metadata import write_lora
from ..lora_file.start import FLAT_PREFIXES, PREFIXES
from ..memory.precision import DTYPES
from ..tensor_file import TensorFile
from .files import check_output, unmatched_lines
from .names import (
    TEXT_ENCODERS,
    Shapes,
    export_family,
    kohya_prefix,
    match_weights,
    native_prefix,
    network_shapes,
    places,
    text_encoder_layer,
)

LAYOUTS = ("kohya", "native", "peft", "diffusers")

AMBIGUOUS = (
    "transformer.",
    "unet.",
    *(
        f"{prefix}{block}"
        for prefix in ("base_model.model.", "diffusion_model.", "")
        for block in (
            "transformer_blocks.",
            "single_transformer_blocks.",
            "down_blocks.",
            "up_blocks.",
            "mid_block.",
        )
    ),
)
"""Names that may be diffusers' or the model's own."""


def convert(
    file: LoraFile, layout: str, *, dtype: torch.dtype | None = None, shapes: Shapes | None = None
) -> dict[str, Tensor]:
    """Return the file's tensors in `layout` and `dtype` (None: as they are).

    What the names in a file stand for cannot always be read from them: `shapes` are those of a checkpoint of
    its base. Raises ValueError when they are needed and missing, or the layout cannot hold a layer.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}.")
    encoders = {name: found for name in file.layers if (found := text_encoder_layer(name))}
    network = {name: layer for name, layer in file.layers.items() if name not in encoders}
    converted = dict(file.other)
    for name, (part, path) in encoders.items():
        converted.update(_spelled(_encoder_name(part, path, layout, shapes), file.layers[name], layout))
    if network:
        converted.update(_network(dataclasses.replace(file, layers=network, other={}), layout, shapes))
    if dtype is None:
        return converted
    kept = tuple(f".{suffix}" for suffix in EXACT)
    return {key: tensor if key.endswith(kept) else tensor.to(dtype) for key, tensor in converted.items()}


def convert_file(
    lora: Path, output: Path, layout: str, *, dtype: torch.dtype | None = None, base: Path | None = None
) -> str:
    """Write `lora` in another layout; return a report. See `convert`."""
    check_output(output, [lora, *([base] if base else [])])
    file = read_lora(lora)
    shapes = {key: entry.shape for key, entry in TensorFile(base).entries.items()} if base else None
    write_lora(output, convert(file, layout, dtype=dtype, shapes=shapes), file.metadata)
    report = f"{output.name}: {len(file.layers)} layers in {layout} layout"
    return "\n".join([report, *unmatched_lines(list(file.other))])


def _network(file: LoraFile, layout: str, shapes: Shapes | None) -> dict[str, Tensor]:
    """Return the network's layers in `layout`."""
    if shapes is None:
        if layout == "diffusers":
            raise ValueError(
                f"{file.name}: diffusers names layers its own way; give a checkpoint of the base."
            )
        layers = {_path_in(file.name, name, layout): layer for name, layer in file.layers.items()}
    else:
        matched = match_weights(file, shapes)
        if matched.unmatched:
            raise ValueError(f"{file.name}: the base has no layer for {', '.join(matched.unmatched)}.")
        layers = {places(key, shapes[key])[0].path: layer for key, layer in matched.layers.items()}
        if layout == "diffusers":
            return _to_diffusers(file.name, layers, network_shapes(shapes))
    tensors: dict[str, Tensor] = {}
    for path, layer in layers.items():
        flat = f"lora_unet_{path.replace('.', '_')}"
        name = {"kohya": flat, "native": f"diffusion_model.{path}", "peft": f"base_model.model.{path}"}[
            layout
        ]
        tensors.update(_spelled(name, layer, layout))
    return tensors


def _path_in(file: str, name: str, layout: str) -> str:
    """Return the layer's path as far as its name tells, with underscores where `layout` has them anyway."""
    flat = next((prefix for prefix in FLAT_PREFIXES if name.startswith(prefix)), None)
    if name.startswith(AMBIGUOUS) or (flat and layout != "kohya"):
        raise ValueError(
            f"{file}: {name}: which layer of the model that is cannot be told from the name; "
            "give a checkpoint of its base."
        )
    if flat:
        return name.removeprefix(flat)
    known = sorted(PREFIXES, key=len, reverse=True)
    return next(name.removeprefix(prefix) for prefix in known if name.startswith(prefix))


def _to_diffusers(file: str, layers: Mapping[str, LoraLayer], own: Shapes) -> dict[str, Tensor]:
    family = export_family(own)
    if family is None:
        raise ValueError(
            f"{file}: Graft does not know what diffusers calls the layers of this base; use peft."
        )
    return to_diffusers({path: _plain(layer) for path, layer in layers.items()}, family)


def _plain(layer: LoraLayer) -> dict[str, Tensor]:
    tensors = dict(layer.tensors)
    if "lora_up.weight" in tensors:
        tensors["lora_up.weight"] = tensors["lora_up.weight"].flatten(1)
    return tensors


def _encoder_name(part: str, path: str, layout: str, shapes: Shapes | None) -> str:
    if layout == "kohya":
        return kohya_prefix(part, shapes or ()) + path.replace(".", "_")
    return (native_prefix(part) if layout == "native" else TEXT_ENCODERS[part].peft) + path


def _spelled(name: str, layer: LoraLayer, layout: str) -> dict[str, Tensor]:
    """Return a layer's tensors under `name`, with the suffixes of `layout`."""
    tensors = dict(layer.tensors)
    if layout == "kohya":
        if "alpha" not in tensors and layer.rank is not None:
            tensors["alpha"] = torch.tensor(float(layer.rank))
    elif layer.algorithm == "lora" and "lora_mid.weight" not in tensors:
        down, up = tensors.pop("lora_down.weight"), tensors.pop("lora_up.weight")
        if layout != "native":
            tensors.pop("alpha", None)
            up = up if layer.scale == 1 else (up.float() * layer.scale).to(up.dtype)
        tensors = {"lora_A.weight": down, "lora_B.weight": up, **tensors}
    elif layout != "native":
        instead = "" if layer.algorithm == "dora" else ", or make a LoRA of it with resize"
        raise ValueError(
            f"{layer.name}: {layout} has no place for {layer.algorithm} in this form; keep kohya or "
            f"native{instead}."
        )
    return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--layout", choices=LAYOUTS, default="kohya")
    parser.add_argument("--dtype", choices=list(DTYPES), help="as in the file where it is not given")
    parser.add_argument("--base", type=Path, help="a checkpoint of the base, for the names of its layers")


def run(args: argparse.Namespace) -> None:
    dtype = DTYPES[args.dtype] if args.dtype else None
    print(convert_file(args.lora, args.output, args.layout, dtype=dtype, base=args.base))
