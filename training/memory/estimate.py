"""An estimate of a step's memory and operations, without computing it.

The model's own forward and backward pass runs on fake tensors, which have shapes and no numbers, with
adapters and checkpointing as in the run. Nothing else about the network needs to be known. Whole numbers are
real, as networks make shapes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from ..adapters.build import attach, build_adapters, draws
from ..adapters.strength import at_strength
from ..config import AdapterConfig, ObjectiveConfig
from ..frozen_base.frozen_layer import FrozenLayer, LayerSpec
from ..model import Batch, Denoiser, HeldBase
from ..objective.parts import parts_of
from .activation_checkpointing import checkpoint_blocks, repeated_blocks
from .alike import Timeline, compute_alike_once, total
from .offload import is_worth_moving, pinned_size
from .tensor_counter import LiveTensors, tensors_of
from .weight_store import UNPLACED, fake_products


@dataclass(frozen=True)
class StepEstimate:
    """The memory and operations of one micro-batch, without the weights of base and adapters."""

    saved: int
    """Bytes of saved activations between the forward and the backward pass."""
    peak: int
    """Peak bytes, gradients included."""
    flops: int
    """Floating-point operations of matrix products, convolutions and attention."""
    inputs: Sequence[Sequence[int]] = ()
    """Per block, the bytes of each input that "block-offload" moves to host memory."""
    loose: int = 0
    """Bytes of parameters that are no layer's weight (norms, biases, positions): not part of a step, but on
    the device in every plan."""

    @property
    def host(self) -> int:
        """Bytes of host memory for these inputs under "block-offload", whichever mode this is."""
        return sum(pinned_size(size) for sizes in self.inputs for size in sizes)

    def as_block_offload(self) -> StepEstimate:
        """Turn an estimate of "block" into one of "block-offload": one block's inputs at a time."""
        moved = [sum(sizes) for sizes in self.inputs]
        peak = self.peak - sum(moved) + max(moved, default=0)
        return replace(self, saved=self.saved - sum(moved), peak=peak)


@torch.enable_grad()
def estimate_step(
    denoiser: Denoiser,
    adapted: Mapping[str, LayerSpec],
    config: AdapterConfig,
    batch: Batch,
    mode: str,
    dtype: torch.dtype,
    *,
    copies: bool = False,
    alike: bool = True,
    compute: str = "full",
) -> StepEstimate:
    """Estimate a step over `batch` with adapters on the `adapted` layers and checkpointing `mode`.

    What the batch holds decides the parts of the loss (`parts_of`), which are computed one by one. `copies`
    is for networks that change saved tensors in place (`in_place.py`), `compute` is one of
    weight_store.COMPUTES. Of alike blocks only the first is computed (`alike.py`), unless `alike` is False.
    Block inputs that "block-offload" moves to host memory are not counted, on any device. Raises RuntimeError
    if shapes depend on floating-point numbers.
    """
    with ExitStack() as stack:
        base = stack.enter_context(denoiser.hold(dtype, UNPLACED))
        loose = loose_bytes(base)
        stack.enter_context(restore_attributes(base.module))
        # A real network counts as fake here, without a copy. That of `comfy/model/outline.py` is fake already
        # and keeps its own mode: tensors of two modes don't mix.
        stack.enter_context(_mode_of(base.module) or FakeTensorMode(allow_non_fake_inputs=True))
        for layer in base.layers.values():
            layer.weight = _fake_weight(layer, dtype, denoiser.device)
            layer.products = fake_products(
                layer.name, layer.spec, denoiser.family.blocks, compute, denoiser.device
            )
        stack.enter_context(draws(0, 0))  # dropout masks take memory
        with denoiser.device:
            adapters = build_adapters(adapted, config)
        stack.enter_context(attach(base.layers, adapters))
        units = denoiser.family.checkpointed
        # Nothing moves between fake devices: "block-offload" is counted as "block" and corrected at the end.
        on_device = "block" if mode == "block-offload" else mode
        stack.enter_context(checkpoint_blocks(base.module, units, on_device, copies=copies))
        inputs: list[list[int]] = []
        blocks = repeated_blocks(base.module, units)
        for block in blocks.values():
            stack.callback(block.register_forward_pre_hook(_record_inputs(inputs), with_kwargs=True).remove)
        x0 = torch.zeros(batch.latents.shape, device=denoiser.device)
        sigma = torch.full((len(x0),), 0.5, device=denoiser.device)
        # Fake mode covers one thread, and autograd would use one per device: text encoders may be on another.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        live = stack.enter_context(LiveTensors())
        stack.enter_context(_WithNumbers())  # type: ignore[no-untyped-call]
        timeline, between = Timeline(live), list[int]()
        for part in parts_of(batch, ObjectiveConfig()):
            inputs.clear()  # every part moves as much
            with ExitStack() as stands:
                stands.enter_context(at_strength(part.strength))
                if alike and not copies:
                    stands.enter_context(compute_alike_once(timeline, blocks, base.layers, adapters))
                loss = part.compute(denoiser, batch, x0, sigma, torch.zeros_like(x0), ObjectiveConfig())
                # Whatever is alive between the passes is what autograd saved for the second one.
                timeline.end_piece()
                between.append(len(timeline.pieces))
                loss.backward()  # type: ignore[no-untyped-call]
                timeline.end_piece()
    if not timeline.is_whole:  # nothing reads what the first of alike blocks computes
        return estimate_step(denoiser, adapted, config, batch, mode, dtype, copies=copies, alike=False)
    saved, step = max(total(timeline.pieces[:end]).change for end in between), total(timeline.pieces)
    estimate = StepEstimate(saved, step.peak, step.flops, inputs, loose)
    return estimate.as_block_offload() if mode == "block-offload" else estimate


