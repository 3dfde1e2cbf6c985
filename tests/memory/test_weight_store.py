"""Weights that are kept elsewhere or in fewer bits give the same training, or one within a stated error."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from graft.tests.support.adapter_cases import adapter_config, train_config
from graft.tests.support.memory import step_gradients
from graft.tests.support.tiny import TinyDataset, TinyDenoiser
from graft.training.config import MemoryConfig
from graft.training.frozen_base.frozen_layer import LayerSpec
from graft.training.loop import train
from graft.training.memory import offload
from graft.training.memory.offload import Ring, StreamCopier, in_backward_pass, offload_inputs
from graft.training.memory.quantize import FORMATS, SMALLEST, plain, quantize, scaled
from graft.training.memory.tensor_counter import LiveTensors
from graft.training.memory.weight_store import STORES, Store, weight_bytes
from graft.training.model import OffloadOptions

CPU = torch.device("cpu")
ERRORS = {"fp8": 0.03, "int8": 0.012, "nf4": 0.10}
"""As stated in quantize.py."""
BITS = {"fp8": 8.2, "int8": 8.2, "nf4": 4.2}


def weight(out=128, width=256):
    return torch.randn(out, width, generator=torch.Generator().manual_seed(0)) * 0.05


def error(value, exact):
    return ((value.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_quantizing_stays_within_its_stated_error(name, dtype):
    assert error(quantize(weight(), name, dtype).dequantize(dtype), weight()) <= ERRORS[name]


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_row_of_zeros_stays_zero(name):
    rows = weight().index_fill(0, torch.tensor([3]), 0.0)
    assert quantize(rows, name, torch.bfloat16).dequantize(torch.bfloat16)[3].eq(0).all()


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_packed_weight_takes_the_bytes_it_promises(name):
    assert quantize(weight(), name, torch.bfloat16).nbytes * 8 <= BITS[name] * weight().numel()


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_the_dequantized_base(name):
    """The layer computes with the rounded weight in both directions."""
    store = Store(name, ("blocks.*",), torch.float32, CPU)
    spec = LayerSpec("linear", (128, 256))
    fetch = store.make_fetch("blocks.0.mlp", spec, plain(weight()))
    assert torch.equal(fetch(torch.float32, CPU), fetch(torch.float32, CPU))
    assert 0 < error(fetch(torch.float32, CPU), weight()) <= ERRORS[name]


def test_only_large_linear_layers_of_blocks_are_rounded():
    store = Store("int8", ("blocks.*",), torch.float32, CPU)
    for path, out in (("embed", 128), ("blocks.0.small", SMALLEST // 256 - 1)):
        fetch = store.make_fetch(path, LayerSpec("linear", (out, 256)), plain(weight(out)))
        assert torch.equal(fetch(torch.float32, CPU), weight(out))


def test_what_a_file_rounded_to_eight_bits_is_not_rounded_again():
    small, scale = weight().to(torch.float8_e4m3fn), torch.tensor(2.0)
    store = Store("int8", ("blocks.*",), torch.float32, CPU)
    fetch = store.make_fetch(
        "blocks.0.mlp", LayerSpec("linear", (128, 256), quantized_bytes=32772), scaled(small, scale)
    )
    assert torch.equal(fetch(torch.float32, CPU), small.float() * 2)


@pytest.mark.parametrize("store", ["resident", "offload"])
def test_stores_that_only_move_data_are_bit_equal(store):
    denoiser, batch = TinyDenoiser(), TinyDataset().batch(2, seed=0, index=0)
    config = train_config(adapter_config("lora", targets="all"))
    hold = denoiser.hold
    expected = step_gradients(denoiser, batch, config)
    denoiser.hold = lambda dtype: hold(dtype, store)
    value, gradients = step_gradients(denoiser, batch, config)
    assert value == expected[0]
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected[1].items())


def test_an_unknown_store_is_refused_by_name():
    with pytest.raises(ValueError, match="base: 'fp7' is unknown; choose one of resident, fp8"):
        Store("fp7", (), torch.float32, CPU)


def test_offloaded_blocks_cost_two_of_them_on_the_device():
    specs = {f"blocks.{i}.mlp": LayerSpec("linear", (64, 64)) for i in range(10)}
    specs["embed"] = LayerSpec("linear", (64, 64))
    sizes = {store: weight_bytes(specs, ("blocks.*",), store, torch.bfloat16) for store in STORES}
    assert sizes["resident"] == 11 * 8192 and sizes["offload"] == 3 * 8192 and sizes["int8"] == 6 * 8192


def test_what_a_file_rounded_counts_as_the_file_has_it():
    specs = {f"blocks.{i}.mlp": LayerSpec("linear", (64, 64), quantized_bytes=4096) for i in range(10)}
    sizes = {store: weight_bytes(specs, ("blocks.*",), store, torch.bfloat16) for store in STORES}
    assert sizes == {
        "resident": 40960,
        "fp8": 40960,
        "int8": 40960,
        "nf4": 21145,
        "offload": 8192,
        "stream": 8192,
    }


class Logging:
    """A copier that copies nothing and remembers in which order it was asked."""

    def __init__(self):
        self.log = []

    def begin(self, host):
        self.log.append(("begin", int(host[0])))
        return host

    def finish(self, ticket):
        self.log.append(("finish", int(ticket[0])))
        return ticket

    def wait(self):
        self.log.append(("wait", None))


def ring(count, ahead):
    made = Ring(Logging(), ahead * 8)
    for index in range(count):
        made.add(index, torch.tensor([index]))
    return made


def test_a_ring_learns_the_order_of_a_step_and_copies_ahead():
    made, step = ring(5, ahead=2), [0, 1, 2, 3, 4, 3, 2, 1, 0]  # forward, then backward
    for key in step * 2:
        made.fetch(key)
    made.copier.log.clear()
    for key in step:
        assert key in made.on_the_way
        assert int(made.fetch(key)[0]) == key
    assert sum(what == "begin" for what, _ in made.copier.log) == len(step)  # nothing is copied twice


def test_a_ring_gives_up_what_it_began_when_another_order_comes():
    made = ring(6, ahead=2)
    for key in (*range(6), *range(6)):
        made.fetch(key)
    assert set(made.on_the_way) == {0, 1}
    assert int(made.fetch(4)[0]) == 4 and not made.on_the_way


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_a_ring_knows_a_block_that_is_computed_again_from_its_first_time(layers, monkeypatch):
    blocks = [range(first, first + layers) for first in range(0, 5 * layers, layers)]
    step = [(key, False) for block in blocks for key in block]
    for block in reversed(blocks):
        step += [(key, True) for key in (*block, *reversed(block))]
    made, late = ring(5 * layers, ahead=layers), 0
    passes = iter([backward for _, backward in step * 4])
    monkeypatch.setattr(offload, "in_backward_pass", lambda: next(passes))
    for key, _ in step * 3:
        assert int(made.fetch(key)[0]) == key
    made.copier.log.clear()
    for key, _ in step:
        late += key not in made.on_the_way
        made.fetch(key)
    begun = sum(what == "begin" for what, _ in made.copier.log)
    assert begun == len(step), "something was copied that nobody asked for"
    assert late <= 5, "at most where a block turns, the same weight is asked for twice in a row"


def test_compiled_code_fetches_as_any_other():
    made = ring(3, ahead=1)
    compute = torch.compile(lambda key: made.fetch(key) + 1, backend="eager")
    assert [int(compute(key)) for key in (0, 1, 2) * 3] == [1, 2, 3] * 3
    assert sum(what == "begin" for what, _ in made.copier.log) == 10


def test_autograd_is_at_work_in_a_backward_pass_and_in_what_is_computed_again_there():
    seen = []

    def layer(x):
        seen.append(in_backward_pass())
        return x * x

    y = checkpoint(layer, torch.ones(1, requires_grad=True), use_reentrant=False)
    y.backward()
    assert seen == [False, True]


def test_a_ring_never_holds_more_than_it_may():
    made = ring(6, ahead=2)
    for key in [0, 1, 2, 3, 4, 5] * 3:
        made.fetch(key)
        assert len(made.on_the_way) <= 2


def test_a_ring_asked_in_another_order_gives_what_was_asked_for():
    made = ring(6, ahead=3)
    for key in [0, 1, 2, 3, 4, 5, 0, 1, 5, 3, 3, 0, 2, 4]:
        assert int(made.fetch(key)[0]) == key


class LazyDevice:
    """Streams as queues: nothing is done before somebody waits, and memory is given away as soon as the
    program has let go of it.
    """

    def __init__(self):
        self.now, self.memory, self.free = self.Stream(), [], []

    class Stream:
        def __init__(self, device=None):
            self.queue = []

        def wait_stream(self, other):
            self.queue.append(partial(other.run, len(other.queue)))

        def wait_event(self, event):
            self.queue.append(partial(event.stream.run, event.count))

        def run(self, count):
            for index in range(count):
                work, self.queue[index] = self.queue[index], bool
                work()

        def synchronize(self):
            self.run(len(self.queue))

    class Event:
        def record(self, stream):
            self.stream, self.count = stream, len(stream.queue)

    @contextmanager
    def stream(self, stream):
        self.now, before = stream, self.now
        yield
        self.now = before

    def current_stream(self, device):
        return self.now


class OnDevice:
    """A number in a place of the device's memory."""

    def __init__(self, device, number):
        if not device.free:
            device.free.append(len(device.memory))
            device.memory.append(None)
        self.device, self.place = device, device.free.pop()
        device.now.queue.append(partial(device.memory.__setitem__, self.place, number))

    def __del__(self):
        self.device.free.append(self.place)


