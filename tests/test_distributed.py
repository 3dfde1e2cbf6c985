"""Several processes train as one does, and what is left of them can be continued."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from graft.tests.support.memory import BATCH, CONFIG
from graft.tests.support.runs import assert_same
from graft.tests.support.tiny import TinyDataset, TinyDenoiser
from graft.training import distributed
from graft.training.config import MemoryConfig
from graft.training.loop import train
from graft.training.memory.plan import agree_on_plans
from graft.training.memory.weight_store import block_bytes, weight_bytes
from graft.training.run.checkpoints import Checkpoints
from graft.training.run.folder import Run
from graft.training.run.saved_state import load_state
from graft.training.user_error import UserError

from .support import ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="starts copies of itself"
    ),
]

CONTEXT = multiprocessing.get_context("fork") if hasattr(os, "fork") else None
EXACT = ["plain", "dropout", "average", "validated", "idle"]
"""Cases of at most two micro-batches a step, whose sum does not depend on the order."""
SECONDS = 600


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder, cases, world, doomed=0, places=(("", "127.0.0.1", ""),)):
    """Run the cases in `world` processes, which start as copies of this one; return their exit codes.

    `places` are (network namespace, address, interface); process i is at places[i % len(places)].
    """
    port = free_port()
    processes = [
        CONTEXT.Process(
            target=work,
            args=(folder, cases, doomed, rank, world, places[0][1], port, places[rank % len(places)]),
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(SECONDS)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def work(folder, cases, doomed, rank, world, address, port, place):
    """Be one of several processes."""
    namespace, _, interface = place
    if namespace:
        with open(f"/var/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    torch.set_num_threads(1)
    given = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    ranks.main(folder, cases, doomed)


def alone(folder, case):
    return ranks.go(folder / "alone", case).load()


def largest_difference(one, other):
    assert one.weights.keys() == other.weights.keys()
    return max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Every exact case, trained by two processes."""
    folder = tmp_path_factory.mktemp("pair")
    codes = start(folder, EXACT, 2)
    assert codes == [0, 0]
    return folder


@pytest.mark.parametrize("case", EXACT)
def test_two_processes_train_bit_for_bit_what_one_does(pair, case):
    whole = alone(pair, case)
    assert whole.step >= 4
    for rank in (0, 1):
        assert_same(load_state(pair / f"{case}-{rank}"), whole)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_that_share_a_base_train_bit_for_bit_what_one_does(tmp_path, world):
    cases = ["sharded-halved", "measure"] if world == 4 else [*ranks.SHARDED, "measure"]
    assert start(tmp_path, cases, world) == [0] * world
    for case in cases[:-1]:
        whole = alone(tmp_path, ranks.SHARDED[case][0])
        for rank in range(world):
            assert_same(load_state(tmp_path / f"{case}-{rank}"), whole)
    # Eight blocks of three alike layers. gloo's thread may still hold the layer that it gathered last.
    for rank in range(world):
        for ahead, blocks in ((False, 1), (True, 2)):
            found = json.loads((tmp_path / f"shards-{world}-{rank}-{ahead}.json").read_text())
            assert found["kept"] == pytest.approx(1 / world, rel=0.01)
            least = found["kept"] + blocks / 8
            assert least - 1e-6 <= found["peak"] <= least + 1 / 24 + 1e-6


def test_a_process_alone_cannot_share_a_base():
    config = replace(ranks.PLAIN, memory=MemoryConfig(base="sharded"))
    with pytest.raises(UserError, match="'sharded' needs several processes.*gpus of Train Steps.*torchrun"):
        train(TinyDenoiser(), TinyDataset(), config, None, steps=1)


def test_processes_that_share_a_base_need_equal_shares_of_a_step(monkeypatch):
    monkeypatch.setattr(distributed, "world", lambda: 3)
    config = replace(ranks.PLAIN, memory=MemoryConfig(base="sharded"))
    with pytest.raises(UserError, match="2 micro-batches .* 3 processes.*multiple of 3"):
        train(TinyDenoiser(), TinyDataset(), config, None, steps=1)


