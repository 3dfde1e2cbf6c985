"""A LoRA under the names of diffusers and PEFT, for software that does not read ComfyUI's.

A native layer is one or more diffusers layers: fused projections (qkv, Flux's linear1) are split by rows,
which share `lora_A`, and where diffusers keeps scale before shift the halves are swapped. diffusers has no
alpha, so it is folded into `lora_B`. Files are read under any names by `start.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..family import TEXT, Family, is_text
from ..state import TrainState
from . import lora_layers, lora_tensors

Layers = Mapping[str, Mapping[str, Tensor]]
"""Module path -> what a LoRA file holds for it, by suffix: "lora_down.weight", "lora_up.weight", "alpha"."""

DOWN, UP, ALPHA = "lora_down.weight", "lora_up.weight", "alpha"


@dataclass(frozen=True)
class Part:
    """One diffusers layer within a native one."""

    name: str
    rows: tuple[int, int] = (0, 0)
    """First and last row of the native weight, in input widths; (0, 0) is all, an end of 0 the rest."""
    swapped: bool = False
    """Its halves are the other way round: scale before shift."""

    def slice(self, width: int, count: int) -> slice:
        first, last = (edge * width for edge in self.rows)
        return slice(first, last or count)


def diffusers_tensors(state: TrainState, family: Family, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a diffusers/PEFT file of a training state; see `to_diffusers`."""
    tensors = to_diffusers(lora_layers(state), family)
    return {key: tensor.to(dtype) for key, tensor in tensors.items()}


def to_diffusers(layers: Layers, family: Family) -> dict[str, Tensor]:
    """Return a diffusers/PEFT file's tensors: "<transformer or unet>.<layer>.lora_A.weight", "lora_B.weight".

    Raises ValueError for a family or a layer without diffusers names, and for anything but plain LoRA.
    """
    export = _export(family)
    tensors: dict[str, Tensor] = {}
    for path, values in layers.items():
        if set(values) - {ALPHA} != {DOWN, UP}:
            raise ValueError(
                f"{path}: diffusers knows plain LoRA only, and this layer holds {', '.join(sorted(values))}; "
                "save it in the ComfyUI format. Resize LoRA makes plain LoRA of LoHa and LoKr."
            )
        down, up = values[DOWN], values[UP].float()
        up = up * (float(values[ALPHA]) / len(down) if ALPHA in values else 1.0)
        for prefix, part in _parts(export, path, (len(up), *down.shape[1:])):
            rows = up[part.slice(down.shape[1], len(up))]
            name = f"{prefix}.{part.name}"
            tensors[f"{name}.lora_A.weight"] = down.clone()
            tensors[f"{name}.lora_B.weight"] = _fit(_swap(rows) if part.swapped else rows, down).to(
                down.dtype
            )
    return tensors


TEXT_ENCODERS = {"clip_l": "text_encoder", "clip_h": "text_encoder", "clip_g": "text_encoder_2"}
"""ComfyUI's names of text encoders -> diffusers'; within them the names are the same."""


def _parts(export: Export, path: str, shape: tuple[int, ...]) -> list[tuple[str, Part]]:
    if not is_text(path):
        return [(export.prefix, part) for part in export.parts(path, shape)]
    encoder, _, inner = path.removeprefix(TEXT).partition(".transformer.")
    return [(TEXT_ENCODERS[encoder], Part(inner))]


def _fit(up: Tensor, down: Tensor) -> Tensor:
    return up.reshape(*up.shape[:2], *(1,) * (down.ndim - 2)).contiguous().clone()


def _swap(rows: Tensor) -> Tensor:
    first, second = rows.chunk(2)
    return torch.cat((second, first))


def _export(family: Family) -> Export:
    if not family.export:
        raise ValueError(f"{family.name} has no diffusers names here; save its LoRA in the ComfyUI format.")
    return EXPORTS[family.export]


