"""The matrix: every adapter method, every kind of layer, and small helpers to put one on the other."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from graft.training.adapters.build import (
    Adapter,
    build_adapters,
    initialize,
    named_parameters,
    needs_base,
    select,
)
from graft.training.config import AdapterConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from graft.training.frozen_base.frozen_layer import FrozenLayer, LayerSpec
from graft.training.state import TrainState

METHODS = {
    "lora": {},
    "lora-rs": {"rslora": True},
    "lora-gaussian": {"init": "gaussian"},
    "lora-tucker": {"tucker": True},
    "pissa": {"init": "pissa"},
    "dora": {"algorithm": "dora"},
    "loha": {"algorithm": "loha"},
    "loha-tucker": {"algorithm": "loha", "tucker": True},
    "lokr": {"algorithm": "lokr", "rank": 2, "alpha": 1.0},
    "lokr-factor": {"algorithm": "lokr", "rank": 1, "alpha": 0.5, "factor": 2},
    "lokr-both": {"algorithm": "lokr", "rank": 1, "alpha": 0.5, "decompose_both": True, "factor": 4},
    "lokr-full": {"algorithm": "lokr", "full_matrix": True},
    "oft": {"algorithm": "oft"},
    "boft": {"algorithm": "boft", "rank": 6},
    "glora": {"algorithm": "glora"},
    "full": {"algorithm": "full"},
}
"""Name -> what differs from rank 3, alpha 1.5 (never equal, so that a lost alpha shows)."""

LAYERS = {
    "linear": lambda: (nn.Linear(16, 24), torch.randn(2, 5, 16)),
    "conv1d": lambda: (nn.Conv1d(16, 24, 3, stride=2, padding=1), torch.randn(2, 16, 9)),
    "conv2d": lambda: (nn.Conv2d(16, 24, 3, stride=2, padding=2, dilation=2), torch.randn(2, 16, 9, 7)),
    "conv2d-1x1": lambda: (nn.Conv2d(16, 24, 1, bias=False), torch.randn(2, 16, 3, 4)),
    "conv2d-groups": lambda: (nn.Conv2d(32, 24, 3, padding=1, groups=2), torch.randn(2, 32, 5, 5)),
    "conv1d-same": lambda: (nn.Conv1d(32, 24, 4, padding="same", groups=2), torch.randn(2, 32, 9)),
    "embedding": lambda: (nn.Embedding(24, 16), torch.tensor([[0, 3, 3, 23]])),
}
"""Name -> (module, input)."""


def adapter_config(method: str, **changes) -> AdapterConfig:
    return AdapterConfig(**{"rank": 3, "alpha": 1.5, "targets": "everything", **METHODS[method], **changes})


def frozen_layer(module: nn.Module, name: str = "net.layer") -> FrozenLayer:
    """Freeze a torch module as the engine does a base model's."""
    module.requires_grad_(False)

    def fetch(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return parameter.to(device, dtype)

    bias = partial(fetch, module.bias) if getattr(module, "bias", None) is not None else None
    return FrozenLayer(name, spec_of(module), module, partial(fetch, module.weight), bias)


def spec_of(module: nn.Module) -> LayerSpec:
    shape = tuple(module.weight.shape)
    has_bias = getattr(module, "bias", None) is not None
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        options = {key: getattr(module, key) for key in ("stride", "padding", "dilation", "groups")}
        return LayerSpec(f"conv{len(shape) - 2}d", shape, options, has_bias=has_bias)
    if isinstance(module, nn.Embedding):
        return LayerSpec("embedding", shape, {"padding_idx": None})
    return LayerSpec("linear", shape, has_bias=has_bias)


def case(method: str, layer: str, **changes) -> tuple[FrozenLayer, Adapter, Tensor]:
    """Return a frozen layer, a fresh adapter for it, and an input."""
    torch.manual_seed(0)
    module, x = LAYERS[layer]()
    frozen = frozen_layer(module)
    adapters = build_adapters({frozen.name: frozen.spec}, adapter_config(method, **changes))
    initialize(adapters, 0, {frozen.name: frozen})
    return frozen, adapters[frozen.name], x


def trained_case(method: str, layer: str, **changes) -> tuple[FrozenLayer, Adapter, Tensor]:
    """As `case`, with the adapter moved to where training might take it."""
    frozen, adapter, x = case(method, layer, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return frozen, adapter, x


def base_weight(layer: FrozenLayer) -> Tensor:
    return layer.weight(torch.float32, torch.device("cpu")).clone()


def merged_output(layer: FrozenLayer, adapter: Adapter, x: Tensor) -> Tensor:
    """The layer's own output had its weight been base + delta, and its bias as well."""
    base = base_weight(layer)
    bias = getattr(layer.module, "bias", None)
    if getattr(adapter, "bias", None) is not None:
        bias = bias + adapter.bias
    return layer.kind.apply(x, base + adapter.delta(base), bias, **layer.spec.options)


def train_config(adapter: AdapterConfig, **changes) -> TrainConfig:
    return TrainConfig(
        batch_size=2,
        seed=7,
        adapter=adapter,
        optimizer=OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(name="cosine", warmup_steps=2, total_steps=20),
        **changes,
    )


def fresh_state(denoiser, config: TrainConfig) -> TrainState:
    """Step 0 of a run."""
    adapters = build_adapters(select(denoiser.specs, denoiser.family, config.adapter), config.adapter)
    with denoiser.hold(torch.float32) as base:
        initialize(adapters, config.seed, base.layers if needs_base(adapters) else None)
    weights = {name: tensor.detach() for name, tensor in named_parameters(adapters).items()}
    return TrainState(0, config.adapter, denoiser.fingerprint, weights)
