"""What only a graphics card shows: copies on a stream of their own, its allocator, its kernels.

All is skipped where there is no CUDA device. `pytest -n0 -m gpu` needs PyTorch and pytest; what needs more is
skipped. The other tests run there too, and ComfyUI's on the card with `GRAFT_TEST_DEVICE=cuda pytest -n0
tests/comfy`, or cuda-dynamic for dynamic VRAM.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from graft.commands.headless.server import GRAFT, find_comfyui, server
from graft.tests.support.adapter_cases import adapter_config, train_config
from graft.tests.support.tiny import Network, TinyDataset, TinyDenoiser
from graft.training.config import MemoryConfig, OptimizerConfig
from graft.training.loop import train
from graft.training.memory.plan import MemoryPlan, candidates, make_estimator
from graft.training.memory.plan_table import probe
from graft.training.model import Batch

try:
    import bitsandbytes
except ImportError:
    bitsandbytes = None

pytestmark = pytest.mark.gpu
eight_bit = pytest.mark.skipif(bitsandbytes is None, reason="needs bitsandbytes")

CARD = torch.device("cuda", 0)
CONFIG = replace(train_config(adapter_config("lora", targets="all", rank=16)), batch_size=4)
WIDE = adapter_config("lora", targets="all", rank=128)
"""bitsandbytes pages nothing that has less than 1e5 numbers."""


def needs_bitsandbytes(*values):
    """Mark parameters that are computed with bitsandbytes."""
    return pytest.param(*values, marks=eight_bit)


class OnCard(TinyDenoiser):
    """The tiny network, wide enough for its weights to be on their way for a while."""

    device = CARD
    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.module = Network(512).requires_grad_(False)


class Large(TinyDataset):
    """Images of 64x64 latents: 1024 tokens each."""

    def batch(self, size, *, seed, index):
        generator = torch.Generator().manual_seed(index)
        words = [{"words": torch.tensor([[i % 16]])} for i in range(size)]
        return Batch(torch.randn(size, 4, 64, 64, generator=generator), words, [""] * size)

    def largest_batch(self, size):
        return self.batch(size, seed=0, index=0)


@pytest.fixture
def exact(monkeypatch):
    """Kernels that add in one order, as under ComfyUI's --deterministic."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(steps=3, **memory):
    config = replace(CONFIG, memory=MemoryConfig(**memory))
    return train(OnCard(), Large(), config, None, steps=steps)


def assert_equal(one, other):
    assert one.losses == other.losses
    assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


@pytest.mark.parametrize("plan", candidates(MemoryConfig())[1:], ids=str)
def test_plans_that_move_data_end_in_the_same_state(exact, plan):
    expected = trained(base="resident", checkpointing="none")
    assert_equal(trained(base=plan.base, checkpointing=plan.checkpointing), expected)


def test_attention_is_computed_by_a_fused_kernel(exact):
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        fused = trained(checkpointing="selective")
    assert_equal(fused, trained(checkpointing="none"))


@pytest.mark.parametrize("base", ["resident", "offload", "stream"])
def test_a_base_that_is_given_back_leaves_the_card_and_comes_again_as_it_was(exact, base):
    expected = trained(base="resident")  # libraries take their work space for good
    before, taken = torch.cuda.memory_allocated(CARD), []

    def on_step(progress, handles):
        with handles.give_base_back():
            gc.collect()
            taken.append(torch.cuda.memory_allocated(CARD) - before)

    config = replace(CONFIG, memory=MemoryConfig(base=base))
    state = train(OnCard(), Large(), config, None, steps=3, on_step=on_step)
    adapters = sum(t.nbytes for t in (*state.weights.values(), *state.optimizer.tensors.values()))
    assert max(taken) < adapters + (1 << 20), "the base takes 6 MiB"
    assert_equal(state, expected)


@pytest.mark.parametrize(
    "optimizer",
    ["adamw", "adafactor", *map(needs_bitsandbytes, ("adamw8bit", "paged-adamw8bit", "lion8bit"))],
)
def test_a_resumed_run_ends_where_an_undisturbed_one_does(exact, optimizer):
    config = replace(CONFIG, optimizer=OptimizerConfig(name=optimizer), adapter=WIDE)
    run = partial(train, OnCard(), Large(), config)
    assert_equal(run(run(None, steps=2), steps=1), run(None, steps=3))


