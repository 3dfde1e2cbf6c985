"""Extract a LoRA from two models: the difference of their weights, layer by layer, in the rank that is asked
for."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..lora_file import read_tensors, write_lora
from ..memory.precision import DTYPES
from .low_rank import best_factors, check_size
from .names import kohya_name

log = logging.getLogger(__name__)


def extract(
    base: Mapping[str, Tensor],
    tuned: Mapping[str, Tensor],
    *,
    rank: int | None = None,
    energy: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return a kohya LoRA whose products are the best approximations of tuned - base; alpha = rank.

    Differences that no LoRA can hold (biases, norms, the VAE) are logged. Raises ValueError when the models
    differ in shape, share no weight, or do not differ at all.
    """
    check_size(rank, energy)
    shared = [key for key in base if key in tuned]
    if not shared:
        raise ValueError("the two models have no weight in common; give two checkpoints of the same kind.")
    tensors: dict[str, Tensor] = {}
    left_out = []
    for key in shared:
        if base[key].shape != tuned[key].shape:
            raise ValueError(
                f"{key}: shape {tuple(base[key].shape)} in the base and {tuple(tuned[key].shape)} in the "
                "tuned model."
            )
        if not base[key].is_floating_point() or torch.equal(base[key], tuned[key].to(base[key].dtype)):
            continue
        name = kohya_name(key)
        if name is None or base[key].ndim < 2:
            left_out.append(key)
            continue
        difference = tuned[key].float() - base[key].float()
        up, down = best_factors(difference.flatten(1), rank=rank, energy=energy)
        kernel = (1,) * (difference.ndim - 2)
        tensors[f"{name}.lora_up.weight"] = up.reshape(*up.shape, *kernel).to(dtype)
        tensors[f"{name}.lora_down.weight"] = down.reshape(-1, *difference.shape[1:]).to(dtype)
        tensors[f"{name}.alpha"] = torch.tensor(float(up.shape[1]))
    if left_out:
        log.warning("Graft: %d differences that a LoRA cannot hold: %s", len(left_out), ", ".join(left_out))
    if not tensors:
        raise ValueError("the two models do not differ in any weight that a LoRA could hold.")
    return tensors


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", type=Path, help="the original model, .safetensors")
    parser.add_argument("tuned", type=Path, help="the fine-tuned model, .safetensors")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the LoRA")
    parser.add_argument("--rank", type=int, help="largest rank of a layer")
    parser.add_argument(
        "--energy", type=float, help="share of the difference to keep in each layer, such as 0.95"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp16")


def run(args: argparse.Namespace) -> None:
    base, tuned = read_tensors(args.base, finite=False)[0], read_tensors(args.tuned, finite=False)[0]
    tensors = extract(base, tuned, rank=args.rank, energy=args.energy, dtype=DTYPES[args.dtype])
    ranks = [tensor.shape[0] for name, tensor in tensors.items() if name.endswith("lora_down.weight")]
    metadata = {"ss_network_module": "networks.lora", "ss_network_dim": str(max(ranks))}
    write_lora(args.output, tensors, {**metadata, "graft_extracted": f"{args.tuned.name} - {args.base.name}"})
    print(f"{args.output.name}: {len(ranks)} layers, rank {min(ranks)} to {max(ranks)}")
