"""What a step will keep and compute, found without computing it.

The model's own forward and backward pass runs on fake tensors, which have shapes and no numbers, with the
adapters attached and the blocks checkpointed as they will be. Nothing is known of the network but that. Whole
numbers are real: networks make shapes of them.
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
from ..config import AdapterConfig
from ..model import Batch, Denoiser, HeldBase
from ..network.frozen_layer import FrozenLayer, LayerSpec
from ..objective.loss import loss_at
from .activation_checkpointing import checkpoint_blocks, repeated_blocks
from .offload import is_worth_moving, pinned_size
from .tensor_counter import LiveTensors, tensors_of
from .weight_store import UNPLACED


@dataclass(frozen=True)
class StepEstimate:
    """One step of one micro-batch, beyond the weights of base and adapters."""

    saved: int
    """Bytes between the forward and the backward pass."""
    peak: int
    """Bytes at the worst moment, gradients included."""
    flops: int
    """Floating-point operations of products, convolutions and attention."""
    inputs: Sequence[Sequence[int]] = ()
    """Bytes of each input, for each block, that "block-offload" moves to host memory."""
    loose: int = 0
    """Bytes of what the network has beside its layers' weights (norms, biases, positions): not of a step, but
    on the device by every plan."""

    @property
    def host(self) -> int:
        """Bytes of host memory that "block-offload" takes for them, in whichever mode this is."""
        return sum(pinned_size(size) for sizes in self.inputs for size in sizes)

    def as_block_offload(self) -> StepEstimate:
        """Return this estimate of "block" as one of "block-offload", one block's inputs at a time."""
        moved = [sum(sizes) for sizes in self.inputs]
        peak = self.peak - sum(moved) + max(moved, default=0)
        return replace(self, saved=self.saved - sum(moved), peak=peak)


@torch.inference_mode(False)
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
) -> StepEstimate:
    """Return what a step over `batch` takes with adapters on the `adapted` layers, checkpointed by `mode`,
    and `copies` kept where it changes in place what its backward pass needs.

    Block inputs that "block-offload" moves to host memory are left out, whichever device this is.
    Raises RuntimeError where shapes depend on floating-point numbers.
    """
    with ExitStack() as stack:
        base = stack.enter_context(denoiser.hold(dtype, UNPLACED))
        loose = loose_bytes(base)
        stack.enter_context(restore_attributes(base.module))
        stack.enter_context(_mode_of(base.module) or FakeTensorMode(allow_non_fake_inputs=True))
        for layer in base.layers.values():
            layer.weight = _fake_weight(layer, dtype, denoiser.device)
        stack.enter_context(draws(0, 0))  # dropout takes memory
        with denoiser.device:
            adapters = build_adapters(adapted, config)
        stack.enter_context(attach(base.layers, adapters))
        units = denoiser.family.checkpointed
        on_device = "block" if mode == "block-offload" else mode
        stack.enter_context(checkpoint_blocks(base.module, units, on_device, copies=copies))
        inputs: list[list[int]] = []
        for block in repeated_blocks(base.module, units).values():
            stack.callback(block.register_forward_pre_hook(_record_inputs(inputs), with_kwargs=True).remove)
        x0 = torch.zeros(batch.latents.shape, device=denoiser.device)
        sigma = torch.full((len(x0),), 0.5, device=denoiser.device)
        # Fake tensors are for one thread; text encoders in training put nodes on two devices into the graph.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        live = stack.enter_context(LiveTensors())
        stack.enter_context(_WithNumbers())  # type: ignore[no-untyped-call]
        loss = loss_at(denoiser, batch, x0, sigma, torch.zeros_like(x0))
        saved = live.now
        loss.backward()  # type: ignore[no-untyped-call]
    estimate = StepEstimate(saved, live.peak, live.flops, inputs, loose)
    return estimate.as_block_offload() if mode == "block-offload" else estimate


def loose_bytes(base: HeldBase) -> int:
    """Return the bytes of the parameters and buffers of a held network that are no layer's weight."""
    layers = {layer.module for layer in base.layers.values()}
    return sum(
        tensor.nbytes
        for module in base.module.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and not (name == "weight" and module in layers)
    )


@contextmanager
def restore_attributes(network: nn.Module) -> Iterator[None]:
    """Restore every module's attributes afterwards: networks may keep tables that they compute once."""
    before = {module: dict(vars(module)) for module in network.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)


def _mode_of(network: nn.Module) -> FakeTensorMode | None:
    """Return the mode of a network that is made of fake tensors already; None for a real one."""
    first = next(network.parameters(), None)
    return first.fake_mode if isinstance(first, FakeTensor) else None


def _fake_weight(
    layer: FrozenLayer, dtype: torch.dtype, device: torch.device
) -> Callable[[torch.dtype, torch.device], Tensor]:
    fake = torch.empty(layer.spec.shape, dtype=dtype, device=device)
    return lambda wanted, device: fake if wanted == dtype else fake.to(wanted)


def _record_inputs(inputs: list[list[int]]) -> Callable[..., None]:
    """Return a hook that appends the bytes of each of a block's inputs that would wait in host memory."""

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        inputs.append([t.nbytes for t in tensors if is_worth_moving(t)])

    return note


class _WithNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes whole numbers and masks for real, so that shapes may depend on them: on the length of a
    caption, say. A mask that comes of fake numbers selects everything, the most that it can keep.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device  # half of all that is dispatched
        kwargs = dict(kwargs or {})
        if _is_real(args, kwargs):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        operation = function.overloadpacket
        if operation in INDEXING:
            args = (args[0], [part for index in args[1] for part in _positions(index)], *args[2:])
        if operation is torch.ops.aten._local_scalar_dense and args[0].dtype == torch.bool:
            return True
        return function(*args, **kwargs)


def _is_real(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation is on real masks or whole numbers alone, or makes whole numbers."""
    tensors = list(tensors_of((*args, *kwargs.values())))
    if not tensors:
        return kwargs.get("dtype") in (torch.bool, torch.int32, torch.int64)
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return False
    return all(tensor.numel() <= MASK or not tensor.is_floating_point() for tensor in tensors)


MASK = 4096
"""Most elements of a text's mask; encoders give it as floating-point numbers too."""


def _positions(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return an index as it is, and a mask as the index of each element that it selects."""
    if index is None or index.dtype != torch.bool:
        return (index,)
    if not isinstance(index, FakeTensor):
        return torch.where(index)
    every = torch.arange(index.numel(), device=index.device)
    return tuple(torch.unravel_index(every, index.shape))


INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