def test_blocks_that_stay_on_the_device_are_not_copied(monkeypatch):
    monkeypatch.setattr("graft.training.memory.weight_store.has_streams", lambda device: True)
    monkeypatch.setattr("graft.training.memory.weight_store.StreamCopier", lambda device: Logging())
    monkeypatch.setattr(offload, "pinned_bytes", partial(torch.empty, dtype=torch.uint8))
    options = OffloadOptions(blocks_on_device=frozenset({"blocks.1"}))
    store = Store("offload", ("blocks.*",), torch.float32, CPU, offload=options)
    spec = LayerSpec("linear", tuple(weight().shape))
    fetch = {path: store.make_fetch(path, spec, plain(weight())) for path in ("blocks.0.mlp", "blocks.1.mlp")}
    assert [path for path, _ in store.ring.host] == ["blocks.0.mlp"] and store.pinned.taken == weight().nbytes
    assert torch.equal(fetch["blocks.1.mlp"](torch.float32, CPU), weight())


@pytest.fixture
def streams(monkeypatch):
    """A device with streams, and the log of its copies."""
    copier = Logging()
    copier.begin = lambda host: copier.log.append(("begin", host.shape)) or host
    copier.finish = lambda ticket: ticket
    monkeypatch.setattr("graft.training.memory.weight_store.has_streams", lambda device: True)
    monkeypatch.setattr("graft.training.memory.weight_store.StreamCopier", lambda device: copier)
    monkeypatch.setattr(offload, "pinned_bytes", partial(torch.empty, dtype=torch.uint8))
    monkeypatch.setattr(offload, "PIECE", 1 << 20)
    return copier.log


