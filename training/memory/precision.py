"""Number formats: of the forward pass, and of the adapters' weights between optimizer steps.

Adapter weights and gradients are float32 unless the settings ask for bf16; optimizer steps always are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from .. import rng
from ..config import MemoryConfig
from ..family import block_of
from ..log import log
from ..model import Denoiser
from ..user_error import UserError
from .eight_bit import FORMATS, MULTIPLE, refusal
from .weight_store import is_multiplied

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compute_dtype(config: MemoryConfig, denoiser: Denoiser) -> torch.dtype:
    """Return the configured dtype; "auto" is the model's best one for its device.

    Raises UserError if the model cannot be computed in it.
    """
    if config.dtype == "auto":
        return denoiser.dtypes[0]
    dtype = DTYPES[config.dtype]
    if dtype not in denoiser.dtypes:
        can = ", ".join(name for name, each in DTYPES.items() if each in denoiser.dtypes)
        raise UserError(
            f"precision: {denoiser.family.name} cannot be computed in {config.dtype}, as its numbers become "
            f"NaN; set precision in Memory Settings to auto or one of {can}."
        )
    return dtype


def compute_format(config: MemoryConfig, denoiser: Denoiser) -> str:
    """Return the configured way to multiply, one of weight_store.COMPUTES; "auto" is "file" where the base's
    file is in 8 bits and the device multiplies faster so, else "full".

    Raises UserError if the device cannot multiply in the configured format, or in that of the file.
    """
    in_file = sorted({spec.format for spec in denoiser.specs.values() if spec.format is not None})
    if config.compute == "auto":
        return "file" if in_file and all(map(denoiser.is_faster, in_file)) else "full"
    if config.compute == "full":
        return "full"
    for name in dict.fromkeys((config.compute, *(format for format in in_file if format in FORMATS))):
        if reason := refusal(name, denoiser.device):
            whose = "" if name == config.compute else ", and the base's file is in that format"
            raise UserError(
                f"compute: {denoiser.device} cannot multiply {name} numbers{whose} ({reason}). Set compute "
                "in Memory Settings to 'full'."
            )
    _say_what_stays(config.compute, denoiser)
    return config.compute


def _say_what_stays(compute: str, denoiser: Denoiser) -> None:
    """Log once how many of the blocks' linear layers are not multiplied in 8 bits, and why."""
    blocks = denoiser.family.blocks
    left = [
        spec
        for path, spec in denoiser.specs.items()
        if block_of(path, blocks) is not None and spec.kind == "linear" and not is_multiplied(spec, compute)
    ]
    if left:
        _say_once(
            f"compute {compute}: {len(left)} linear layers of {denoiser.family.name} stay in full precision: "
            f"their sides are no multiples of {MULTIPLE}, or their file has quantized them in another way."
        )


@cache
def _say_once(message: str) -> None:
    log.info(message)


@contextmanager
def stepping_in_float32(parameters: Mapping[str, nn.Parameter], seed: int, step: int) -> Iterator[None]:
    """Let an optimizer see bf16 parameters and gradients as float32, then round parameters stochastically.

    Float32 parameters are left alone. The rounding is drawn from (seed, step, name).
    """
    small = {name: p for name, p in parameters.items() if p.dtype == torch.bfloat16}
    for parameter in small.values():
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.float()
        parameter.grad = None if gradient is None else gradient.float()
    try:
        yield
    finally:
        for name, parameter in small.items():
            parameter.grad = None
            # On the device, as there are as many draws as weights: equal on equal devices, as a resume needs.
            key = rng.generator(seed, step, "rounding", name).initial_seed()
            generator = torch.Generator(parameter.device).manual_seed(key)
            parameter.data = stochastic_bf16(parameter.data, generator)


def stochastic_bf16(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to one of the two nearest bf16 numbers at random, so that the mean is unchanged.

    Random bits are added below bf16's last bit, then cut off (Zamirai et al. 2020, arXiv:2010.06192, sec. 4).
    """
    noise = torch.randint(
        0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    bits = (values.contiguous().view(torch.int32) + noise) & -65536
    return torch.where(torch.isfinite(values), bits.view(torch.float32), values).to(torch.bfloat16)
