"""Streamed weights: through two buffers, one block ahead, and from their file."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from graft.tests.support.memory import CONFIG, Sized
from graft.tests.support.tiny import TinyDenoiser
from graft.training.config import MemoryConfig
from graft.training.files.mapped_file import MappedFile
from graft.training.files.tensor_file import TensorFile
from graft.training.frozen_base.frozen_layer import LayerSpec
from graft.training.memory import stream
from graft.training.memory.plan import MemoryPlan, candidates, make_estimator
from graft.training.memory.plan_table import format_plans
from graft.training.memory.quantize import plain
from graft.training.memory.weight_store import Store
from graft.training.user_error import UserError

CPU = torch.device("cpu")
SPEC = LayerSpec("linear", (64, 32))


class Module:
    """A device with streams, which writes down what is asked of it."""

    def __init__(self):
        self.log = []

    def Stream(self, device):  # noqa: N802
        return self

    def Event(self):  # noqa: N802
        log, number = self.log, len(self.log)

        class Event:
            def record(self, stream):
                log.append(("record", number, threading.current_thread().name))

            def synchronize(self):
                log.append(("synchronize", number))

        return Event()

    def current_stream(self, device):
        return self

    def wait_event(self, event):
        self.log.append(("wait",))

    def synchronize(self):
        self.log.append(("end",))

    @contextmanager
    def stream(self, stream):
        yield


@pytest.fixture
def module(monkeypatch):
    made = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    monkeypatch.setattr("graft.training.memory.weight_store.has_streams", lambda device: True)
    monkeypatch.setattr(stream, "pinned_bytes", lambda size: torch.empty(size, dtype=torch.uint8))
    return made


@pytest.fixture
def file(tmp_path):
    tensors = {f"blocks.{i}.mlp": torch.randn(64, 32) for i in range(4)}
    save_file(tensors, tmp_path / "base.safetensors")
    return MappedFile(TensorFile(tmp_path / "base.safetensors")), tensors


def test_blocks_pass_through_two_buffers_in_a_thread_and_their_pages_are_dropped(module, file, monkeypatch):
    mapped, tensors = file
    dropped, drop = [], MappedFile.drop
    monkeypatch.setattr(MappedFile, "drop", lambda self, tensor: dropped.append(tensor) or drop(self, tensor))
    store = Store("stream", ("blocks.*",), torch.float32, CPU, file=mapped)
    fetch = {name: store.make_fetch(name, SPEC, plain(mapped.tensors[name])) for name in tensors}
    for _ in range(2):
        for name, expected in tensors.items():
            assert torch.equal(fetch[name](torch.float32, CPU), expected)
    store.release()
    assert module.log[-1] == ("end",) and len(dropped) >= 8
    # Every buffer is filled again only after the device has read it, and the program does none of it.
    copies = [entry for entry in module.log if entry[0] == "record" and "graft stream" in entry[2]]
    waits = [entry for entry in module.log if entry[0] == "synchronize"]
    assert len(waits) == len(copies) - 2
    assert [number for _, number in waits] == [number for _, number, _ in copies[:-2]]


def test_the_next_block_is_read_while_one_is_used(module, file):
    mapped, tensors = file
    store = Store("stream", ("blocks.*",), torch.float32, CPU, file=mapped)
    fetch = {name: store.make_fetch(name, SPEC, plain(mapped.tensors[name])) for name in tensors}
    for name in (*tensors, *tensors, "blocks.0.mlp"):
        fetch[name](torch.float32, CPU)
    assert list(store.ring.on_the_way) == [("blocks.1.mlp", 0)]
    store.release()


def test_pages_of_a_block_are_dropped_once_another_is_used(file, monkeypatch):
    mapped, tensors = file
    dropped = []
    monkeypatch.setattr(MappedFile, "drop", lambda self, tensor: dropped.append(tensor.data_ptr()))
    store = Store("stream", ("blocks.*",), torch.float32, CPU, file=mapped)
    fetch = [store.make_fetch(name, SPEC, plain(mapped.tensors[name])) for name in tensors]
    place = [tensor.data_ptr() for tensor in mapped.tensors.values()]
    first = fetch[0](torch.float32, CPU)
    assert first.data_ptr() == place[0] and not dropped
    fetch[0](torch.float32, CPU)
    assert not dropped
    fetch[1](torch.float32, CPU)
    assert dropped == [place[0]] * 2


def test_dropped_pages_are_read_again(file):
    mapped, tensors = file
    for name, expected in tensors.items():
        mapped.drop(mapped.tensors[name])
        assert torch.equal(mapped.tensors[name], expected) and mapped.has(mapped.tensors[name])
    assert not mapped.has(torch.zeros(3))


def test_a_file_that_was_replaced_is_refused(file, tmp_path):
    mapped, tensors = file
    mapped.require_unchanged()
    save_file(tensors, tmp_path / "base.safetensors")
    with pytest.raises(UserError, match="base.safetensors: the file was changed or removed"):
        mapped.require_unchanged()


def test_a_base_in_its_file_is_streamed_where_it_would_be_offloaded():
    plans = candidates(MemoryConfig(), is_mapped=True)
    assert [plan.base for plan in plans] == ["resident"] * 4 + ["stream"] * 4
    assert "stream" not in [plan.base for plan in candidates(MemoryConfig())]


def test_a_streamed_base_takes_no_host_memory_but_buffers_and_the_plan_says_what_it_reads():
    denoiser = TinyDenoiser()
    estimate = make_estimator(denoiser, denoiser.specs, CONFIG, Sized().largest_batch(2))
    streamed, offloaded = (estimate(MemoryPlan(base, "block")) for base in ("stream", "offload"))
    assert streamed.peak == offloaded.peak and streamed.moved() == offloaded.moved() > 0
    assert streamed.host == 2 * max(spec.numel for spec in denoiser.specs.values()) * 4 != offloaded.host
    seconds = 0.5
    assert streamed.read_rate(streamed.step.flops / seconds) == pytest.approx(streamed.moved() / seconds)
    table = format_plans([offloaded, streamed], None, streamed.step.flops / seconds, 1.0).splitlines()
    assert "reads" not in table[1]
    assert table[2].endswith(f"reads {2 * streamed.moved() / (1 << 20):.1f} MiB/s")
