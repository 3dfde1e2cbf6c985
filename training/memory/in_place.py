"""What autograd keeps, where a network goes on to change it in place.

Networks written for sampling save memory that way. Autograd notices, and refuses. It does not notice in a
block that is computed again: what the second pass keeps is handed on by torch's checkpoint as it is by then,
and the gradient is wrong. Here it is seen in every mode, and for such a network autograd can keep copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from ..network.replace_forward import replaced

CHANGED = "modified by an inplace operation"
"""What autograd says of a tensor that it kept."""
HOOK = "_recomputation_hook"
"""What torch's checkpoint calls the hooks of a second pass. They are its own, so they may go one day; then
nobody notices a change in there."""


def is_changed_in_place(error: BaseException) -> bool:
    """Return whether autograd failed as what it kept had been changed, which copies would prevent."""
    return isinstance(error, RuntimeError) and CHANGED in str(error)


@contextmanager
def guard_saved_tensors(*, copies: bool) -> Iterator[None]:
    """Let autograd keep copies, or see to it that what it keeps in a block's second pass is not changed.

    Where it is, the backward pass raises RuntimeError, as it does where nothing is computed again.
    """
    with ExitStack() as stack:
        if hasattr(checkpoint, HOOK):
            stack.enter_context(replaced(checkpoint, HOOK, partial(_SecondPass, copies)))
        if copies:
            stack.enter_context(saved_tensors_hooks(_copy, lambda tensor: tensor))
        yield


def copy_inputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block's `forward` computing with copies of its inputs: a second pass needs them as they were.

    In every mode, as gradients otherwise add up in another order.
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        return forward(*_own(args), **{name: _own(value) for name, value in kwargs.items()})

    return compute


_Hook: Any = getattr(checkpoint, HOOK, saved_tensors_hooks)


class _SecondPass(_Hook):  # type: ignore[misc]
    """By which torch's checkpoint takes what autograd would keep of a block that is computed again.

    Not hooks inside it: only the innermost ones apply, so the block would be kept twice.
    """

    def __init__(self, as_copies: bool, *args: Any) -> None:
        super().__init__(*args)
        self.taken: list[tuple[Tensor, int]] = []
        take: Callable[[Tensor], Any] = self.pack_hook  # type: ignore[has-type]

        def pack(tensor: Tensor) -> Any:
            tensor = _copy(tensor) if as_copies else tensor
            self.taken.append((tensor, tensor._version))
            return take(tensor)

        self.pack_hook = pack

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        taken, self.taken = self.taken, []
        if any(tensor._version != version for tensor, version in taken):
            raise RuntimeError(f"a tensor that a block needs for its gradient has been {CHANGED}")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _own(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_own, value))
    return value.clone() if isinstance(value, Tensor) else value
