"""What every adapter method shares: sitting on a layer, its share of dropout, and being named in a file.

A method says how its parameters make a weight difference; a layer kind says how a weight is applied
(`frozen_layer.LAYER_KINDS`). Neither knows the other, so N methods and M kinds are N + M pieces of code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import AdapterConfig
from ..network.frozen_layer import FrozenLayer, LayerSpec, dtype_for
from ..network.replace_forward import set_forward
from ..user_error import UserError
from .dropout import Draw


class Adapter(nn.Module):
    """The trained part beside one frozen layer. Parameters are float32, whatever the base computes in, or
    bf16 where the optimizer settings say so.

    A method implements `compose`, and `difference` where it can do better than forming the whole of it.
    Parameters are named in the file by `suffixes`, so saving and loading need no code of the method's own.
    """

    suffixes: ClassVar[Mapping[str, str]]
    """Parameter name -> suffix of its key in a LoRA file."""
    starts_at_zero: ClassVar[tuple[str, ...]]
    """Parameters that `initialize` leaves at 0, but for PiSSA's: the ones that LoRA+ trains faster."""
    padded_with_zeros: ClassVar[tuple[str, ...]]
    """Parameters whose further rank components must be 0 for a larger rank to give the same difference."""
    needs_base: ClassVar[bool] = False
    """Whether `initialize` needs the base weight."""
    exact: ClassVar[tuple[str, ...]] = ()
    """Parameters near numbers of the base, whose small changes count: always float32."""

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        self.scale = config.effective_alpha / config.rank

    def initialize(self, generator: torch.Generator, base: Tensor | None = None) -> None:
        """Set the parameters so that the adapter changes nothing yet and every one can learn.

        `base` is the frozen weight in float32, for the methods that need it.
        """
        raise NotImplementedError

    @staticmethod
    def compose(weights: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        """Return the factors' product before scaling: (out, everything else) or in the weight's shape.

        `weights` are the parameters by name; `mask` (rank,) multiplies the rank components.
        """
        raise NotImplementedError

    @staticmethod
    def rank_in(weights: Mapping[str, Tensor]) -> int | None:
        """Return the rank that loaders divide alpha by; None where they apply the product at strength 1."""
        raise NotImplementedError

    def product(self, mask: Tensor | None = None) -> Tensor:
        """Return the scaled product of the factors in the weight's shape."""
        return self.scale * self.compose(dict(self.named_parameters()), mask).reshape(self.spec.shape)

    def delta(self, base: Tensor | None = None) -> Tensor:
        """Return the difference to the base weight, in its shape; DoRA must be given that weight."""
        return self.product()

    def factors(self) -> list[nn.Parameter]:
        """Return the parameters in each of which `product` is linear."""
        return list(self.parameters())

    def forward(self, layer: FrozenLayer, x: Tensor) -> Tensor:
        """Compute the layer's output with the adapter in place; dropout only inside `draws`."""
        draw = Draw(self.config, layer.name, x)
        if draw.leaves_out_module():
            return layer.forward(x)
        return layer.forward(x) + self.difference(layer, draw.inputs(), draw.ranks())

    def difference(self, layer: FrozenLayer, x: Tensor, mask: Tensor | None) -> Tensor:
        """Compute what the adapter adds to the layer's output.

        The backward pass forms the weight difference again: one as large as the weight is not kept.
        """

        def apply(x: Tensor, *parameters: Tensor) -> Tensor:
            return layer.apply_weight(x, self.product(mask).to(dtype_for(x, parameters[0].dtype)))

        if not torch.is_grad_enabled():
            return apply(x, *self.parameters())
        y: Tensor = checkpoint(apply, x, *self.parameters(), use_reentrant=False, preserve_rng_state=False)
        return y

    @classmethod
    def file_tensors(cls, weights: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, Tensor]:
        """Return what a LoRA file holds for one layer, by suffix, for `weights` by parameter name.

        "alpha" is always there: loaders take strength 1 without it, whatever was trained.
        """
        named = {cls.suffixes[name]: tensor for name, tensor in weights.items()}
        return {**named, "alpha": torch.tensor(config.effective_alpha)}

    @classmethod
    def from_file_tensors(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters by name that `file_tensors` gave, in shapes that `compose` takes."""
        names = {suffix: name for name, suffix in cls.suffixes.items()}
        return {names[suffix]: tensor for suffix, tensor in tensors.items() if suffix != "alpha"}


@contextmanager
def attach(layers: Mapping[str, FrozenLayer], adapters: Mapping[str, Adapter]) -> Iterator[None]:
    """Let each adapter compute its layer's output; the layers compute as before on every exit.

    Raises UserError for an adapter whose layer is not there or has another shape.
    """
    for name, adapter in adapters.items():
        if name not in layers or layers[name].spec.shape != adapter.spec.shape:
            found = f"has shape {layers[name].spec.shape}" if name in layers else "does not exist"
            raise UserError(
                f"{name}: the LoRA was made for a layer of shape {adapter.spec.shape}, which {found} in this "
                "base model; continue it on the base it was started on."
            )
    with ExitStack() as undo:
        for name, adapter in adapters.items():
            undo.callback(set_forward(layers[name].module, partial(_forward, adapter, layers[name])))
        yield


def _forward(adapter: Adapter, layer: FrozenLayer, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    y: Tensor = adapter(layer, x)
    return y if out_dtype is None else y.to(out_dtype)
