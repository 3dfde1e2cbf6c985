"""ComfyUI's classes train on a base that two processes share as on a whole one."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from graft.tests.support.card import DEVICE
from graft.tests.support.tiny_models import TINY
from graft.tests.support.two_steps import CONFIG, Samples
from graft.training import distributed
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import MemoryConfig
from graft.training.loop import train

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(DEVICE != "cpu", reason="starts copies of itself, which cannot share a GPU"),
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="starts copies of itself"
    ),
]
ALONE = "GRAFT_TEST_ALONE"
NAMES = ("sd3", "sdxl", "flux", "hidream")
"""HiDream's experts see other tokens in each process: which of them are computed differs."""


class Dealt(Samples):
    """Another image for each of a step's two micro-batches."""

    def batch(self, size, *, seed, index):
        return self.tiny.batch((index % 2, index % 2))


def two_steps(name, base):
    """Return the losses and a sum of every trained weight's bits."""
    memory = MemoryConfig(dtype="fp32", base=base, checkpointing="block")
    config = replace(CONFIG, gradient_accumulation=2, memory=memory)
    state = train(ComfyDenoiser(TINY[name]()), Dealt(TINY[name]), config, None, steps=2)
    bits = {key: tensor.view(torch.int32).sum().item() for key, tensor in sorted(state.weights.items())}
    return [list(state.losses), bits]


def work(rank, port, folder):
    """Be one of two processes."""
    torch.set_num_threads(1)
    given = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    with distributed.join_processes(torch.device("cpu")):
        for name in NAMES:
            (folder / f"{name}-{rank}.json").write_text(json.dumps(two_steps(name, "sharded")))


@pytest.mark.feature(152)
def test_two_processes_that_share_a_base_train_bit_for_bit_what_one_does(tmp_path):
    """Alone in a process: one in which autograd has started threads for an earlier test cannot be forked."""
    if ALONE in os.environ:
        share_a_base(tmp_path)
    else:
        command = [sys.executable, "-m", "pytest", "-n0", "-q", __file__]
        done = subprocess.run(command, env=os.environ | {ALONE: "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def share_a_base(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        expected = {name: two_steps(name, "resident") for name in NAMES}
        for process in processes:
            process.join(600)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for name in NAMES:
        for rank in range(2):
            assert json.loads((tmp_path / f"{name}-{rank}.json").read_text()) == expected[name], name