def test_processes_that_share_a_base_take_one_plan_without_a_second(monkeypatch):
    monkeypatch.setattr(distributed, "world", lambda: 2)
    asked = []
    monkeypatch.setattr(distributed, "take_smallest", lambda budget: asked.append(budget) or 1000)
    config = replace(CONFIG, memory=MemoryConfig(base="sharded"))
    denoiser = TinyDenoiser()
    plans = agree_on_plans(denoiser, denoiser.specs, config, BATCH, 1 << 30)
    assert [str(plan) for plan in plans] == ["base sharded, checkpointing block-offload"] and asked == [
        1 << 30
    ]
    whole, shared = (
        weight_bytes(denoiser.specs, denoiser.family.blocks, store, torch.float32)
        for store in ("resident", "sharded")
    )
    blocks = block_bytes(denoiser.specs, denoiser.family.blocks, torch.float32).values()
    assert shared == whole - sum(blocks) // 2 + 2 * max(blocks)


def test_only_rank_0_keeps_the_run(pair):
    assert (pair / "plain" / "log.jsonl").exists()
    assert (
        not (pair / "plain-copy-1" / "log.jsonl").exists() and not (pair / "plain-copy-1" / "lock").exists()
    )


def test_four_processes_train_what_one_does_to_within_rounding(tmp_path):
    codes = start(tmp_path, ["more"], 4)
    assert codes == [0] * 4
    states = [load_state(tmp_path / f"more-{rank}") for rank in range(4)]
    for state in states[1:]:
        assert_same(state, states[0])
    assert largest_difference(states[0], alone(tmp_path, "more")) <= 1e-6


def test_a_lost_worker_ends_the_run_with_a_state_and_a_restart_ends_equal(tmp_path):
    codes = start(tmp_path, ["plain"], 2, doomed=3)
    assert codes[0] > 0 and codes[1] < 0
    assert Checkpoints(Run(tmp_path / "plain")).latest().step == 3
    codes = start(tmp_path, ["plain"], 2)
    assert codes == [0, 0]
    assert_same(load_state(tmp_path / "plain-0"), alone(tmp_path, "plain"))


def test_torchrun_restarts_a_lost_worker_and_the_run_goes_on(tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "1", ranks.__file__, str(tmp_path), "plain", "3",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "killed").exists(), done.stderr
    assert_same(load_state(tmp_path / "plain-0"), alone(tmp_path, "plain"))


@contextlib.contextmanager
def two_machines():
    """Two network namespaces with a wire between them: ("name", "address", "interface") each."""
    name = f"graft{os.getpid()}"
    machines = [(f"{name}{end}", f"10.213.77.{i + 1}", f"g{os.getpid()}{end}") for i, end in enumerate("ab")]
    commands = [
        *(["ip", "netns", "add", machine] for machine, _, _ in machines),
        ["ip", "link", "add", machines[0][2], "type", "veth", "peer", "name", machines[1][2]],
        *(["ip", "link", "set", wire, "netns", machine] for machine, _, wire in machines),
        *(
            ["ip", "-n", machine, "addr", "add", f"{address}/24", "dev", w]
            for machine, address, w in machines
        ),
        *(["ip", "-n", machine, "link", "set", wire, "up"] for machine, _, wire in machines),
        *(["ip", "-n", machine, "link", "set", "lo", "up"] for machine, _, _ in machines),
    ]
    try:
        for command in commands:
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                why = getattr(error, "stderr", "") or str(error)
                pytest.skip(f"no network namespaces here: {' '.join(command)}: {why.strip()}")
        yield machines
    finally:
        for machine, _, _ in machines:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", machine], capture_output=True)


@pytest.mark.feature(110)
def test_two_machines_lose_a_worker_resume_and_end_equal(tmp_path):
    with two_machines() as machines:
        codes = start(tmp_path, ["plain"], 2, doomed=3, places=machines)
        assert codes[0] > 0 and codes[1] < 0
        assert start(tmp_path, ["plain"], 2, places=machines) == [0, 0]
    assert_same(load_state(tmp_path / "plain-0"), alone(tmp_path, "plain"))


def test_a_single_process_is_left_alone():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert distributed.sum_gradients({"a": parameter}, 1.0, 2) == (1.0, 2)
    assert parameter.grad.tolist() == [1.0, 1.0] and distributed.share(3) == 3
    distributed.wait_for_all()
