"""Number formats: of the forward pass, and of the adapter's weights between two optimizer steps.

Adapter weights and gradients are float32, unless the settings ask for bf16 weights; steps always are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .. import rng
from ..config import MemoryConfig

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compute_dtype(config: MemoryConfig, device: torch.device) -> torch.dtype:
    """Return the configured dtype.

    "auto" is bf16 where the device computes in it natively, fp16 (loss scaling) on older GPUs, else float32.
    """
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    return torch.bfloat16 if device.type == "xpu" else torch.float32


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
            # As many draws as weights, so on the device: equal on equal devices, which a resume asks for.
            key = rng.generator(seed, step, "rounding", name).initial_seed()
            generator = torch.Generator(parameter.device).manual_seed(key)
            parameter.data = stochastic_bf16(parameter.data, generator)


def stochastic_bf16(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to one of the two nearest bf16 numbers, the nearer the likelier: the mean is unchanged.

    Random bits below the last kept one are added, then cut (Zamirai et al. 2020, arXiv:2010.06192, sec. 4).
    """
    noise = torch.randint(
        0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    bits = (values.contiguous().view(torch.int32) + noise) & -65536
    return torch.where(torch.isfinite(values), bits.view(torch.float32), values).to(torch.bfloat16)
