"""A frozen layer with a low-rank difference as one function with a hand-written backward pass.

y = W x + b + scale * up (down x), for linear layers and convolutions. Saved for the backward pass are x,
which layers that read the same tensor (q, k and v) share, and the two float32 factors: neither W, which is
fetched again, nor W + scale * up @ down, nor down x, which is cheap to compute again. Both products are added
in place; the factors are cast to the compute dtype once a pass, `up` scaled before it is rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..frozen_base.frozen_layer import FrozenLayer


def can_fuse(layer: FrozenLayer) -> bool:
    """Return whether `low_rank` can compute this layer: linear, or a convolution of one group with padding
    in numbers."""
    options = layer.spec.options
    if layer.spec.kind.startswith("conv"):
        return options.get("groups", 1) == 1 and not isinstance(options.get("padding"), str)
    return layer.spec.kind == "linear"


def low_rank(layer: FrozenLayer, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Compute `layer.forward(x) + scale * layer.apply_low_rank(x, down, up)`.

    down is (rank, in, *kernel), up is (out, rank), both float32 whatever x is; differentiable in all three.
    """
    y: Tensor = _LowRank.apply(x, down, up, layer, scale)  # type: ignore[no-untyped-call]
    return y


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, layer: FrozenLayer, scale: float) -> Tensor:
        ctx.layer, ctx.scale = layer, scale
        ctx.save_for_backward(x, down, up)
        return layer.compute_once(lambda: _forward(layer, x, down, up, scale))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up = ctx.saved_tensors
        layer: FrozenLayer = ctx.layer
        small_down, small_up = down.to(x.dtype), _scaled(up, ctx.scale, x.dtype)
        if layer.spec.kind == "linear":
            gradients = _linear_backward(ctx, layer, grad, x, small_down, small_up)
        else:
            gradients = _conv_backward(ctx, layer, grad, x, small_down, small_up)
        grad_x, grad_down, grad_up = gradients
        if grad_up is not None:
            grad_up = grad_up.to(up.dtype)
            grad_up = grad_up if ctx.scale == 1 else grad_up.mul_(ctx.scale)
        return grad_x, grad_down, grad_up, None, None


def _forward(layer: FrozenLayer, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    y = layer.compute(x)
    h = layer.apply_weight(x, down.to(x.dtype))
    return _add_product(layer, y, h, _scaled(up, scale, x.dtype))


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of x, down and scale * up."""


def _linear_backward(
    ctx: Any, layer: FrozenLayer, grad: Tensor, x: Tensor, down: Tensor, up: Tensor
) -> Gradients:
    need_x, need_down, need_up = ctx.needs_input_grad[:3]
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    grad_h = grads @ up if need_x or need_down else None
    grad_x = grad_down = None
    if need_x:
        assert grad_h is not None
        grad_x = layer.input_gradient(grads, rows.shape).addmm_(grad_h, down).view(x.shape)
    if need_down:
        assert grad_h is not None
        grad_down = grad_h.T @ rows
    return grad_x, grad_down, grads.T @ (rows @ down.T) if need_up else None


def _conv_backward(
    ctx: Any, layer: FrozenLayer, grad: Tensor, x: Tensor, down: Tensor, up: Tensor
) -> Gradients:
    need_x, need_down, need_up = ctx.needs_input_grad[:3]
    grad_x = grad_up = None
    if need_up:
        h = layer.apply_weight(x, down)
        grad_up = torch.einsum("b o l, b r l -> o r", grad.flatten(2), h.flatten(2))
    grad_h = (up.T @ grad.flatten(2)).view(grad.shape[0], -1, *grad.shape[2:])
    thin_x, grad_down = _thin_gradients(layer, grad_h, x, down, (need_x, need_down))
    if need_x:
        assert thin_x is not None
        grad_x = layer.input_gradient(grad, x.shape).add_(thin_x)
    return grad_x, grad_down, grad_up


def _thin_gradients(
    layer: FrozenLayer, grad: Tensor, x: Tensor, down: Tensor, need: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of `down` in the convolution of x with `down`."""
    options, sides = layer.spec.options, down.ndim - 2
    stride, padding, dilation = (_each(options[name], sides) for name in ("stride", "padding", "dilation"))
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        grad, x, down, None, stride, padding, dilation, False, [0] * sides, 1, [*need, False]
    )[:2]


def _add_product(layer: FrozenLayer, y: Tensor, h: Tensor, up: Tensor) -> Tensor:
    """Add `up` applied to the channels of h to y in place, and return y; no one else may hold y."""
    if layer.spec.kind == "linear":
        rows, thin = y.view(-1, y.shape[-1]), h.view(-1, h.shape[-1])
        rows.addmm_(thin, up.T)
        return y
    return y.add_((up @ h.flatten(2)).view(y.shape))


def _scaled(up: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return up.to(dtype) if scale == 1 else (up * scale).to(dtype)


def _each(value: int | tuple[int, ...], sides: int) -> list[int]:
    return [value] * sides if isinstance(value, int) else list(value)
