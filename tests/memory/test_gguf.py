"""GGUF weights are made whole as ggml's own reader does."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graft.training.memory import gguf
from graft.training.memory.gguf import LAYOUTS, gguf_weight
from graft.training.memory.tensor_counter import LiveTensors

quants = pytest.importorskip("gguf.quants")


def raw_of(name, rows=3, blocks=5):
    """Random bytes of a type, their factors sensible numbers."""
    layout = LAYOUTS[name]
    raw = torch.randint(0, 256, (rows * blocks, layout.size), generator=torch.Generator().manual_seed(0))
    raw = raw.to(torch.uint8)
    if name == "BF16":
        return torch.randn(rows, blocks).bfloat16().view(torch.uint8)
    two = dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
    halves = {**two, "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(name, (0,))
    for number, start in enumerate(halves):
        factor = torch.full((1,), 0.01 * (number + 1), dtype=torch.float16)
        raw[:, start : start + 2] = factor.view(torch.uint8)
    return raw.view(rows, -1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_type_is_read_as_by_ggml(name):
    from gguf import GGMLQuantizationType

    raw = raw_of(name)
    expected = torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType[name]))
    stored = gguf_weight(raw, name, tuple(expected.shape))
    assert torch.allclose(stored.dequantize(torch.float32), expected, rtol=1e-6, atol=1e-7)
    assert stored.nbytes == raw.nbytes


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_a_weight_is_unpacked_piece_by_piece(name, monkeypatch):
    raw, numbers = raw_of(name, rows=4, blocks=8), {"Q8_0": 32, "Q4_K": 256}[name]
    stored = gguf_weight(raw, name, (4, 8 * numbers))
    at_once = stored.dequantize(torch.bfloat16)
    monkeypatch.setattr(gguf, "AT_ONCE", 5 * numbers)
    with LiveTensors() as live:
        assert torch.equal(stored.dequantize(torch.bfloat16), at_once)
    assert live.peak <= at_once.nbytes + 12 * 5 * numbers


class Made(TorchDispatchMode):
    """Notes tensors that are made of Python's numbers, which a device waits for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.lift_fresh.default
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("name", LAYOUTS)
def test_unpacking_brings_no_numbers_to_the_device(name):
    raw = raw_of(name)
    numbers = LAYOUTS[name].dequantize(raw.view(-1, LAYOUTS[name].size)).numel()
    stored = gguf_weight(raw, name, (numbers,))
    stored.dequantize(torch.float32)
    with Made() as made:
        stored.dequantize(torch.float32)
    assert made.count == 0


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(ValueError, match="GGUF type IQ2_XS cannot be trained on; use a file of type BF16"):
        gguf_weight(torch.zeros(1, 4, dtype=torch.uint8), "IQ2_XS", (1, 4))
