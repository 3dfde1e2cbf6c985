"""A run whose memory runs out goes on by the next plan and ends as it would have with more memory."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from graft.tests.support.adapter_cases import adapter_config, train_config
from graft.tests.support.memory import config, same, trained
from graft.tests.support.tiny import TinyDataset, TinyDenoiser
from graft.training.config import MemoryConfig, TrainConfig
from graft.training.loop import initial_state
from graft.training.memory.activation_checkpointing import MODES
from graft.training.memory.device_memory import limit_memory
from graft.training.memory.out_of_memory import is_out_of_memory
from graft.training.memory.plan import candidates
from graft.training.memory.weight_store import STORES, UNPLACED
from graft.training.model import OFFLOAD_ALL
from graft.training.run.execute import run_key
from graft.training.user_error import UserError


class Small(TinyDenoiser):
    """Has no room for what `fails(base, calls)` says."""

    def __init__(self, fails):
        super().__init__()
        self.fails, self.calls, self.stores = fails, 0, []

    def hold(self, dtype, store="resident", offload=OFFLOAD_ALL, compute="full"):
        if store == UNPLACED:
            return super().hold(dtype, store)
        if self.fails(store, None):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.stores.append(store)
        return super().hold(dtype, store)

    def denoise(self, *args):
        self.calls += 1
        found = super().denoise(*args)
        if self.stores and self.fails(self.stores[-1], self.calls):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return found


@pytest.mark.parametrize("base", ["resident", "offload"])
@pytest.mark.parametrize("mode", MODES)
def test_plans_that_only_move_data_end_in_the_same_state(base, mode):
    assert same(trained({"base": base, "checkpointing": mode}), trained({}))


@pytest.mark.feature(122)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_step_that_ran_out_of_memory_is_computed_again(at, caplog):
    denoiser = Small(lambda store, calls: calls == at)
    assert same(trained({}, denoiser), trained({}))
    assert denoiser.calls == 4 and "memory ran out with base resident, checkpointing none" in caplog.text


def test_a_convolution_without_workspace_is_computed_again_by_the_next_plan(caplog):
    class Convolution(TinyDenoiser):
        calls = 0

        def denoise(self, *args):
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("GET was unable to find an engine to execute this computation")
            return super().denoise(*args)

    denoiser = Convolution()
    assert same(trained({}, denoiser), trained({}))
    assert denoiser.calls == 4 and "going on with base resident, checkpointing selective" in caplog.text


def test_a_base_without_room_is_kept_in_host_memory():
    denoiser = Small(lambda store, calls: store == "resident")
    assert same(trained({}, denoiser), trained({}))
    assert denoiser.stores == ["offload"]


def test_without_another_plan_the_error_says_what_to_set_and_the_base_is_given_back():
    denoiser = Small(lambda store, calls: calls is not None)
    with pytest.raises(ValueError, match="memory ran out with base offload.*base to 'fp8' or 'nf4'"):
        trained({"base": "offload"}, denoiser)
    assert all("forward" not in vars(module) for module in denoiser.module.modules())


def test_a_kernel_that_adds_in_any_order_is_refused_by_name_where_that_is_not_allowed():
    class Scattering(TinyDenoiser):
        def denoise(self, *args):
            found = super().denoise(*args)
            return found + torch.zeros(4).put_(torch.tensor([0]), torch.ones(1)).sum()

    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="tiny cannot be trained under --deterministic: .*put_"):
            trained({}, Scattering())
    finally:
        torch.use_deterministic_algorithms(False)


def test_other_errors_pass():
    def fails(store, calls):
        if calls:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        trained({}, Small(fails))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_network_that_cannot_be_deterministic_is_refused_by_name():
    class Scattered(TinyDenoiser):
        def denoise(self, *args):
            raise RuntimeError(
                "scatter_reduce_ does not have a deterministic implementation, but you set ..."
            )

    with pytest.raises(UserError, match="tiny cannot be trained under --deterministic.*scatter_reduce_"):
        trained({}, Scattered())


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "GET was unable to find an engine to execute this computation",
        "FIND was unable to find an engine to execute this computation",
        "HIP out of memory. Tried to allocate 20.00 MiB",
    ],
)
def test_libraries_that_get_no_memory_are_understood(words):
    assert is_out_of_memory(RuntimeError(words))


def test_a_budget_is_kept_to_as_long_as_there_is_a_plan_that_takes_less(monkeypatch):
    """Windows does not fail where a card is full, but goes on in host memory."""
    limits = []
    monkeypatch.setattr("graft.training.memory.placement.limit_memory", partial(record, limits))
    monkeypatch.setattr("graft.training.loop.bytes_in_use", lambda device: 100)
    denoiser = Small(lambda store, calls: calls is not None)
    with pytest.raises(ValueError, match="memory ran out"):
        trained({"budget_gb": 1.0, "base": "resident"}, denoiser)
    assert limits == [100 + 2**30] * (len(MODES) - 1) + [None]


def test_a_budget_counts_where_base_and_checkpointing_are_fixed(monkeypatch, caplog):
    limits, settings = [], {"budget_gb": 1e-5, "base": "resident", "checkpointing": "block"}
    monkeypatch.setattr("graft.training.memory.placement.limit_memory", partial(record, limits))
    batch = TinyDataset().batch(1, seed=0, index=0)
    monkeypatch.setattr(TinyDataset, "largest_batch", lambda data, size: batch, raising=False)
    assert same(trained(settings), trained({})) and limits[0] == int(1e-5 * 2**30)
    assert "no plan fits into 0.0 MiB (budget gb); trying" in caplog.text
    with pytest.raises(ValueError, match="memory ran out with base resident.*or 'nf4', raise budget gb; or"):
        trained(settings, Small(lambda store, calls: calls is None))


@contextmanager
def record(limits, most, device):
    limits.append(most)
    yield


def test_a_limit_is_a_share_of_the_card_and_ends_with_the_run(monkeypatch):
    shares, card = [], SimpleNamespace(total_memory=8 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    for before, after in ((0.9, 0.9), (1431655765.33, 1.0)):  # the second is cudaMallocAsync's "no limit"
        shares.clear()
        name = "get_per_process_memory_fraction"  # from PyTorch 2.6 on
        monkeypatch.setattr(torch.cuda, name, lambda _, before=before: before, raising=False)
        with limit_memory(2 << 30, torch.device("cuda")):
            assert shares == [0.25]
        assert shares == [0.25, after]
        with limit_memory(9 << 30, torch.device("cuda")), limit_memory(None, torch.device("cuda")):
            assert shares[2:] == [after]


def test_settings_are_kept_to():
    assert [plan.base for plan in candidates(MemoryConfig(base="nf4"))] == ["nf4"] * len(MODES)
    assert [str(plan) for plan in candidates(MemoryConfig(base="offload", checkpointing="block"))] == [
        "base offload, checkpointing block"
    ]
    with pytest.raises(ValueError, match="base: 'fp7' is unknown; choose one of auto, resident, fp8"):
        candidates(MemoryConfig(base="fp7"))
    with pytest.raises(ValueError, match="checkpointing: 'all' is unknown; choose one of auto, none"):
        candidates(MemoryConfig(checkpointing="all"))


@pytest.mark.parametrize("base", STORES)
def test_a_run_is_the_same_run_wherever_its_data_is(base):
    def key(**memory):
        return run_key(TinyDenoiser(), TinyDataset(), TrainConfig(memory=MemoryConfig(**memory)), None)

    moves = base in ("resident", "offload", "stream")
    assert (key(base=base, checkpointing="block", budget_gb=4.0) == key()) == moves


@pytest.mark.parametrize("algorithm", ["dora", "pissa"])
def test_methods_that_start_from_the_base_never_have_all_of_it_on_the_device(algorithm):
    denoiser = Small(lambda store, calls: store == "resident")
    start = initial_state(denoiser, train_config(adapter_config(algorithm)))
    assert same(start.weights, initial_state(TinyDenoiser(), train_config(adapter_config(algorithm))).weights)


def test_the_start_is_that_of_the_unrounded_base():
    start, quantized = (initial_state(TinyDenoiser(), config(base=base)) for base in ("auto", "int8"))
    assert same(start.weights, quantized.weights)


def test_a_limit_needs_no_pytorch_that_tells_the_one_before(monkeypatch):
    """2.5 does not."""
    shares, card = [], SimpleNamespace(total_memory=8 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction", raising=False)
    with limit_memory(2 << 30, torch.device("cuda")):
        pass
    assert shares == [0.25, 1.0]
