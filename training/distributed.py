"""Several processes, on one machine or many, that train one run together.

The processes take turns at a step's micro-batches and add up their gradients, so K processes do what one does
with the same settings: draws are keyed by the micro-batch, not by the process. Then each takes the same
optimizer step. Rank 0 keeps the run; the others hold copies.

In a single process, every function here returns what it is given.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .signals import raise_if_asked

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""How long a process waits for the others: one may be encoding images or drawing samples."""

POLL_SECONDS = 2e-4


def rank() -> int:
    """Return the rank of this process; 0 keeps the run."""
    return dist.get_rank() if _is_distributed() else 0


def world() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if _is_distributed() else 1


@contextmanager
def join_processes(device: torch.device) -> Iterator[None]:
    """Train together with the processes that torchrun started; `device` is where gradients are.

    After an error, leave without waiting for the others: torchrun ends them with this process.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE, **_rendezvous())
    yield
    dist.destroy_process_group()


def sum_gradients(parameters: Mapping[str, nn.Parameter], total: float, images: int) -> tuple[float, int]:
    """Add up the gradients of all processes in place, in fp32; return the sums of their losses and images.

    A parameter without a gradient in any process still has none.
    """
    if world() == 1:
        return total, images
    device = next(iter(parameters.values())).device
    counts = torch.tensor([total, images], dtype=torch.float64, device=device)
    # One flat tensor, one all-reduce: first in how many processes each parameter has a gradient, then these.
    present = [torch.tensor(float(p.grad is not None), device=device) for p in parameters.values()]
    gradients = [_gradient(p).flatten() for p in parameters.values()]
    flat = torch.cat([torch.stack(present), *gradients])
    for tensor in (counts, flat):
        _wait(dist.all_reduce(tensor, async_op=True))
    sizes = [len(present), *(parameter.numel() for parameter in parameters.values())]
    processes, *sums = torch.split(flat, sizes)
    for parameter, count, gradient in zip(parameters.values(), processes.tolist(), sums):
        if count:
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
    return float(counts[0]), int(counts[1])


def share(value: T) -> T:
    """Return rank 0's `value` in every process."""
    if world() == 1:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0, device=_device())
    shared: T = values[0]
    return shared


def take_smallest(value: int | None) -> int | None:
    """Return the smallest of all processes' values; None if none of them has one."""
    if world() == 1:
        return value
    values: list[int | None] = [None] * world()
    dist.all_gather_object(values, value)
    return min((each for each in values if each is not None), default=None)


def wait_for_all() -> None:
    """Wait until every process has called this."""
    if world() > 1:
        _wait(dist.all_reduce(torch.zeros(1, device=_device()), async_op=True))


def _rendezvous() -> dict[str, Any]:
    """Return arguments of `init_process_group` for processes that torchrun restarted on this machine: its
    store still holds the addresses of the lost ones, so each start gets a prefix. Across machines and at the
    first start, the environment variables suffice."""
    environment = os.environ
    start = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if start == "0" or environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]:
        return {}
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    size = int(environment["WORLD_SIZE"])
    store = dist.TCPStore(address, port, size, is_master=False)  # type: ignore[attr-defined]
    prefixed = dist.PrefixStore(start, store)  # type: ignore[attr-defined]
    return {"store": prefixed, "rank": int(environment["RANK"]), "world_size": size}


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _gradient(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    return torch.zeros_like(parameter, dtype=torch.float32) if grad is None else grad.float()


def _wait(work: Any) -> None:
    """Wait for the other processes, answering signals: a process that was lost never arrives."""
    while not work.is_completed():
        raise_if_asked()
        time.sleep(POLL_SECONDS)
    work.wait()