def offloaded(given_back):
    """Train with samples after every step, for which the base is given back so often."""

    def on_step(progress, handles):
        for _ in range(given_back):
            with handles.give_base_back():
                gc.collect()

    config = train_config(adapter_config("lora", targets="all"), memory=MemoryConfig(base="offload"))
    return train(TinyDenoiser(), TinyDataset(), config, None, steps=3, on_step=on_step)


@pytest.mark.parametrize("short", [False, True])
def test_an_offloaded_base_is_pinned_once_however_often_it_is_given_back(streams, monkeypatch, short):
    pinned, released = [], []
    take, release = offload.PinnedMemory.take, offload.PinnedMemory.release
    monkeypatch.setattr(offload.PinnedMemory, "take", lambda *args: pinned.append(1) or take(*args))
    monkeypatch.setattr(offload.PinnedMemory, "release", lambda memory: released.append(1) or release(memory))
    monkeypatch.setattr(offload.PinnedMemory, "is_short", lambda memory: short)
    expected, layers = offloaded(given_back=0), len(pinned)
    assert layers > 0 and len(released) == 1
    state = offloaded(given_back=2)
    times = 1 + 6 * short  # where host memory is short, it is the samples'
    assert len(pinned) == layers + times * layers and len(released) == 1 + times
    assert all(torch.equal(state.weights[name], tensor) for name, tensor in expected.weights.items())


def test_a_weight_that_is_asked_for_twice_in_a_row_is_copied_once(streams):
    store = Store("offload", ("blocks.*",), torch.float32, CPU)
    paths = ("blocks.0.mlp", "blocks.0.attn")
    spec = LayerSpec("linear", (128, 256))
    stored = scaled(weight().to(torch.float8_e4m3fn), torch.ones(128, 1))
    fetch = {path: store.make_fetch(path, replace(spec, quantized_bytes=1), stored) for path in paths}
    for path in paths:
        for dtype in (torch.float32, torch.bfloat16):  # as DoRA does
            assert fetch[path](dtype, CPU).dtype == dtype
    assert len(streams) == 2 * len(stored.parts)


