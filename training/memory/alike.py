"""Alike blocks in an estimate: the first of them is computed, the others take its place in the timeline.

Two blocks are alike if their classes, settings, weights, adapters and inputs have the same types and shapes.
A stand-in makes outputs and input gradients of the right shapes; what the block computes and saves in between
is a piece of the timeline that the first one measured. So Flux's 57 blocks cost what three do, and the
estimate is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..adapters.build import Adapter
from ..frozen_base.frozen_layer import FrozenLayer
from ..frozen_base.replace_forward import set_forward
from .tensor_counter import LiveTensors, tensors_of

PLAIN = (bool, int, float, str, type(None))
"""Types of a module's own settings, and of arguments that decide what a block computes."""


@dataclass(frozen=True)
class Piece:
    """A stretch of a step."""

    change: int
    """Bytes alive at its end, less those at its beginning."""
    peak: int
    """Most bytes alive in it, less those at its beginning."""
    flops: int


@dataclass(frozen=True)
class Layout:
    """A tensor without its numbers."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool

    def empty(self) -> Tensor:
        """Return a tensor of this layout."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass
class Alike:
    """What one block measured for all that are alike."""

    forward: Piece
    result: Any
    """What it returned, with Ellipsis for each tensor."""
    outputs: Sequence[Layout]
    """These tensors."""
    saved: Sequence[bool]
    """Whether it saves each tensor among its arguments."""
    backward: Piece | None = None


class Timeline:
    """A step as pieces: measured ones, and references to those of a block that is measured once."""

    def __init__(self, live: LiveTensors) -> None:
        self.live = live
        self.pieces: list[Piece | Alike] = []
        """Measured pieces, and blocks whose backward pass is measured later."""
        self._begin()

    def _begin(self) -> None:
        self.live.peak = self._now = self.live.now
        self._flops = self.live.flops

    def end_piece(self) -> Piece:
        """End the piece that is being measured, and begin the next one."""
        live = self.live
        piece = Piece(live.now - self._now, live.peak - self._now, live.flops - self._flops)
        self.pieces.append(piece)
        self._begin()
        return piece

    @property
    def is_whole(self) -> bool:
        """Return whether every block that others refer to has had its backward pass."""
        return not any(isinstance(entry, Alike) and entry.backward is None for entry in self.pieces)

    def add_piece(self, piece: Piece | Alike) -> None:
        """Put a stand-in's piece here: its forward pass, or the backward pass of the block it stands for."""
        self.end_piece()
        self.pieces.append(piece)


def total(pieces: Sequence[Piece | Alike]) -> Piece:
    """Return pieces as one."""
    now = peak = flops = 0
    for entry in pieces:
        piece = entry.backward if isinstance(entry, Alike) else entry
        assert piece is not None
        peak = max(peak, now + piece.peak)
        now += piece.change
        flops += piece.flops
    return Piece(now, peak, flops)


