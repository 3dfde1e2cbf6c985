"""Methods whose files this ComfyUI does not apply to 16-bit weights, tried and not listed.

Load LoRA patches in float32 what fits on the GPU. What does not fit, and everything under dynamic VRAM, is
patched in the weight's own type, where the OFT and BOFT of ComfyUI 0.3.75 to 0.33.0 end in an error that is
logged, and the weight stays as it was.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import cache

import comfy.lora
import torch

from ...adapters.build import ADAPTERS
from ...config import AdapterConfig
from ...files.lora.write import layer_tensors
from ...frozen_base.frozen_layer import LayerSpec
from ...user_error import UserError


def require_applied(config: AdapterConfig) -> None:
    """Raise UserError for a method whose files this ComfyUI never applies."""
    for name in _failing(config) if _is_dynamic() else ():
        raise UserError(
            f"algorithm {name}: this ComfyUI would not apply the file. Under dynamic VRAM it patches weights "
            f"in 16 bits, where its {name} fails and leaves them unchanged. Start ComfyUI with "
            "--disable-dynamic-vram, or choose another algorithm, such as glora."
        )


def loader_notes(config: AdapterConfig) -> list[str]:
    """Return a sentence for every method whose files this ComfyUI applies only in part."""
    return [
        f"algorithm {name}: ComfyUI applies the file only to layers that it keeps on the GPU, at strength 1 "
        f"exactly; to those that do not fit, its {name} fails and logs an error. Merge Checkpoint writes it "
        "into a base for good."
        for name in _failing(config)
    ]


def _failing(config: AdapterConfig) -> list[str]:
    names = dict.fromkeys([config.algorithm, *(name for _, name in config.algorithms)])
    return [name for name in names if name in ADAPTERS and not _applies_in_16_bits(name)]


def _is_dynamic() -> bool:
    try:
        import comfy.memory_management as state
    except ImportError:  # before dynamic VRAM
        return False
    return bool(getattr(state, "aimdo_enabled", False))


@cache
def _applies_in_16_bits(name: str) -> bool:
    """Return whether ComfyUI's loader changes a bf16 weight by a file of this method, computing in bf16."""
    generator = torch.Generator().manual_seed(0)
    config = AdapterConfig(algorithm=name, rank=4)
    adapter = ADAPTERS[name](LayerSpec("linear", (16, 12)), config)
    weights = {n: torch.randn(p.shape, generator=generator) for n, p in adapter.named_parameters()}
    tensors = {f"x.{suffix}": tensor for suffix, tensor in layer_tensors(weights, config).items()}
    weight = torch.randn(16, 12, generator=generator).bfloat16()
    with _unlogged():
        patch = comfy.lora.load_lora(tensors, {"x": "x.weight"})["x.weight"]
        patches = [(1.0, patch, 1.0, None, None)]
        found = comfy.lora.calculate_weight(
            patches, weight.clone(), "x.weight", intermediate_dtype=weight.dtype
        )
    return not torch.equal(found, weight)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