def loose_bytes(base: HeldBase) -> int:
    """Return the bytes of a held network's parameters and buffers that are no layer's weight."""
    layers = {layer.module for layer in base.layers.values()}
    return sum(
        tensor.nbytes
        for module in base.module.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and not (name == "weight" and module in layers)
    )


@contextmanager
def restore_attributes(network: nn.Module) -> Iterator[None]:
    """Restore every module's attributes on exit: networks may cache tables that they compute once."""
    before = {module: dict(vars(module)) for module in network.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)


def _mode_of(network: nn.Module) -> FakeTensorMode | None:
    """Return the mode of a network that already consists of fake tensors; None for a real one."""
    first = next(network.parameters(), None)
    return first.fake_mode if isinstance(first, FakeTensor) else None


def _fake_weight(
    layer: FrozenLayer, dtype: torch.dtype, device: torch.device
) -> Callable[[torch.dtype, torch.device], Tensor]:
    fake = torch.empty(layer.spec.shape, dtype=dtype, device=device)
    return lambda wanted, device: fake if wanted == dtype else fake.to(wanted)


def _record_inputs(inputs: list[list[int]]) -> Callable[..., None]:
    """Return a hook that appends the bytes of those inputs of a block that would move to host memory."""

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return  # a pass of the base alone: nothing is saved
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        inputs.append([t.nbytes for t in tensors if is_worth_moving(t)])

    return note


class _WithNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes whole numbers and masks for real, so shapes may depend on them, as on a caption's length.

    A mask computed from fake numbers selects everything, which takes the most memory.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device  # a shortcut for half of all dispatched calls
        kwargs = dict(kwargs or {})
        # Real inputs alone (positions, lengths, masks): compute real outputs.
        if _is_real(args, kwargs):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        operation = function.overloadpacket
        # A mask selects an unknown number of elements: use positions, all of them if the mask is fake.
        if operation in INDEXING:
            args = (args[0], [part for index in args[1] for part in _positions(index)], *args[2:])
        # `if mask.any()` on fake numbers: take the branch that computes.
        if operation is torch.ops.aten._local_scalar_dense and args[0].dtype == torch.bool:
            return True
        return function(*args, **kwargs)


def _is_real(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation takes real masks or whole numbers only, or makes whole numbers."""
    tensors = list(tensors_of((*args, *kwargs.values())))
    if not tensors:
        return kwargs.get("dtype") in (torch.bool, torch.int32, torch.int64)
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return False
    return all(tensor.numel() <= MASK or not tensor.is_floating_point() for tensor in tensors)


MASK = 4096
"""Largest floating-point tensor that counts as a mask of a text; some encoders return such masks."""


def _positions(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return an index as it is, and a mask as the indices of the elements that it selects."""
    if index is None or index.dtype != torch.bool:
        return (index,)
    if not isinstance(index, FakeTensor):
        return torch.where(index)
    every = torch.arange(index.numel(), device=index.device)
    return tuple(torch.unravel_index(every, index.shape))


INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