@dataclass(frozen=True)
class Export:
    """How diffusers names the layers of one architecture."""

    prefix: str
    names: Callable[[str, tuple[int, ...]], Iterable[Part]]
    """(native path, weight shape) -> its parts; none where diffusers has no such layer."""

    def parts(self, path: str, shape: tuple[int, ...]) -> list[Part]:
        """Raises ValueError for a layer that has no diffusers name."""
        found = list(self.names(path, shape))
        if not found:
            raise ValueError(
                f"{path}: diffusers has no layer for it; leave it out, or use the ComfyUI format."
            )
        return found


def _by_rules(rules: Mapping[str, tuple[str, ...]]) -> Callable[[str, tuple[int, ...]], Iterable[Part]]:
    """Names by regular expression over the native path: one, or those of its row blocks of the input's width.

    A name that ends in "~" has its halves swapped where the weight is two rows per input (shift and scale
    alone); one that ends in "+" takes all the rows that are left.
    """

    def names(path: str, shape: tuple[int, ...]) -> Iterable[Part]:
        for pattern, templates in rules.items():
            if match := re.fullmatch(pattern, path):
                for index, template in enumerate(templates):
                    rows = (
                        (0, 0) if len(templates) == 1 else (index, 0 if template.endswith("+") else index + 1)
                    )
                    swapped = template.endswith("~") and shape[0] == 2 * shape[1]
                    yield Part(match.expand(template.rstrip("+~")), rows, swapped)
                return

    return names


_SD3 = {
    r"joint_blocks\.(\d+)\.x_block\.(attn2?)\.qkv": tuple(
        rf"transformer_blocks.\1.\2.{name}" for name in ("to_q", "to_k", "to_v")
    ),
    r"joint_blocks\.(\d+)\.context_block\.attn\.qkv": tuple(
        rf"transformer_blocks.\1.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj")
    ),
    r"joint_blocks\.(\d+)\.x_block\.(attn2?)\.proj": (r"transformer_blocks.\1.\2.to_out.0",),
    r"joint_blocks\.(\d+)\.context_block\.attn\.proj": (r"transformer_blocks.\1.attn.to_add_out",),
    r"joint_blocks\.(\d+)\.x_block\.mlp\.fc1": (r"transformer_blocks.\1.ff.net.0.proj",),
    r"joint_blocks\.(\d+)\.x_block\.mlp\.fc2": (r"transformer_blocks.\1.ff.net.2",),
    r"joint_blocks\.(\d+)\.context_block\.mlp\.fc1": (r"transformer_blocks.\1.ff_context.net.0.proj",),
    r"joint_blocks\.(\d+)\.context_block\.mlp\.fc2": (r"transformer_blocks.\1.ff_context.net.2",),
    r"joint_blocks\.(\d+)\.x_block\.adaLN_modulation\.1": (r"transformer_blocks.\1.norm1.linear",),
    r"joint_blocks\.(\d+)\.context_block\.adaLN_modulation\.1": (
        r"transformer_blocks.\1.norm1_context.linear~",
    ),
    r"t_embedder\.mlp\.0": ("time_text_embed.timestep_embedder.linear_1",),
    r"t_embedder\.mlp\.2": ("time_text_embed.timestep_embedder.linear_2",),
    r"y_embedder\.mlp\.0": ("time_text_embed.text_embedder.linear_1",),
    r"y_embedder\.mlp\.2": ("time_text_embed.text_embedder.linear_2",),
    r"x_embedder\.proj": ("pos_embed.proj",),
    r"context_embedder": ("context_embedder",),
    r"final_layer\.adaLN_modulation\.1": ("norm_out.linear~",),
    r"final_layer\.linear": ("proj_out",),
}