@dataclass
class OnHost:
    device: LazyDevice
    number: int
    nbytes = 8

    def to(self, device, non_blocking):
        return OnDevice(self.device, self.number)


@pytest.mark.feature(131)
@pytest.mark.parametrize("first", ["copies", "computation"])
def test_however_far_the_program_is_ahead_every_layer_computes_with_its_own_weight(monkeypatch, first):
    device, seen = LazyDevice(), []
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    made = Ring(StreamCopier(CPU), ahead=2 * OnHost.nbytes)
    for number in range(5):
        made.add(number, OnHost(device, number))
    step = [0, 1, 2, 3, 4, 3, 2, 1, 0] * 3
    for key in step:
        place = made.fetch(key).place  # nobody keeps the weight
        device.now.queue.append(lambda place=place: seen.append(device.memory[place]))
    if first == "copies":
        made.copier.wait()
    device.now.synchronize()
    assert seen == step and len(device.memory) <= 4
    made.clear()
    assert not made.host and not made.on_the_way


def test_pinned_memory_is_shared_in_pieces_and_given_back(monkeypatch):
    pieces = []
    monkeypatch.setattr(offload, "PIECE", 4096)
    monkeypatch.setattr(
        offload, "pinned_bytes", lambda size: pieces.append(size) or torch.empty(size, dtype=torch.uint8)
    )
    memory, given = offload.PinnedMemory(), [weight(8, 8), weight(40, 40).bfloat16(), torch.tensor(2.0)]
    taken = [memory.take(tensor) for tensor in given]
    assert pieces == [4096]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(taken, given, strict=True))
    assert all(t.storage_offset() * t.itemsize % offload.ALIGNMENT == 0 for t in taken)
    memory.take(weight())
    assert pieces == [4096, 128 * 256 * 4]
    memory.take(weight(3, 4096))
    assert pieces[2] == 4 * 4096 * 4 and len(memory.pieces[-1]) == 4096 * 4
    memory.release()
    assert not memory.pieces


@pytest.mark.parametrize(("reserve", "pinned"), [(0, True), (1 << 30, False)])
def test_host_memory_is_left_for_others(monkeypatch, reserve, pinned):
    monkeypatch.setattr(offload, "pinned_bytes", partial(torch.empty, dtype=torch.uint8))
    monkeypatch.setattr(offload, "free_bytes", lambda device: offload.HOST_RESERVE + offload.PIECE)
    memory = Store("offload", (), torch.float32, CPU, offload=OffloadOptions(reserve)).pinned
    assert (memory.take(weight()).storage_offset() == 0) and (memory.taken > 0) == pinned


@pytest.mark.parametrize("free", [1 << 20, 1 << 40])
def test_where_the_system_pins_no_more_weights_stay_where_they_are(monkeypatch, caplog, free):
    def refuse(size):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(offload, "pinned_bytes", refuse)
    monkeypatch.setattr(offload, "free_bytes", lambda device: free)
    memory, tensor = offload.PinnedMemory(), weight()
    assert memory.take(tensor) is tensor and memory.take(tensor) is tensor
    assert caplog.text.count("only 0.0 GiB of the base fit into pinned host memory") == 1


def test_an_offloaded_weight_is_in_host_memory_once(monkeypatch):
    monkeypatch.setattr(offload, "PIECE", 0)
    monkeypatch.setattr(offload, "pinned_bytes", partial(torch.empty, dtype=torch.uint8))
    store = Store("offload", ("blocks.*",), torch.bfloat16, CPU, ring=Ring(Logging(), 0))
    with LiveTensors() as live:
        fetch = store.make_fetch("blocks.0.mlp", LayerSpec("linear", (128, 256)), plain(weight()))
        gc.collect()
    assert fetch is not None and live.now == 128 * 256 * 2


def test_inputs_that_are_in_host_memory_stay_where_they_are():
    x = torch.randn(1 << 19, requires_grad=True) * 1
    with offload_inputs((x,)):
        y = x * x
    assert y.grad_fn._saved_self.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_training_on_a_rounded_base_is_near_training_on_the_base():
    config = train_config(adapter_config("lora", targets="all"))
    batch = TinyDataset().batch(2, seed=0, index=0)
    exact, denoiser = step_gradients(TinyDenoiser(), batch, config)[0], TinyDenoiser()
    hold = denoiser.hold
    denoiser.hold = lambda dtype: hold(dtype, "nf4")
    assert step_gradients(denoiser, batch, config)[0] == pytest.approx(exact, rel=0.1)