@pytest.mark.feature(88)
@eight_bit
def test_paged_memory_is_taken_once(exact):
    pages = bitsandbytes.functional.GlobalPageManager.get_instance().paged_tensors
    config = replace(CONFIG, optimizer=OptimizerConfig(name="paged-adamw8bit"), adapter=WIDE)
    first = train(OnCard(), Large(), config, None, steps=2)
    gc.collect()
    taken = len(pages)
    assert taken > 0
    assert_equal(train(OnCard(), Large(), config, None, steps=2), first)
    assert len(pages) == taken


@pytest.mark.parametrize(("base", "within"), [("fp8", 0.05), ("int8", 0.02), needs_bitsandbytes("nf4", 0.15)])
def test_a_rounded_base_is_that_far_from_the_whole_one(base, within):
    denoiser = OnCard()
    with denoiser.hold(torch.bfloat16, base) as held:
        for name, layer in held.layers.items():
            whole = denoiser.module.get_submodule(name).weight
            found = layer.weight(torch.bfloat16, CARD).float().cpu()
            assert (found - whole).norm() <= within * whole.norm(), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("base", ["resident", needs_bitsandbytes("nf4"), "offload"])
def test_half_precision_learns(base, dtype):
    state = trained(steps=20, base=base, dtype=dtype)
    assert sum(state.losses[-5:]) < sum(state.losses[:5])


@pytest.mark.feature(90)
@pytest.mark.parametrize("mode", ["none", "selective", "block", "block-offload"])
def test_what_a_step_takes_is_estimated_within_a_tenth(mode):
    denoiser, plan, batch = OnCard(), MemoryPlan("resident", mode), Large().largest_batch(4)
    config = replace(CONFIG, memory=MemoryConfig(dtype="bf16"))
    estimate = make_estimator(denoiser, denoiser.specs, config, batch)(plan).step.peak
    for _ in range(2):  # the first time, libraries take work space for good
        measured = probe(denoiser, denoiser.specs, config, batch, [plan]).peak
    assert estimate == pytest.approx(measured, rel=0.1)


def test_memory_is_counted_from_where_a_run_begins():
    before = torch.empty(1 << 30, dtype=torch.uint8, device=CARD).nbytes  # let go of at once
    seen = []
    train(
        OnCard(),
        Large(),
        CONFIG,
        None,
        steps=1,
        on_step=lambda progress, handles: seen.append(progress.memory),
    )
    assert 0 < seen[0] < before


@pytest.mark.feature(122)
def test_where_the_allocator_gives_no_more_the_next_plan_is_taken(exact, monkeypatch, caplog):
    expected = trained(base="resident", checkpointing="none")
    denoiser = OnCard()
    estimate = make_estimator(denoiser, denoiser.specs, CONFIG, Large().largest_batch(4))
    most, least = (estimate(MemoryPlan("resident", mode)).peak for mode in ("none", "block"))
    monkeypatch.setattr("graft.training.loop.agree_on_plans", lambda *_: candidates(MemoryConfig()))
    state = trained(budget_gb=(most + least) / 2 / 2**30)
    assert "memory ran out with base resident, checkpointing none" in caplog.text
    assert_equal(state, expected)


def test_the_allocator_that_comfyui_prefers_is_limited_and_set_free_again():
    """In a process of its own, as it is chosen before PyTorch is used."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-q",
        __file__,
        "-k",
        "next_plan or estimated or counted",
    ]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dynamic_vram_changes_nothing(tmp_path):
    """In servers of their own, started as people start them: only ComfyUI's main.py switches it on."""
    comfyui = find_comfyui()
    if "--disable-dynamic-vram" not in (comfyui / "comfy" / "cli_args.py").read_text(encoding="utf-8"):
        pytest.skip("this ComfyUI has no dynamic VRAM")
    workflow = GRAFT / "example_workflows" / "api" / "first_lora.json"
    graph = json.loads(workflow.read_text(encoding="utf-8"))
    graph["5"]["inputs"]["steps"] = 20
    graph["6"]["inputs"]["dtype"] = "fp32"
    loras = []
    for name, options in (("on", []), ("off", ["--disable-dynamic-vram"])):
        with server(comfyui, tmp_path / name, options=["--deterministic", *options], cpu=False) as running:
            assert ("DynamicVRAM support detected and enabled" in running.log()) == (name == "on")
            running.run(graph)
        (file,) = (tmp_path / name / "output" / "loras").glob("*.safetensors")
        loras.append(load_file(file))
    assert loras[0].keys() == loras[1].keys()
    assert all(torch.equal(tensor, loras[1][key]) for key, tensor in loras[0].items())
