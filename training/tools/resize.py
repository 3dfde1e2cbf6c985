"""Resize a LoRA: the best approximation of each layer at a lower rank, or at the rank that keeps a share.

Other methods and whole differences become LoRA; DoRA's magnitudes, tensors without a rank and methods that
multiply the base's weights (OFT, BOFT, GLoRA) stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..files.lora.names import FLAT_PREFIXES
from ..files.lora.peft import ALPHA, DOWN, UP
from ..files.lora.read import MAGNITUDE, LoraFile, LoraLayer, read_lora
from ..files.lora.write import cast_tensors, write_lora
from ..user_error import UserError
from .extract import size_line, size_metadata
from .files import check_output
from .low_rank import best_factors, best_of_product, check_size


def resize(
    file: LoraFile,
    *,
    rank: int | None = None,
    energy: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return the file's layers as LoRAs of at most `rank`, or that keep `energy` of each; alpha = rank.

    A layer whose rank is small enough keeps it. Raises UserError for an impossible size.
    """
    check_size(rank, energy)
    layers = {n: layer for n, layer in file.layers.items() if not layer.method.multiplies_base}
    if not layers and not any(_is_matrix(whole) for whole in file.whole.values()):
        methods = ", ".join(sorted(set(file.methods.values())))
        raise UserError(
            f"{file.name}: nothing in it has a rank to lower; it holds {methods}. Merge it into its base, "
            "and extract a LoRA from the two."
        )
    tensors = without_rank(file)
    for name, layer in layers.items():
        try:
            up, down = _resize_layer(layer, rank, energy)
        except UserError as error:
            raise UserError(f"{file.name}: {name}: {error}") from error
        tensors |= _name_factors(name, up, down, layer.magnitude, dtype)
    for name, whole in file.whole.items():
        if _is_matrix(whole):
            matrix = whole["diff"].float()
            up, down = best_factors(matrix.flatten(1), rank=rank, energy=energy)
            kernel = (1,) * (matrix.ndim - 2)
            up, down = up.reshape(*up.shape, *kernel), down.reshape(-1, *matrix.shape[1:])
            tensors |= _name_factors(name, up, down, None, dtype)
    return tensors


def without_rank(file: LoraFile) -> dict[str, Tensor]:
    """Return the tensors that resizing leaves alone: biases, norms, methods that Graft does not compute or
    that multiply the base."""
    tensors = dict(file.other)
    for name, layer in file.layers.items():
        if layer.method.multiplies_base:
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in layer.tensors.items()}
    for other in file.others.values():
        tensors |= other.tensors
    for name, whole in file.whole.items():
        gone = ("diff", "alpha") if _is_matrix(whole) else ()
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in whole.items() if suffix not in gone}
    return tensors


def _is_matrix(whole: Mapping[str, Tensor]) -> bool:
    return "diff" in whole and whole["diff"].ndim >= 2


def _name_factors(
    name: str, up: Tensor, down: Tensor, magnitude: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    factors = {UP: up, DOWN: down, ALPHA: torch.tensor(float(down.shape[0]))}
    if magnitude is not None:
        factors[MAGNITUDE] = magnitude
    elif not name.startswith((*FLAT_PREFIXES, "lora_te")):  # PEFT's names go with PEFT's suffixes
        factors = {"lora_A.weight": down, "lora_B.weight": up}
    return {f"{name}.{suffix}": tensor for suffix, tensor in cast_tensors(factors, dtype).items()}


def _resize_layer(layer: LoraLayer, rank: int | None, energy: float | None) -> tuple[Tensor, Tensor]:
    factors = layer.two_factors()
    if factors is None:
        return best_factors(layer.product(), rank=rank, energy=energy)
    up, down = factors
    up, flat = best_of_product(layer.scale * up, down.flatten(1), rank=rank, energy=energy)
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
    lines = [f"{output.name}: {size_line(tensors)}"]
    if as_before := list(without_rank(file)):
        lines += [
            f"{len(as_before)} keys have no rank and are as before:",
            *(f"  {key}" for key in as_before),
        ]
    return "\n".join(lines)
