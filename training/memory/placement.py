"""The base on its devices during a run: by one memory plan, and by the next when memory runs out.

A step that ran out of memory is computed again by the next plan. Plans of one list only move data or compute
it twice, so the result is that of a larger device, bit for bit if kernels are deterministic. If compiling
fails, the run goes on without it; if the network changes saved tensors in place, with copies. A network that
autograd cannot differentiate is refused by name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

import torch
from torch.utils.checkpoint import CheckpointError

from ..adapters.build import Adapter, attach
from ..log import log
from ..model import Denoiser
from ..user_error import UserError
from .activation_checkpointing import checkpoint_blocks
from .compiling import Compiled, is_compile_error
from .device_memory import limit_memory, reset_peak
from .in_place import CHANGED, is_changed_in_place
from .offload import PinnedMemory
from .out_of_memory import is_out_of_memory
from .plan import MemoryPlan

NONDETERMINISTIC = "does not have a deterministic implementation"
"""Part of PyTorch's message about a nondeterministic kernel in deterministic mode."""

T = TypeVar("T")

UNDIFFERENTIABLE = (
    CHANGED,
    "modified inplace",
    "in-place operation",
    "trying to backward through",
    "derivative for",
    "does not require grad and does not have a grad_fn",
    "inference tensors cannot be saved for backward",
)
"""Autograd's messages about code it cannot differentiate: changes in place, operators without a backward."""


class Placement:
    """Context manager that holds the base with the adapters attached."""

    def __init__(
        self,
        denoiser: Denoiser,
        adapters: Mapping[str, Adapter],
        plans: Sequence[MemoryPlan],
        dtype: torch.dtype,
        most: int | None = None,
        *,
        hard_limit: bool = False,
        compile: bool = False,
    ) -> None:
        """Take the plans in order. The process may use `most` bytes of the device; under the last plan this
        limit holds only with `hard_limit`.
        """
        self.denoiser = denoiser
        self.adapters = adapters
        self.plans = list(plans)
        """The plans left to try; the first is in use."""
        self.dtype = dtype
        self.most = most
        self.hard_limit = hard_limit
        self.compile = compile
        """Whether to compile the blocks; False once that has failed."""
        self.copies = False
        """Whether autograd saves copies; True once the network has changed a saved tensor in place."""
        self._resources = ExitStack()
        self._pinned: PinnedMemory | None = None
        """The offloaded base in pinned host memory; it stays during `give_back`."""
        self._compiled = Compiled()

    @property
    def plan(self) -> MemoryPlan:
        return self.plans[0]

    def __enter__(self) -> Placement:
        while True:
            try:
                self._hold()
                return self
            except (RuntimeError, MemoryError) as error:
                remedy = self._remedy(error)
            remedy()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, error, trace)
        self._release_host()

    @contextmanager
    def give_back(self) -> Iterator[None]:
        """Give the base back to its owner during the context, as it was. Memory used there does not count as
        the run's.

        Compiled code stays, and so do pinned copies of the base unless host memory is short.
        """
        self._resources.close()
        if self._pinned is not None and self._pinned.is_short():
            self._release_host()
        yield
        reset_peak(self.denoiser.device)
        self.__enter__()

    def retry(self, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, called again with a remedy if it fails: the next plan if memory
        runs out, no compiling if that fails, copies if the network changes saved tensors.

        Gradients of failed attempts are dropped. Raises UserError if no plan is left or the network has no
        backward pass.
        """
        while True:
            try:
                return compute()
            except (RuntimeError, MemoryError) as error:
                remedy = self._remedy(error)
            # Outside the handler, where the traceback no longer keeps the failed step's tensors alive.
            for adapter in self.adapters.values():
                adapter.zero_grad()
            self.__exit__(None, None, None)
            remedy()
            self.__enter__()

    def _hold(self) -> None:
        with ExitStack() as resources:
            most = self.most if len(self.plans) > 1 or self.hard_limit else None
            resources.enter_context(limit_memory(most, self.denoiser.device))
            self._pinned = self._pinned or PinnedMemory(self.plan.offload.host_reserve)
            offload = replace(self.plan.offload, pinned=self._pinned)
            base = resources.enter_context(
                self.denoiser.hold(self.dtype, self.plan.base, offload, self.plan.compute)
            )
            resources.enter_context(attach(base.layers, self.adapters))
            units = self.denoiser.family.checkpointed
            if self.compile:
                resources.enter_context(self._compiled.compile_blocks(base, units))
            mode = self.plan.checkpointing
            resources.enter_context(checkpoint_blocks(base.module, units, mode, copies=self.copies))
            self._resources = resources.pop_all()

    def _remedy(self, error: RuntimeError | MemoryError) -> Callable[[], None]:
        """Return the change to make before the next attempt.

        Raises `error` if there is none, and UserError if memory ran out under the last plan, or the network
        cannot be differentiated or recomputed.
        """
        if self.compile and is_compile_error(error):
            log.warning("torch.compile failed; training goes on without it, slower. %s", error)
            return self._stop_compiling
        if is_changed_in_place(error) and not self.copies:
            return self._keep_copies
        refuse_undifferentiable(error, self.denoiser.family.name)
        if NONDETERMINISTIC in str(error):
            raise UserError(
                f"{self.denoiser.family.name} cannot be trained under --deterministic: its network has a "
                f"nondeterministic kernel ({error}). Start ComfyUI without --deterministic."
            ) from error
        if isinstance(error, CheckpointError):
            raise UserError(
                f"{self.denoiser.family.name} computed a block differently the second time: a node before "
                "Train Steps makes it random, as HyperTile does. Bypass that node, or set checkpointing in "
                "Memory Settings to 'none'."
            ) from error
        if not is_out_of_memory(error):
            raise error
        if len(self.plans) == 1:
            more = ", raise budget gb" if self.hard_limit else ""
            raise UserError(
                f"memory ran out with {self.plan}, the smallest plan that the settings allow. In Memory "
                f"Settings set checkpointing and base to 'auto', or base to 'fp8' or 'nf4'{more}; or use "
                "smaller images, a smaller batch or a lower rank."
            ) from error
        return self._drop_plan

    def _release_host(self) -> None:
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None

    def _stop_compiling(self) -> None:
        self.compile = False

    def _keep_copies(self) -> None:
        self.copies = True
        log.info("the network changes saved tensors in place; going on with copies of them.")

    def _drop_plan(self) -> None:
        self._release_host()
        gc.collect()
        failed = self.plans.pop(0)
        log.warning("memory ran out with %s; going on with %s.", failed, self.plan)


def refuse_undifferentiable(error: BaseException, name: str) -> None:
    """Raise UserError if `error` means that autograd cannot differentiate the network of family `name`."""
    if isinstance(error, RuntimeError) and any(message in str(error).lower() for message in UNDIFFERENTIABLE):
        raise UserError(
            f"{name} cannot be trained: autograd cannot differentiate this ComfyUI's code for its network "
            f"({error}). Update ComfyUI, or train another model."
        ) from error
