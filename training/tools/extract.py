"""Extraction of a LoRA from two models: the difference of their weights, layer by layer, at a chosen rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..files.lora.write import write_lora
from ..files.tensor_file import TensorFile
from ..model import OnProgress, no_progress
from ..user_error import UserError
from .checkpoint import kohya_prefix, places
from .files import check_output, left_out_lines
from .low_rank import best_factors, check_size


def extract(
    base: Mapping[str, Tensor],
    tuned: Mapping[str, Tensor],
    *,
    rank: int | None = None,
    energy: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    on_progress: OnProgress = no_progress,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return a kohya LoRA whose products are the best approximations of tuned - base, with alpha = rank, and
    the keys whose difference no LoRA can hold (biases, norms, the VAE).

    Two weights are read at a time and compared on `device`. Raises UserError when the models differ in shape,
    share no weight, or do not differ at all.
    """
    check_size(rank, energy)
    shared = [key for key in base if key in tuned]
    if not shared:
        raise UserError("the two models have no weight in common; give two checkpoints of the same kind.")
    tensors: dict[str, Tensor] = {}
    left_out: list[str] = []
    for index, key in enumerate(shared):
        on_progress(index, len(shared), key)
        before, after = base[key], tuned[key]
        if before.shape != after.shape:
            raise UserError(
                f"{key}: shape {tuple(before.shape)} in the base and {tuple(after.shape)} in the tuned model."
            )
        if not before.is_floating_point() or torch.equal(before, after.to(before.dtype)):
            continue
        layers = places(key, tuple(before.shape))
        if not layers:
            left_out.append(key)
        difference = after.to(device, torch.float32) - before.to(device, torch.float32)
        if not bool(torch.isfinite(difference).all()):
            raise UserError(
                f"{key}: holds infinite or NaN values in one of the models, which is damaged; choose another."
            )
        for place in layers:
            name = kohya_prefix(place.part, shared) + place.path.replace(".", "_")
            part = difference[place.first : place.first + place.rows]
            if not part.any():
                continue
            up, down = best_factors(part.flatten(1), rank=rank, energy=energy)
            tensors[f"{name}.lora_up.weight"] = up.reshape(*up.shape, *(1,) * (part.ndim - 2)).to(
                "cpu", dtype
            )
            tensors[f"{name}.lora_down.weight"] = down.reshape(-1, *part.shape[1:]).to("cpu", dtype)
            tensors[f"{name}.alpha"] = torch.tensor(float(up.shape[1]))
    if not tensors:
        raise UserError("the two models do not differ in any weight that a LoRA could hold.")
    return tensors, left_out


def extract_files(
    base: Path,
    tuned: Path,
    output: Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    dtype: torch.dtype = torch.float16,
    device: torch.device | None = None,
    on_progress: OnProgress = no_progress,
) -> str:
    """Write the LoRA that turns the checkpoint `base` into `tuned`; return a report. See `extract`."""
    check_output(output, [base, tuned])
    tensors, left_out = extract(
        TensorFile(base),
        TensorFile(tuned),
        rank=rank,
        energy=energy,
        dtype=dtype,
        device=device,
        on_progress=on_progress,
    )
    metadata = {**size_metadata(tensors), "graft_extracted": f"{tuned.name} - {base.name}"}
    write_lora(output, tensors, metadata)
    lines = left_out_lines(dict.fromkeys(left_out, "differ where no LoRA reaches"))
    return "\n".join([f"{output.name}: {size_line(tensors)}", *lines])


def size_metadata(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return sd-scripts' metadata of the size of a LoRA whose alpha is its rank."""
    largest = str(max(_ranks(tensors)))
    size = {"ss_network_dim": largest, "ss_network_alpha": largest}
    return {"ss_network_module": "networks.lora", "ss_network_args": "{}", **size}


def size_line(tensors: Mapping[str, Tensor]) -> str:
    """Return "<n> layers, rank <smallest> to <largest>"."""
    ranks = _ranks(tensors)
    return f"{len(ranks)} layers, rank {min(ranks)} to {max(ranks)}"


def _ranks(tensors: Mapping[str, Tensor]) -> list[int]:
    ends = ("lora_down.weight", "lora_A.weight")
    return [tensor.shape[0] for name, tensor in tensors.items() if name.endswith(ends)]