@dataclass
class Blocks:
    """The blocks of one estimate, by what makes them alike."""

    timeline: Timeline
    known: dict[Hashable, Alike | None] = field(default_factory=dict)
    """None: such a block is computed each time."""

    def compute(self, structure: Hashable, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a block, or what stands for it."""
        key = (structure, _signature(args), tuple((n, _signature(v)) for n, v in kwargs.items()))
        inputs = list(tensors_of((*args, *kwargs.values())))
        # Without a gradient for its input, the end of a block's backward pass cannot be told.
        if not any(t.requires_grad for t in inputs) or (key in self.known and self.known[key] is None):
            return forward(*args, **kwargs)
        alike = self.known.get(key)
        if alike is not None:
            outputs = _StandIn.apply(self.timeline, alike, *inputs)  # type: ignore[no-untyped-call]
            return _fill(alike.result, iter(outputs))
        return self._measure(key, forward, args, kwargs, inputs)

    def _measure(
        self, key: Hashable, forward: Callable[..., Any], args: Any, kwargs: Any, inputs: list[Tensor]
    ) -> Any:
        """Compute a block between two marks, for those that are alike."""
        self.timeline.end_piece()
        border = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in inputs}
        users = [_count_users(tensor) for tensor in inputs]
        measured = _Backward(self.timeline, border)
        marked = _Mark.apply(measured.end, *inputs)  # type: ignore[no-untyped-call]
        versions = [tensor._version for tensor in marked]
        args, kwargs = _fill(_hollow((args, list(kwargs.values()))), iter(marked)), [*kwargs]
        result = forward(*args[0], **dict(zip(kwargs, args[1], strict=True)))
        outputs = list(tensors_of((result,)))
        made = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in outputs}
        is_pure = versions == [tensor._version for tensor in marked] and not made.keys() & border.keys()
        del args, marked  # whatever else uses the inputs' memory now saves them
        saved = [_count_users(tensor) > before for tensor, before in zip(inputs, users, strict=True)]
        again = _Mark.apply(measured.begin, *outputs)  # type: ignore[no-untyped-call]
        piece = self.timeline.end_piece()
        self.known[key] = None
        if is_pure and outputs:
            forward_piece = replace(piece, change=piece.change - sum(made.values()))
            measured.alike = Alike(forward_piece, _hollow(result), [*map(_layout, outputs)], saved)
            self.known[key] = measured.alike
        return _fill(_hollow(result), iter(again))


class _Backward:
    """Measures the backward pass of one block."""

    def __init__(self, timeline: Timeline, border: dict[StorageWeakRef, int]) -> None:
        self.timeline = timeline
        self.border = border
        """Storage -> bytes of the tensors that others share with the block: they live and die around a
        stand-in as around the block itself."""
        self.alike: Alike | None = None

    def begin(self, gradients: Sequence[Tensor | None]) -> None:
        """Note the gradients of the outputs."""
        self.timeline.end_piece()
        self.border.update({_storage(g): g.untyped_storage().nbytes() for g in gradients if g is not None})

    def end(self, gradients: Sequence[Tensor | None]) -> None:
        """Note the gradients of the inputs, and what the pass took."""
        piece = self.timeline.end_piece()
        died = sum(size for storage, size in self.border.items() if storage.expired())  # type: ignore[no-untyped-call, misc]
        made = {_storage(g): g.untyped_storage().nbytes() for g in gradients if g is not None}
        born = sum(size for storage, size in made.items() if storage not in self.border)
        if self.alike is not None:
            self.alike.backward = replace(piece, change=piece.change + died - born)


class _Mark(torch.autograd.Function):
    """The same tensors, for autograd other ones, and a call when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        same = tuple(
            torch.ops.aten._unsafe_view.default(t, t.shape) if t.requires_grad else t for t in tensors
        )
        ctx.mark_non_differentiable(*(t for t, given in zip(same, tensors, strict=True) if t is given))
        return same

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.call(gradients)
        return None, *gradients


class _StandIn(torch.autograd.Function):
    """Outputs and gradients of the right shapes, and the measured pieces in the timeline."""

    @staticmethod
    def forward(ctx: Any, timeline: Timeline, alike: Alike, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.timeline, ctx.alike, ctx.inputs = timeline, alike, [*map(_layout, inputs)]
        ctx.save_for_backward(*(t for t, saved in zip(inputs, alike.saved, strict=True) if saved))
        timeline.add_piece(alike.forward)
        outputs = tuple(layout.empty() for layout in alike.outputs)
        pairs = zip(outputs, alike.outputs, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, layout in pairs if not layout.needs_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.timeline.add_piece(ctx.alike)
        return None, None, *(layout.empty() if layout.needs_grad else None for layout in ctx.inputs)


@contextmanager
def compute_alike_once(
    timeline: Timeline,
    blocks: Mapping[str, nn.Module],
    layers: Mapping[str, FrozenLayer],
    adapters: Mapping[str, Adapter],
) -> Iterator[None]:
    """Compute only the first of alike `blocks`, by path, and put the others into the timeline."""
    known = Blocks(timeline)
    with ExitStack() as undo:
        for path, block in blocks.items():
            structure = _structure(path, block, layers, adapters)
            undo.callback(set_forward(block, partial(known.compute, structure, block.forward)))
        yield


def _structure(
    path: str, block: nn.Module, layers: Mapping[str, FrozenLayer], adapters: Mapping[str, Adapter]
) -> Hashable:
    """Return what two blocks share whose modules, weights and adapters have the same types and shapes."""
    parts: list[Hashable] = []
    for name, module in block.named_modules(prefix=path):
        layer, adapter = layers.get(name), adapters.get(name)
        kind = (
            None
            if layer is None
            else (layer.spec.kind, layer.spec.shape, layer.spec.quantized_bytes, layer.spec.format)
        )
        trained = (
            ()
            if adapter is None
            else (
                type(adapter),
                *((n, tuple(p.shape), p.requires_grad) for n, p in adapter.named_parameters()),
            )
        )
        parts.append((name[len(path) :], type(module), settings_and_shapes(module), kind, trained))
    return tuple(parts)


def settings_and_shapes(module: nn.Module) -> Hashable:
    """Return a module's plain attributes, the names of its own functions, and its tensors' shapes."""
    own = {**module._parameters, **module._buffers}
    shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in own.items() if t is not None)
    plain = tuple(each for each in vars(module).items() if isinstance(each[1], PLAIN))
    functions = tuple((n, getattr(f, "__qualname__", "")) for n, f in vars(module).items() if callable(f))
    return shapes, plain, functions


def _signature(value: Any) -> Hashable:
    """Return what two arguments share that make a block compute with tensors of the same shapes."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return (type(value), value) if isinstance(value, PLAIN) else (type(value),)


def _hollow(value: Any) -> Any:
    """Return `value` with Ellipsis for each tensor in its lists and tuples."""
    if isinstance(value, list | tuple):
        return _like(value, [_hollow(each) for each in value])
    return ... if isinstance(value, Tensor) else value


def _fill(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a hollow value with its tensors."""
    if isinstance(value, list | tuple):
        return _like(value, [_fill(each, tensors) for each in value])
    return next(tensors) if value is ... else value


def _like(value: Any, parts: list[Any]) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _layout(tensor: Tensor) -> Layout:
    return Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _count_users(tensor: Tensor) -> int:
    """Return how many tensors, also those that autograd saved, lie in this one's memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
