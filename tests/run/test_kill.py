"""A run whose process is killed or asked to end goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from graft import __main__ as launch
from graft.dev.benchmarks import faults
from graft.tests.support.runs import assert_same, checkpoints, go
from graft.tests.support.runs import run as train
from graft.training import signals
from graft.training.config import CheckpointConfig
from graft.training.run.run_log import read_log

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")


def test_a_run_killed_inside_a_save_goes_on_bit_equal(tmp_path):
    faults.kill_once(tmp_path / "killed", "schedule-free-adamw", 6, inside="replace:7")
    assert checkpoints(tmp_path / "killed")
    killed, whole = (faults.train(tmp_path / name, "schedule-free-adamw", 6) for name in ("killed", "whole"))
    assert killed == whole


@pytest.mark.feature(117)
def test_a_run_killed_at_some_moment_goes_on_bit_equal(tmp_path):
    faults.kill_once(tmp_path / "killed", "adamw", 30, after=0.4)
    assert faults.train(tmp_path / "killed", "adamw", 30) == faults.train(tmp_path / "whole", "adamw", 30)


@pytest.mark.feature(112)
@posix
def test_sigterm_saves_the_step_and_ends_the_process(tmp_path):
    command = [sys.executable, faults.__file__, str(tmp_path), "adamw", "100000", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().strip() == b"ready"
        while not list(tmp_path.glob("checkpoints/step-*/state.json")):
            time.sleep(0.05)
        process.terminate()
        assert process.wait(600) == 128 + signal.SIGTERM
    newest = max(checkpoints(tmp_path))
    assert (tmp_path / "checkpoints" / f"step-{newest:08d}" / "state.json").exists()


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
@posix
def test_a_signal_is_put_off_until_the_step_is_done_and_saved(number, error, tmp_path):
    def send(progress, handles):
        if progress.step == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(error):
        go(tmp_path, 6, on_step=send, saving=CheckpointConfig(minutes=60))
    assert checkpoints(tmp_path) == [3] and signal.getsignal(number) == before
    assert_same(go(tmp_path, 6).load(), train(steps=6))


@posix
def test_a_server_that_is_told_to_end_waits_for_the_runs_of_its_threads(tmp_path, monkeypatch):
    ended, errors, started = [], [], threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    monkeypatch.setattr(signals, "_pending", [])

    def work():
        try:
            go(
                tmp_path,
                100000,
                on_step=lambda p, handles: started.set(),
                saving=CheckpointConfig(minutes=60),
            )
        except signals.Terminated as error:
            errors.append(error)

    try:
        signals.save_at_exit()
        thread = threading.Thread(target=work)
        thread.start()
        started.wait(600)
        os.kill(os.getpid(), signal.SIGTERM)
        thread.join(600)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [signal.SIGTERM] and errors and len(checkpoints(tmp_path)) == 1


SERVER = """
import runpy, signal, sys, threading, time
from pathlib import Path

runpy.run_path(sys.argv[1])["import_graft"]()
from graft.tests.support.runs import CheckpointConfig, go
from graft.training.signals import save_at_exit

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in processes of a script's background
save_at_exit()
options = {"saving": CheckpointConfig(minutes=60, steps=0)}
threading.Thread(target=go, args=(Path(sys.argv[2]), 100000), kwargs=options, daemon=True).start()
time.sleep(300)
"""
"""As ComfyUI is one: it trains in a thread that ends with the process."""


@posix
def test_ctrl_c_ends_a_server_once_its_runs_are_saved(tmp_path):
    command = [sys.executable, "-c", SERVER, launch.__file__, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while len(read_log(tmp_path / "log.jsonl")) < 3 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(600)
    assert max(checkpoints(tmp_path)) >= 3
