"""Networks that change saved tensors in place: a detector of such changes, and copies that prevent harm.

Networks written for sampling save memory that way. Autograd notices and refuses, except in a recomputed
block: there torch's checkpoint hands on the tensors as they are by then, and the gradient is wrong. Here the
change is an error in every checkpointing mode, and such a network can be trained on copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from ..frozen_base.replace_forward import replaced

CHANGED = "modified by an inplace operation"
"""Part of autograd's message about a saved tensor."""
HOOK = "_recomputation_hook"
"""Name of torch's private hooks for a second pass. Without them, changes in a second pass go unnoticed."""


def is_changed_in_place(error: BaseException) -> bool:
    """Return whether autograd failed because a saved tensor was changed, which copies prevent."""
    return isinstance(error, RuntimeError) and CHANGED in str(error)


@contextmanager
def guard_saved_tensors(*, copies: bool) -> Iterator[None]:
    """Make autograd save copies, or else make the backward pass raise RuntimeError if a saved tensor changed.

    Autograd does the latter itself where nothing is recomputed; here it holds in a block's second pass too.
    """
    with ExitStack() as stack:
        if hasattr(checkpoint, HOOK):
            stack.enter_context(replaced(checkpoint, HOOK, partial(_SecondPass, copies)))
        if copies:
            stack.enter_context(saved_tensors_hooks(_copy, lambda tensor: tensor))
        yield


def copy_inputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block's `forward` on copies of its inputs, which a second pass needs unchanged.

    It is used in every mode, as otherwise gradients would be added up in another order.
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        return forward(*_own(args), **{name: _own(value) for name, value in kwargs.items()})

    return compute


_Hook: Any = getattr(checkpoint, HOOK, saved_tensors_hooks)


class _SecondPass(_Hook):  # type: ignore[misc]
    """torch's hooks that collect the tensors saved in a block's second pass, with copies or a check of them.

    A subclass, because of nested hooks only the innermost apply, and the block would be saved twice.
    """

    def __init__(self, as_copies: bool, *args: Any) -> None:
        super().__init__(*args)
        self.saved: list[tuple[Tensor, int]] = []
        save: Callable[[Tensor], Any] = self.pack_hook  # type: ignore[has-type]

        def save_and_note(tensor: Tensor) -> Any:
            tensor = _copy(tensor) if as_copies else tensor
            self.saved.append((tensor, tensor._version))
            return save(tensor)

        self.pack_hook = save_and_note

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        saved, self.saved = self.saved, []
        if any(tensor._version != version for tensor, version in saved):
            raise RuntimeError(f"a tensor that a block needs for its gradient has been {CHANGED}")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _own(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_own, value))
    return value.clone() if isinstance(value, Tensor) else value
