"""What every adapter method shares: choosing layers, sitting on them, and being named in a file.

A method says how its parameters make a weight difference; a layer kind says how a weight is applied
(`training.layer.LAYER_KINDS`). Neither knows the other, so N methods and M kinds are N + M pieces of code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..family import Family
from ..layer import FrozenLayer, LayerSpec

KINDS: Mapping[str, tuple[str, ...]] = {"all": ("linear", "conv1d", "conv2d")}
"""Layer kinds a target preset takes; linear alone where it is not listed."""


class Adapter(nn.Module):
    """The trained part beside one frozen layer. Parameters are float32, whatever the base computes in.

    A method implements `delta`, and `forward` where it can do better than forming the whole difference. Parameters
    are named as in the file (`suffixes`), so saving and loading need no code of the method's own.
    """

    suffixes: ClassVar[Mapping[str, str]]
    """Parameter name -> suffix of its key in a LoRA file."""

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__()
        self.spec = spec
        self.alpha = config.effective_alpha
        self.scale = config.effective_alpha / config.rank

    def initialise(self, generator: torch.Generator) -> None:
        """Set the parameters so that the adapter changes nothing yet and every one can learn."""
        raise NotImplementedError

    def delta(self) -> Tensor:
        """Return the difference to the base weight, float32, in the weight's shape."""
        raise NotImplementedError

    def forward(self, layer: FrozenLayer, x: Tensor) -> Tensor:
        """Compute the layer's output with the adapter in place."""
        return layer.forward(x) + layer.apply_weight(x, self.delta().to(compute_dtype(x)))


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a layer computes in for input x: its own, or float32 for token ids."""
    return x.dtype if x.is_floating_point() else torch.float32


def select(specs: Mapping[str, LayerSpec], family: Family, config: AdapterConfig) -> dict[str, LayerSpec]:
    """Return the layers to train, by module path, in the model's order.

    Raises ValueError when the preset is unknown or nothing matches, with names that exist.
    """
    if config.targets not in family.targets:
        raise ValueError(
            f"targets: {family.name} has no preset {config.targets!r}; choose one of {', '.join(family.targets)}."
        )
    kinds = KINDS.get(config.targets, ("linear",))
    preset = family.targets[config.targets]
    candidates = {n: s for n, s in specs.items() if s.kind in kinds and _matches(n, preset)}
    included = {n: s for n, s in candidates.items() if not config.include or _matches(n, config.include)}
    chosen = {n: s for n, s in included.items() if not _matches(n, config.exclude)}
    if not chosen:
        names = list(candidates or specs)
        examples = ", ".join(names[:: max(1, len(names) // 8)][:8])
        raise ValueError(
            f"no layer is left to train: targets {config.targets!r}, include {list(config.include)}, exclude "
            f"{list(config.exclude)} match none of the {len(names)} layers. Layers are named like {examples}."
        )
    return chosen


@contextmanager
def attach(layers: Mapping[str, FrozenLayer], adapters: Mapping[str, Adapter]) -> Iterator[None]:
    """Let each adapter compute its layer's output; the layers compute as before on every exit.

    Raises ValueError for an adapter whose layer is not there or has another shape.
    """
    for name, adapter in adapters.items():
        if name not in layers or layers[name].spec.shape != adapter.spec.shape:
            found = f"has shape {layers[name].spec.shape}" if name in layers else "does not exist"
            raise ValueError(
                f"{name}: the LoRA was made for a layer of shape {adapter.spec.shape}, which {found} in this base "
                "model; continue it on the base it was started on."
            )
    before = {name: layers[name].module.__dict__.get("forward") for name in adapters}
    try:
        for name, adapter in adapters.items():
            layers[name].module.forward = partial(adapter, layers[name])
        yield
    finally:
        for name, forward in before.items():
            if forward is None:
                layers[name].module.__dict__.pop("forward", None)
            else:
                layers[name].module.forward = forward


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