_FLUX = {
    r"double_blocks\.(\d+)\.img_attn\.qkv": tuple(
        rf"transformer_blocks.\1.attn.{name}" for name in ("to_q", "to_k", "to_v")
    ),
    r"double_blocks\.(\d+)\.txt_attn\.qkv": tuple(
        rf"transformer_blocks.\1.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj")
    ),
    r"double_blocks\.(\d+)\.img_attn\.proj": (r"transformer_blocks.\1.attn.to_out.0",),
    r"double_blocks\.(\d+)\.txt_attn\.proj": (r"transformer_blocks.\1.attn.to_add_out",),
    r"double_blocks\.(\d+)\.img_mlp\.0": (r"transformer_blocks.\1.ff.net.0.proj",),
    r"double_blocks\.(\d+)\.img_mlp\.2": (r"transformer_blocks.\1.ff.net.2",),
    r"double_blocks\.(\d+)\.txt_mlp\.0": (r"transformer_blocks.\1.ff_context.net.0.proj",),
    r"double_blocks\.(\d+)\.txt_mlp\.2": (r"transformer_blocks.\1.ff_context.net.2",),
    r"double_blocks\.(\d+)\.img_mod\.lin": (r"transformer_blocks.\1.norm1.linear",),
    r"double_blocks\.(\d+)\.txt_mod\.lin": (r"transformer_blocks.\1.norm1_context.linear",),
    r"single_blocks\.(\d+)\.linear1": (
        *(rf"single_transformer_blocks.\1.attn.{name}" for name in ("to_q", "to_k", "to_v")),
        r"single_transformer_blocks.\1.proj_mlp+",
    ),
    r"single_blocks\.(\d+)\.linear2": (r"single_transformer_blocks.\1.proj_out",),
    r"single_blocks\.(\d+)\.modulation\.lin": (r"single_transformer_blocks.\1.norm.linear",),
    r"time_in\.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    r"time_in\.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    r"vector_in\.in_layer": ("time_text_embed.text_embedder.linear_1",),
    r"vector_in\.out_layer": ("time_text_embed.text_embedder.linear_2",),
    r"guidance_in\.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    r"guidance_in\.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    r"img_in": ("x_embedder",),
    r"txt_in": ("context_embedder",),
    r"final_layer\.adaLN_modulation\.1": ("norm_out.linear~",),
    r"final_layer\.linear": ("proj_out",),
}

_RESNET = {
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_UNET = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.2": "conv_out",
}


def _unet(path: str, shape: tuple[int, ...]) -> Iterable[Part]:
    """Names of U-Nets with two residual blocks a level (SD1.5, SD2, SDXL and what was pruned from it)."""
    if path in _UNET:
        return [Part(_UNET[path])]
    match = re.fullmatch(r"(input_blocks|middle_block|output_blocks)\.(\d+)\.(.+)", path)
    if not match:
        return []
    side, index, rest = match[1], int(match[2]), match[3]
    if side == "middle_block":
        block, at = "mid_block", index // 2
        inner = rest
        is_attention = index == 1
    else:
        index -= side == "input_blocks"
        block, at = f"{'down' if side == 'input_blocks' else 'up'}_blocks.{index // 3}", index % 3
        child, _, inner = rest.partition(".")
        if inner in ("op", "conv"):
            return [Part(f"{block}.{'downsamplers' if inner == 'op' else 'upsamplers'}.0.conv")]
        is_attention = child == "1"
    if is_attention:
        return [Part(f"{block}.attentions.{at}.{inner}")]
    return [Part(f"{block}.resnets.{at}.{_RESNET[inner]}")] if inner in _RESNET else []


EXPORTS: Mapping[str, Export] = {
    "sd3": Export("transformer", _by_rules(_SD3)),
    "flux": Export("transformer", _by_rules(_FLUX)),
    "unet": Export("unet", _unet),
}
"""By `Family.export`."""

FILE_FORMATS: Mapping[str, Callable[[TrainState, Family, torch.dtype], dict[str, Tensor]]] = {
    "ComfyUI (kohya)": lora_tensors,
    "diffusers (PEFT)": diffusers_tensors,
}
"""Names for people -> (state, family, dtype) -> the file's tensors."""
