"""Conversion of a LoRA between layouts and number formats: names and factors change, its result does not.

| layout    | name of a layer                       | factors            | alpha                   |
| kohya     | lora_unet_<path with underscores>     | lora_down, lora_up | kept                    |
| native    | diffusion_model.<path>                | lora_A, lora_B     | multiplied into lora_B  |
| peft      | base_model.model.<path>               | lora_A, lora_B     | multiplied into lora_B  |
| diffusers | <transformer or unet>.<its own path>  | lora_A, lora_B     | multiplied into lora_B  |

ComfyUI reads all of kohya and native, where other methods than LoRA keep kohya's suffixes. Text encoders keep
their layers' paths in all of them (`names.TEXT_ENCODERS`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from pathlib import Path

import torch
from torch import Tensor

from ..files.lora.diffusers import under_diffusers_names
from ..files.lora.match import why_other
from ..files.lora.names import (
    COMFY,
    FLAT_PREFIXES,
    TEXT_ENCODERS,
    Architecture,
    Part,
    Shapes,
    architecture_of,
    comfy_names,
    in_diffusers_names,
    native_prefix,
    own_path,
    spell,
    text_layer,
)
from ..files.lora.peft import ALPHA, is_plain, peft_tensors, shape_of
from ..files.lora.read import LoraFile, LoraLayer, read_lora, split_key
from ..files.lora.write import EXACT, write_lora
from ..files.tensor_file import TensorFile
from ..user_error import UserError
from .checkpoint import kohya_prefix, match_weights, network_path, network_shapes
from .files import check_output, left_out_lines

LAYOUTS = ("kohya", "native", "peft", "diffusers")

PREFIXES = {"kohya": "lora_unet_", "native": COMFY, "peft": "base_model.model."}
"""Layout -> what begins the names of the network's layers."""

GIVE_BASE = "give a checkpoint of its base (--base; base on the node)."


def convert(
    file: LoraFile, layout: str, *, dtype: torch.dtype | None = None, shapes: Shapes | None = None
) -> dict[str, Tensor]:
    """Return the file's tensors in `layout` and `dtype` (None: as they are).

    A name does not always tell which layer it stands for; `shapes`, of a checkpoint of the base, do. Raises
    UserError when they are needed and missing, and for a layer that the layout cannot hold.
    """
    return place_tensors(file, layout, dtype=dtype, shapes=shapes)[0]


