"""A frozen layer of the base model: the one place where a base weight is used during training.

`FrozenLayer.forward` fetches its weight in the forward pass and again in the backward pass, and autograd
saves neither. So the weight may be anywhere (on the device, quantized, in host memory, in a buffer that the
next layer overwrites), and gradients are still right: the gradient with respect to a frozen layer's input
needs only the weight.

Layer kinds are rows of `LAYER_KINDS`; adapters compute with `LayerKind.apply` and never ask for the kind.
A weight that is multiplied as it is stored, in 8 bits, comes as its two `Products` besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.grad
from torch import Tensor, nn
from torch.nn import functional as F

from .saved_activations import compute_once, is_worth_saving

Fetch = Callable[[torch.dtype, torch.device], Tensor]
"""fetch(dtype, device) -> the weight as an ordinary tensor, valid until the next fetch of any layer."""


@dataclass(frozen=True)
class LayerSpec:
    """A layer as an adapter needs to know it to be built: kind and shape, no weights."""

    kind: str
    shape: tuple[int, ...]
    """Shape of the weight: linear (out, in), convolution (out, in/groups, *kernel), embedding (entries,
    width)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Convolutions: stride, padding, dilation, groups. Embeddings: padding_idx."""
    quantized_bytes: int | None = None
    """Bytes of the weight where its file has quantized it; None for ordinary numbers."""
    has_bias: bool = False
    format: str | None = None
    """The 8-bit format that a quantized file's weight can be multiplied in; None if it has none."""

    @property
    def numel(self) -> int:
        """Number of elements of the weight."""
        return math.prod(self.shape)

    @property
    def is_pointwise(self) -> bool:
        """Whether the layer multiplies each position by one matrix: linear, or a 1x1 convolution."""
        if self.kind == "linear":
            return True
        plain = {"stride": 1, "padding": 0, "groups": 1}
        return set(self.shape[2:]) == {1} and all(
            set(value if isinstance(value, tuple) else (value,)) == {plain[name]}
            for name, value in self.options.items()
            if name in plain
        )


@dataclass(frozen=True)
class Products:
    """The products of a pointwise layer's weight as it is stored, without making it whole."""

    forward: Callable[[Tensor, Tensor | None], Tensor]
    """forward(x (n, in), bias) -> (n, out)"""
    backward: Callable[[Tensor], Tensor]
    """backward(grad (n, out)) -> (n, in)"""


@dataclass(frozen=True)
class LayerKind:
    """How one kind of layer applies a weight."""

    apply: Callable[..., Tensor]
    """apply(x, weight, bias, **options) -> y."""
    low_rank: Callable[..., Tensor]
    """low_rank(x, down, up, **options) -> `apply` with the weight up @ down, without forming that product.
    down is (rank, ...) in the shape of the weight, up is (out, rank)."""
    input_gradient: Callable[..., Tensor] | None
    """input_gradient(grad_y, weight, x_shape, **options) -> gradient of x; None where x is token ids."""
    scale_columns: Callable[..., Tensor]
    """scale_columns(f, x, change, **options) -> f(x) with every weight in f multiplied by 1 + change along
    its axis 1; f is linear in the weight, change is (weight.shape[1],). It takes the change and not the
    factor, as bf16 rounds factors near 1 to steps of 0.4 to 0.8 %."""
    mix_columns: Callable[..., Tensor]
    """mix_columns(f, x, source, left, right, **options) -> f(x) with every weight in f multiplied by
    1 + left @ right along its axis 1, without forming that product; left is (weight.shape[1], rank), right
    (rank, weight.shape[1]). What is added is computed from `source`: x, or x after dropout."""
    output_axis: int | None
    """Axis of y that axis 0 of the weight becomes; None where it becomes none."""


