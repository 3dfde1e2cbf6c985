"""Several processes, on one machine or many, that train one run together.

The rule: a step's micro-batches are dealt out to the processes in turn and their gradients are added up, so
K processes do what one does with the same settings; draws are keyed by the micro-batch, not by the process.
Each process then takes the same optimizer step. Rank 0 keeps the run; the others hold copies.

A single process needs none of this: every function here then returns what it is given.
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
"""How long a process waits for the others: one may be encoding images, or drawing samples."""

POLL_SECONDS = 2e-4


def rank() -> int:
    """Return the number of this process, 0 for the one that keeps the run."""
    return dist.get_rank() if _is_distributed() else 0


def world() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if _is_distributed() else 1


@contextmanager
def join_processes(device: torch.device) -> Iterator[None]:
    """Train together with the processes that torchrun started; `device` is where gradients are.

    After an error the others are not waited for: the end of the process tells them.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE, **_meeting_place())
    yield
    dist.destroy_process_group()


def sum_gradients(parameters: Mapping[str, nn.Parameter], total: float, images: int) -> tuple[float, int]:
    """Add up the gradients of all processes, in place; return the sums of their losses and images.

    A parameter that no process has a gradient for keeps none. Gradients are added in fp32.
    """
    if world() == 1:
        return total, images
    device = next(iter(parameters.values())).device
    counts = torch.tensor([total, images], dtype=torch.float64, device=device)
    held = [torch.tensor(float(p.grad is not None), device=device) for p in parameters.values()]
    grads = [_gradient(p).flatten() for p in parameters.values()]
    flat = torch.cat([torch.stack(held), *grads])
    for tensor in (counts, flat):
        _wait(dist.all_reduce(tensor, async_op=True))
    sizes = [len(held), *(parameter.numel() for parameter in parameters.values())]
    found, *pieces = torch.split(flat, sizes)
    for parameter, any_held, piece in zip(parameters.values(), found.tolist(), pieces):
        if any_held:
            parameter.grad = piece.view_as(parameter).to(parameter.dtype)
    return float(counts[0]), int(counts[1])


def share(value: T) -> T:
    """Return rank 0's `value` in every process; the others' are ignored."""
    if world() == 1:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0, device=_device())
    shared: T = values[0]
    return shared


def wait_for_all() -> None:
    """Return when every process has come here."""
    if world() > 1:
        _wait(dist.all_reduce(torch.zeros(1, device=_device()), async_op=True))


def _meeting_place() -> dict[str, Any]:
    """Return where processes of this machine meet that torchrun started again: its store still holds the
    addresses of those that were lost. Across machines and at a first start, the environment says all."""
    given = os.environ
    again = given.get("TORCHELASTIC_RESTART_COUNT", "0")
    if again == "0" or given.get("LOCAL_WORLD_SIZE") != given["WORLD_SIZE"]:
        return {}
    port, size = int(given["MASTER_PORT"]), int(given["WORLD_SIZE"])
    store = dist.TCPStore(given["MASTER_ADDR"], port, size, is_master=False)  # type: ignore[attr-defined]
    apart = dist.PrefixStore(again, store)  # type: ignore[attr-defined]
    return {"store": apart, "rank": int(given["RANK"]), "world_size": size}


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _gradient(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    return torch.zeros_like(parameter, dtype=torch.float32) if grad is None else grad.float()


def _wait(work: Any) -> None:
    """Wait for the other processes, and for a signal meanwhile: one that was lost never comes."""
    while not work.is_completed():
        raise_if_asked()
        time.sleep(POLL_SECONDS)
    work.wait()
