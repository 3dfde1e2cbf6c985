"""The base class of adapter methods: place on a layer, dropout, and the hooks for files and jobs.

A method says how its parameters make a weight difference; a layer kind says how a weight is applied
(`frozen_layer.LAYER_KINDS`). Neither knows the other, so N methods and M kinds are N + M pieces of code.
A new method is a file with its class and a row in `build.ADAPTERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import AdapterConfig
from ..frozen_base.frozen_layer import FrozenLayer, LayerSpec, dtype_for
from ..frozen_base.replace_forward import set_forward
from ..user_error import UserError
from .dropout import Draw
from .strength import apply_strength


class Adapter(nn.Module):
    """The trained part beside one frozen layer. Parameters are float32, whatever the base computes in, or
    bf16 where the optimizer settings say so.

    A method implements `initialize`, `compose` and `rank_in`, and `difference` where it can do better than
    forming the whole product. `suffixes` name its parameters in a file, so saving, loading, merging and
    resizing need no code of its own.
    """

    suffixes: ClassVar[Mapping[str, str]]
    """Parameter name -> suffix of its key in a LoRA file."""
    starts_at_zero: ClassVar[tuple[str, ...]]
    """Parameters that `initialize` sets to 0, except in PiSSA; LoRA+ trains these faster."""
    padded_with_zeros: ClassVar[tuple[str, ...]]
    """Parameters whose extra rank components must be 0 for a larger rank to give the same difference."""
    cores: ClassVar[tuple[str, ...]] = ()
    """Tucker cores: parameters with two rank axes, so no rank can be added to them."""
    needs_base: ClassVar[bool] = False
    """Whether `initialize` needs the base weight."""
    exact: ClassVar[tuple[str, ...]] = ()
    """Parameters close to the base's own numbers, whose small changes count: always float32."""
    default_alpha: ClassVar[float | None] = None
    """Alpha where the settings give none; None is the rank, so that the strength is 1."""
    is_plain: ClassVar[bool] = False
    """Whether its files are plain LoRA, two factors and alpha, which every program reads."""
    ranks_in_file: ClassVar[int] = 1
    """Rank of its files over the rank of the settings."""
    has_alpha: ClassVar[bool] = True
    """Whether alpha / rank is its strength; without, the strength is 1 and its files have no such alpha."""
    is_even_in_strength: ClassVar[bool] = True
    """Whether ComfyUI's loader applies a file at strength s as s times its difference, as sliders need it."""
    multiplies_base: ClassVar[bool] = False
    """Whether the difference is a function of the base weight: see `multiplied.Multiplied`."""
    network_types: ClassVar[Mapping[str, Mapping[str, bool]]] = {}
    """Other values of `network.type` in job files -> the switches that they set."""
    lycoris_names: ClassVar[tuple[str, ...]] = ()
    """Its other names in LyCORIS's presets, besides the one in ADAPTERS."""

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        self.scale = self.effective_alpha(config) / config.rank if self.has_alpha else 1.0
        if config.tucker and not self.cores:
            raise UserError(
                f"tucker is for LoRA and LoHa: ComfyUI applies no {config.algorithm} file with a Tucker "
                "core; turn it off."
            )

    @classmethod
    def effective_alpha(cls, config: AdapterConfig) -> float:
        """Return the alpha that the adapter is applied with: its strength is alpha / rank."""
        if config.rslora:
            return (config.alpha or RSLORA_ALPHA) * math.sqrt(config.rank)
        return config.alpha or cls.default_alpha or float(config.rank)

    def initialize(self, generator: torch.Generator, base: Tensor | None = None) -> None:
        """Set the parameters so that the adapter changes nothing yet and every parameter can learn: those in
        `starts_at_zero` to 0, the others Kaiming-uniform, as LyCORIS does.

        `base` is the frozen weight in float32, for methods that need it.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in self.starts_at_zero:
                    parameter.zero_()
                else:
                    nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)

    @staticmethod
    def compose(weights: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        """Return the factors' product before scaling: (out, everything else) or in the weight's shape.

        `weights` are the parameters by name; `mask` (rank,) multiplies the rank components. Raises KeyError
        for a parameter that is missing.
        """
        raise NotImplementedError

    @staticmethod
    def rank_in(weights: Mapping[str, Tensor]) -> int | None:
        """Return the rank that loaders divide alpha by; None where they apply the product at strength 1."""
        raise NotImplementedError

    @staticmethod
    def two_factors(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return up (out, rank) and down (rank, in, *kernel) where `compose` is their product, else None."""
        return None

    def product(self, mask: Tensor | None = None) -> Tensor:
        """Return the scaled product of the factors in the weight's shape."""
        return self.scale * self.compose(dict(self.named_parameters()), mask).reshape(self.spec.shape)

    def delta(self, base: Tensor | None = None) -> Tensor:
        """Return the difference to the base weight, in its shape; DoRA needs that weight."""
        return self.product()

    def factors(self) -> list[nn.Parameter]:
        """Return the parameters that `product` is linear in."""
        return list(self.parameters())

    def forward(self, layer: FrozenLayer, x: Tensor) -> Tensor:
        """Compute the layer's output with the adapter in place; dropout acts only inside `draws`."""
        draw = Draw(self.config, layer.name, x)
        if draw.leaves_out_module():
            return layer.forward(x)
        return layer.forward(x) + self.difference(layer, draw.inputs(), draw.ranks())

    def difference(self, layer: FrozenLayer, x: Tensor, mask: Tensor | None) -> Tensor:
        """Compute what the adapter adds to the layer's output.

        The backward pass forms the weight difference again, which is as large as the weight, so it is not
        saved.
        """

        def apply(x: Tensor, *parameters: Tensor) -> Tensor:
            return layer.apply_weight(x, self.product(mask).to(dtype_for(x, parameters[0].dtype)))

        return compute_without_saving(apply, x, *self.parameters())

    @classmethod
    def file_tensors(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's factors as a LoRA file holds them, by suffix, for `weights` by parameter name."""
        return {cls.suffixes[name]: tensor for name, tensor in weights.items()}

    @classmethod
    def from_file_tensors(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters in `tensors` by name, in shapes that `compose` takes; others are left out."""
        return {name: tensors[suffix] for name, suffix in cls.suffixes.items() if suffix in tensors}

    @classmethod
    def shape_in(cls, weights: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (outputs, everything else) of the weight that a file's parameters are for.

        Raises KeyError for a parameter that is missing, RuntimeError, IndexError or ValueError where they do
        not fit each other.
        """
        rows, columns = cls.compose(weights).flatten(1).shape
        return rows, columns

    @classmethod
    def other_form(cls, tensors: Mapping[str, Tensor]) -> str:
        """Return its name if `tensors`, by suffix, are a form of it that Graft does not compute; else ""."""
        return ""

    @classmethod
    def is_in(cls, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether `tensors` are of this method, where another has the same suffixes."""
        return True

    @classmethod
    def strength_factors(cls, names: Collection[str]) -> set[str]:
        """Return those of a file's parameters that take the ratio of two strengths: one of each product."""
        return set([name for name in cls.padded_with_zeros if name in names][:1])

    @classmethod
    def settings_of(
        cls, config: AdapterConfig, layers: Mapping[str, tuple[LayerSpec, Mapping[str, Tensor]]]
    ) -> AdapterConfig:
        """Return `config` with the method's own settings of a file's `layers`: path -> (layer, weights)."""
        return config

    def adapt_factors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a file's parameters of this method as those that this adapter has, whatever their rank."""
        return dict(weights)

    def complete(self, present: Collection[str], base: FrozenLayer | None) -> None:
        """Set parameters that the file of a parent class lacks, so that they change nothing.

        `present` are the names of the parameters that the file has, already set.
        """


def compute_without_saving(apply: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `apply(*inputs)`, computed again in the backward pass instead of saving what it needs."""
    if not torch.is_grad_enabled():
        return apply(*inputs)
    y: Tensor = checkpoint(apply, *inputs, use_reentrant=False, preserve_rng_state=False)
    return y


RSLORA_ALPHA = 4.0
"""Alpha of rsLoRA where the settings give none: strength 1 at rank 16."""


@contextmanager
def attach(layers: Mapping[str, FrozenLayer], adapters: Mapping[str, Adapter]) -> Iterator[None]:
    """Let each adapter compute its layer's output; the layers compute as before on every exit.

    Raises UserError for an adapter whose layer is missing or has another shape.
    """
    for name, adapter in adapters.items():
        if name not in layers or layers[name].spec.shape != adapter.spec.shape:
            actual = f"has shape {layers[name].spec.shape}" if name in layers else "does not exist"
            raise UserError(
                f"{name}: the LoRA was made for a layer of shape {adapter.spec.shape}, which {actual} in "
                "this base model; continue it on the base it was started on."
            )
    with ExitStack() as undo:
        for name, adapter in adapters.items():
            undo.callback(set_forward(layers[name].module, partial(_forward, adapter, layers[name])))
        yield


def _forward(adapter: Adapter, layer: FrozenLayer, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    y = apply_strength(partial(adapter, layer), layer.forward, x)
    return y if out_dtype is None else y.to(out_dtype)