class FrozenLayer:
    """A layer with a frozen weight that is fetched at each use."""

    def __init__(
        self, name: str, spec: LayerSpec, module: nn.Module, weight: Fetch, bias: Fetch | None = None
    ):
        self.name = name
        self.spec = spec
        self.module = module
        self.weight = weight
        self.bias = bias
        self.products: Products | None = None
        """What the layer computes with instead of `weight`; the weight is still there to be read."""
        self.kind = LAYER_KINDS[spec.kind]
        self.is_saved = self.kind.input_gradient is not None and is_worth_saving(spec.shape)
        """Whether selective checkpointing saves the output."""

    def lend_weight(self, other: FrozenLayer) -> Callable[[], None]:
        """Use the weight and bias of `other`; return the function that drops them."""
        self.weight, self.bias, self.products = other.weight, other.bias, other.products

        def let_go() -> None:
            self.weight, self.bias, self.products = _let_go, None, None

        return let_go

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Compute the layer's output from x, differentiable with respect to x only.

        ComfyUI calls its embeddings with an `out_dtype`.
        """
        if out_dtype is not None:
            return self.forward(x).to(out_dtype)
        if self.kind.input_gradient is None or not (torch.is_grad_enabled() and x.requires_grad):
            return self.compute_once(lambda: self.compute(x))
        return _Frozen.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def output_axis(self) -> int | None:
        """Axis of the output along which a matrix times the weight is that matrix times the output."""
        return self.kind.output_axis if self.spec.options.get("groups", 1) == 1 else None

    def apply_weight(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute this kind of layer with another weight and bias; differentiable in all of them."""
        return self.kind.apply(x, weight, bias, **self.spec.options)

    def apply_low_rank(self, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Compute `apply_weight(x, up @ down)` without forming the product; differentiable in all three."""
        return self.kind.low_rank(x, down, up, **self.spec.options)

    def scale_columns(self, compute: Callable[[Tensor], Tensor], x: Tensor, change: Tensor) -> Tensor:
        """Compute `compute(x)` as if axis 1 of its weights were multiplied by 1 + change; a bias is not."""
        return self.kind.scale_columns(compute, x, change, **self.spec.options)

    def mix_columns(
        self, compute: Callable[[Tensor], Tensor], x: Tensor, source: Tensor, left: Tensor, right: Tensor
    ) -> Tensor:
        """Compute `compute(x)` as if its weights were multiplied by 1 + left @ right along axis 1; a bias is
        not. What that adds is computed from `source`."""
        return self.kind.mix_columns(compute, x, source, left, right, **self.spec.options)

    def compute_once(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of `compute`, this layer's output, or the one saved in the block's first pass."""
        return compute_once(compute) if self.is_saved else compute()

    def compute(self, x: Tensor) -> Tensor:
        """Compute the layer's output from x; if autograd is on, it saves the weight."""
        dtype, device = dtype_for(x), x.device
        bias = self.bias(dtype, device) if self.bias is not None else None
        if (products := self.products) is not None:
            return _no_view(self._by_rows(x, lambda rows: products.forward(rows, bias)))
        return _no_view(self.kind.apply(x, self.weight(dtype, device), bias, **self.spec.options))

    def input_gradient(self, grad: Tensor, x_shape: torch.Size) -> Tensor:
        """Return the gradient of an input of `x_shape` for the gradient of its output, in one dtype."""
        if self.products is not None:
            return self._by_rows(grad, self.products.backward)
        assert self.kind.input_gradient is not None
        weight = self.weight(grad.dtype, grad.device)
        return self.kind.input_gradient(grad, weight, x_shape, **self.spec.options)

    def _by_rows(self, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `multiply` of x's positions as rows; a convolution's channels are axis 1."""
        is_linear = self.spec.kind == "linear"
        positions = x if is_linear else x.movedim(1, -1)
        y = multiply(positions.reshape(-1, positions.shape[-1]))
        y = y.view(*positions.shape[:-1], y.shape[-1])
        return y if is_linear else y.movedim(-1, 1).contiguous()


def _let_go(dtype: torch.dtype, device: torch.device) -> Tensor:
    raise AssertionError("the base was given back")


def _no_view(y: Tensor) -> Tensor:
    """Return y so that a network may change it in place, which autograd forbids for views of a Function."""
    return torch.ops.aten._unsafe_view.default(y, y.shape)  # type: ignore[no-any-return]


class _Frozen(torch.autograd.Function):
    """y = layer(x) without saved tensors: the backward pass fetches the weight again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLayer) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        return layer.compute_once(lambda: layer.compute(x))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layer: FrozenLayer = ctx.layer
        return layer.input_gradient(grad, ctx.shape), None


def dtype_for(x: Tensor, of_ids: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype that a layer computes in for input x: that of x, or `of_ids` for token ids."""
    return x.dtype if x.is_floating_point() else of_ids


def _linear_low_rank(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return F.linear(F.linear(x, down), up)


def _linear_input_gradient(grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    return grad @ weight


def _conv(apply: Callable[..., Tensor], transposed: Callable[..., Tensor], spatial: int) -> LayerKind:
    def low_rank(x: Tensor, down: Tensor, up: Tensor, *, groups: int, **options: Any) -> Tensor:
        # Every group has its own inputs but all share `down`: only the product is a convolution.
        if groups > 1:
            weight = (up @ down.flatten(1)).reshape(-1, *down.shape[1:])
            return apply(x, weight, None, groups=groups, **options)
        return apply(apply(x, down, None, **options), up.reshape(*up.shape, *(1,) * (down.ndim - 2)))

    def input_gradient(grad: Tensor, weight: Tensor, shape: torch.Size, **options: Any) -> Tensor:
        if isinstance(options.get("padding"), str):  # "same", which torch.nn.grad does not know
            at_zero = weight.new_zeros(shape)
            return torch.func.vjp(lambda x: apply(x, weight, None, **options), at_zero)[1](grad)[0]  # type: ignore[no-any-return]
        return transposed(shape, weight, grad, **options)

    def scale_columns(
        f: Callable[[Tensor], Tensor], x: Tensor, change: Tensor, *, groups: int, **_: Any
    ) -> Tensor:
        return f(x.addcmul(x, change.repeat(groups).reshape(-1, *(1,) * spatial)))

    def mix_columns(
        f: Callable[[Tensor], Tensor],
        x: Tensor,
        source: Tensor,
        left: Tensor,
        right: Tensor,
        *,
        groups: int,
        **_: Any,
    ) -> Tensor:
        thin = torch.einsum(
            "n g i ..., r i -> n g r ...", source.reshape(len(source), groups, -1, *source.shape[2:]), right
        )
        return f(x + torch.einsum("n g r ..., i r -> n g i ...", thin, left).flatten(1, 2))

    return LayerKind(apply, low_rank, input_gradient, scale_columns, mix_columns, 1)


def _embedding(ids: Tensor, weight: Tensor, bias: None, *, padding_idx: int | None = None) -> Tensor:
    return F.embedding(ids, weight, padding_idx)


def _embedding_low_rank(ids: Tensor, down: Tensor, up: Tensor, *, padding_idx: int | None = None) -> Tensor:
    return F.embedding(ids, up, padding_idx) @ down


def _mix_embedding(
    f: Callable[[Tensor], Tensor], ids: Tensor, source: Tensor, left: Tensor, right: Tensor, **_: Any
) -> Tensor:
    y = f(ids)
    dtype = torch.promote_types(y.dtype, left.dtype)
    return y + y.to(dtype) @ left.to(dtype) @ right.to(dtype)


LAYER_KINDS: Mapping[str, LayerKind] = {
    "linear": LayerKind(
        F.linear,
        _linear_low_rank,
        _linear_input_gradient,
        lambda f, x, change: f(x.addcmul(x, change)),
        lambda f, x, source, left, right: f(x + F.linear(F.linear(source, right), left)),
        -1,
    ),
    "conv1d": _conv(F.conv1d, nn.grad.conv1d_input, 1),
    "conv2d": _conv(F.conv2d, nn.grad.conv2d_input, 2),
    "embedding": LayerKind(
        _embedding,
        _embedding_low_rank,
        None,
        lambda f, ids, change, **_: (y := f(ids)).addcmul(y, change),
        _mix_embedding,
        None,
    ),
}