def place_tensors(
    file: LoraFile, layout: str, *, dtype: torch.dtype | None = None, shapes: Shapes | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """As `convert`; also return the keys of the file that are left out, with the reasons."""
    if layout not in LAYOUTS:
        raise UserError(f"layout: {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}.")
    text = {name: layer for name in file.methods if (layer := text_layer(name))}
    network = _take_layers(file, file.methods.keys() - text.keys())
    tensors: dict[str, Tensor] = {}
    left_out = why_other(file)
    for name, (encoder, path) in text.items():
        new = spell(_encoder_prefix(encoder, layout, shapes), path)
        if name in file.layers:
            tensors |= _spell_layer(new, file.layers[name], layout)
        tensors |= _rename_rest(file, name, new, layout)
    if network.methods and shapes is not None:
        of_network, lost = _place_by_base(network, layout, shapes)
        tensors |= of_network
        left_out |= lost
    elif network.methods:
        tensors |= _place_by_name(network, layout)
    if dtype is None:
        return tensors, left_out
    exact = tuple(f".{suffix}" for suffix in EXACT)
    tensors = {
        key: tensor if key.endswith(exact) or not tensor.is_floating_point() else tensor.to(dtype)
        for key, tensor in tensors.items()
    }
    return tensors, left_out


def comfy_reads(layout: str, shapes: Shapes | None) -> bool:
    """Return whether ComfyUI's loader knows every name of a layout, for a base with these shapes."""
    if layout != "diffusers":
        return layout != "peft"
    return shapes is not None and architecture_of(network_shapes(shapes)).comfy_reads_diffusers


def convert_file(
    lora: Path, output: Path, layout: str, *, dtype: torch.dtype | None = None, base: Path | None = None
) -> str:
    """Write `lora` in another layout; return a report. See `convert`."""
    check_output(output, [lora, *([base] if base else [])])
    file, shapes = read_lora(lora), base_shapes(base)
    tensors, left_out = place_tensors(file, layout, dtype=dtype, shapes=shapes)
    write_lora(output, tensors, file.metadata)
    lines = [f"{output.name}: {len(file.methods)} layers in {layout} layout"]
    if not comfy_reads(layout, shapes):
        lines.append("ComfyUI's Load LoRA does not read these names; Graft's nodes do.")
    return "\n".join([*lines, *left_out_lines(left_out)])


def base_shapes(base: Path | None) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a checkpoint's weights; None without a checkpoint."""
    return {key: entry.shape for key, entry in TensorFile(base).entries.items()} if base else None


def _take_layers(file: LoraFile, names: Set[str]) -> LoraFile:
    """Return a file with only these of its layers."""
    return dataclasses.replace(
        file,
        layers={name: layer for name, layer in file.layers.items() if name in names},
        whole={name: whole for name, whole in file.whole.items() if name in names},
        others={name: other for name, other in file.others.items() if name in names},
        other={},
    )


def _place_by_name(file: LoraFile, layout: str) -> dict[str, Tensor]:
    """Return the network's layers in `layout`, going by their names alone."""
    if layout == "diffusers":
        raise UserError(f"{file.name}: diffusers names layers its own way; {GIVE_BASE}")
    tensors: dict[str, Tensor] = {}
    for name in file.methods:
        new = spell(PREFIXES[layout], _path_in(file.name, name, layout))
        if name in file.layers:
            tensors |= _spell_layer(new, file.layers[name], layout)
        tensors |= _rename_rest(file, name, new, layout)
    return tensors


def _place_by_base(file: LoraFile, layout: str, shapes: Shapes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the network's layers in `layout` under the names of a base of these shapes, and keys left out.

    Raises UserError for a name that ComfyUI's loader does not know, where the layout is ComfyUI's.
    """
    own = network_shapes(shapes)
    if layout in ("kohya", "native") and in_diffusers_names(own):
        raise UserError(
            f"{file.name}: the base is stored under diffusers' names; give one under ComfyUI's (--base; base "
            "on the node)."
        )
    matched = match_weights(file, shapes)
    factors = {f"{name}.{suffix}" for name, layer in file.layers.items() for suffix in layer.tensors}
    if missing := [key for key in matched.left_out if key in factors]:
        raise UserError(f"{file.name}: the base has no layer for {', '.join(missing)}.")
    architecture = architecture_of(own)
    layers = {network_path(key): layer for key, layer in matched.layers.items()}
    tensors: dict[str, Tensor] = {}
    if layout == "diffusers":
        if not architecture.diffusers:
            raise UserError(
                f"{file.name}: Graft does not know what diffusers calls the layers of this base; use peft."
            )
        flat = {path: layer.tensors for path, layer in layers.items()}
        tensors |= under_diffusers_names(flat, architecture)
    for path, layer in layers.items() if layout != "diffusers" else ():
        tensors |= _spell_layer(spell(PREFIXES[layout], path), layer, layout, architecture)
    for name, target in [*((part.name, part.target) for part in matched.whole), *matched.others.items()]:
        if target.swapped or target.rows != shapes[target.key][0]:
            raise UserError(
                f"{file.name}: {name} is a part of {target.key}; {file.methods[name]} cannot be joined."
            )
        new = spell(PREFIXES.get(layout, architecture.diffusers), network_path(target.key))
        tensors |= _rename_rest(file, name, new, layout)
    if layout in ("kohya", "native"):
        known = comfy_names(own)
        if unknown := sorted({split_key(key)[0] for key in tensors} - known.keys()):
            raise UserError(f"{file.name}: ComfyUI's loader does not know {', '.join(unknown[:3])}.")
    return tensors, dict(matched.left_out)


def _path_in(file: str, name: str, layout: str) -> str:
    """Return the layer's path from its name, with underscores where `layout` has them anyway."""
    if layout == "kohya" and name.startswith("lora_unet_"):
        return name.removeprefix("lora_unet_")
    path = own_path(name, flat=layout == "kohya")
    if path is None or (name.startswith(FLAT_PREFIXES) and layout != "kohya"):
        raise UserError(f"{file}: {name}: the name does not tell which layer of the model it is; {GIVE_BASE}")
    return path


def _encoder_prefix(encoder: str, layout: str, shapes: Shapes | None) -> str:
    if layout == "kohya":
        return kohya_prefix(encoder, shapes or ())
    return native_prefix(encoder) if layout == "native" else TEXT_ENCODERS[encoder].peft


def _spell_layer(
    name: str, layer: LoraLayer, layout: str, architecture: Architecture | None = None
) -> dict[str, Tensor]:
    """Return a layer's tensors under `name`, with the suffixes of `layout`.

    Given the architecture, the native layout splits layers that diffusers has in parts, as Save LoRA does.
    """
    tensors = dict(layer.tensors)
    if layout == "kohya":
        if ALPHA not in tensors and layer.method.has_alpha and layer.rank is not None:
            tensors[ALPHA] = torch.tensor(float(layer.rank))
    elif is_plain(tensors):
        parts = [Part(name)]
        if layout == "native" and architecture and name.startswith(COMFY):
            parts = architecture.native_parts(name.removeprefix(COMFY), shape_of(tensors))
            return peft_tensors(tensors, parts, COMFY)
        return peft_tensors(tensors, parts, "")
    elif layout != "native":
        stays = layer.magnitude is not None or layer.method.multiplies_base
        instead = "" if stays else ", or make a LoRA of it with resize"
        raise UserError(
            f"{layer.name}: {layout} has no place for {layer.title} in this form; keep kohya or "
            f"native{instead}."
        )
    return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}


def _rename_rest(file: LoraFile, name: str, new: str, layout: str) -> dict[str, Tensor]:
    """Return a layer's tensors that are not factors, as they are, under a new name.

    Raises UserError where programs that read the layout do not know the method.
    """
    tensors, method = dict(file.whole.get(name, {})), "whole differences"
    tensors = {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
    if other := file.others.get(name):
        tensors, method = dict(other.tensors), other.method
    layouts = ("peft",) if method.endswith("(PEFT)") else ("kohya", "native")
    if tensors and layout not in layouts:
        raise UserError(f"{name}: {layout} has no place for {method}; choose {' or '.join(layouts)}.")
    return {new + key.removeprefix(name): tensor for key, tensor in tensors.items()}
