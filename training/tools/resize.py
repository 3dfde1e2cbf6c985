"""Resize a LoRA: the best approximation of each layer in a lower rank, or the rank that keeps a share of it.

LoHa and LoKr become LoRA by it; DoRA keeps its magnitudes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from ..adapters.lora import thin_down
from ..lora_file import LoraFile, LoraLayer, read_lora, rounded
from ..lora_file.metadata import write_lora
from ..memory.precision import DTYPES
from .extract import size_line, size_metadata
from .files import check_output, unmatched_lines
from .low_rank import best_factors, best_of_product, check_size


def resize(
    file: LoraFile,
    *,
    rank: int | None = None,
    energy: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return the file's layers as LoRAs of at most `rank`, or that keep `energy` of each; alpha = rank.

    A layer whose rank is small enough already keeps it. Raises ValueError for a size that cannot be.
    """
    check_size(rank, energy)
    tensors: dict[str, Tensor] = {}
    for name, layer in file.layers.items():
        up, down = _resized(layer, rank, energy)
        found = {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(float(down.shape[0]))}
        if "dora_scale" in layer.tensors:
            found["dora_scale"] = layer.tensors["dora_scale"]
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in rounded(found, dtype).items()}
    return tensors


def _resized(layer: LoraLayer, rank: int | None, energy: float | None) -> tuple[Tensor, Tensor]:
    if layer.algorithm not in ("lora", "dora"):
        return best_factors(layer.product(), rank=rank, energy=energy)
    weights = {name: tensor.float() for name, tensor in layer.weights.items()}
    down = thin_down(weights)
    up, flat = best_of_product(layer.scale * weights["up"], down.flatten(1), rank=rank, energy=energy)
    return up.reshape(*up.shape, *(1,) * (down.ndim - 2)), flat.reshape(-1, *down.shape[1:])


def resize_file(
    lora: Path,
    output: Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    dtype: torch.dtype = torch.float16,
) -> str:
    """Write the LoRA `lora` in a lower rank; return a report. See `resize`."""
    check_output(output, [lora])
    file = read_lora(lora)
    tensors = resize(file, rank=rank, energy=energy, dtype=dtype)
    write_lora(output, tensors, {**file.metadata, **size_metadata(tensors)})
    return "\n".join([f"{output.name}: {size_line(tensors)}", *unmatched_lines(list(file.other))])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, help="largest rank of a layer")
    parser.add_argument("--energy", type=float, help="share of each layer to keep, such as 0.95")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp16")


def run(args: argparse.Namespace) -> None:
    dtype = DTYPES[args.dtype]
    print(resize_file(args.lora, args.output, rank=args.rank, energy=args.energy, dtype=dtype))
