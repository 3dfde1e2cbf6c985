"""Which number format the forward pass computes in. Adapter weights and their gradients are float32 throughout."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..config import MemoryConfig

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compute_dtype(config: MemoryConfig, device: torch.device) -> torch.dtype:
    """Return the configured dtype; "auto" is bf16 where the device computes in it natively, else float32."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native or device.type == "xpu" else torch.float32
