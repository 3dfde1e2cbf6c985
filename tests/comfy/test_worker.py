"""Several processes with a ComfyUI each train what one does, from a job file or from a graph."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import comfy.model_management
import psutil
import pytest
import torch
from safetensors.torch import load_file

from graft import __main__ as launch
from graft.commands.headless.server import server
from graft.tests.support.card import PRETENDED
from graft.tests.support.jobs import images, small
from graft.tests.support.runs import go
from graft.tests.support.small_base import put_small_base
from graft.training import distributed
from graft.training.comfy import paths
from graft.training.comfy.run import session, workers
from graft.training.job.graph import NODES, of_kind
from graft.training.job.read import compile_job
from graft.training.loop import STOP
from graft.training.run.checkpoints import Checkpoints
from graft.training.run.folder import Run
from graft.training.run.run_log import read_log

pytestmark = pytest.mark.distributed
posix = pytest.mark.skipif(sys.platform == "win32", reason="the processes are shell scripts")


@pytest.fixture(scope="module")
def job(base):
    """Three steps on two squares in fp32, with dropout; a step has one image, or two from two processes."""
    document = small(base / "input" / "together", training_folder="out", device="cpu")
    process = document["config"]["process"][0]
    process["datasets"][0]["caption_dropout_rate"] = 0.5
    process["network"] = {"type": "lora", "linear": 2}
    process["train"] = {"steps": 3, "lr": 1e-3, "dtype": "fp32"}
    return document


@pytest.fixture
def alone(execute, base, job):
    """The LoRA that one process trains with twice the accumulation."""
    process = job["config"]["process"][0]
    twice = {**process, "train": {**process["train"], "gradient_accumulation_steps": 2}}
    compiled = compile_job({"config": {"name": "alone", "process": [twice]}}, base / "input").prompt
    execute(compiled)
    return load_file(base / "output" / "loras" / "alone.safetensors")


def difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_the_processes_are_started_by_the_file_that_is_the_command():
    assert os.path.samefile(workers.LAUNCH, launch.__file__)


own_processes = pytest.mark.skipif(PRETENDED, reason="processes of their own have no card")


@pytest.mark.feature(110)
@own_processes
def test_torchrun_trains_a_job_file_as_one_process_does(alone, base, job, tmp_path):
    images(tmp_path / "together")
    put_small_base(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        launch.__file__, "worker", str(tmp_path / "job.yaml"),
    ]  # fmt: skip
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(load_file(tmp_path / "out" / "loras" / "job.safetensors"), alone) <= 1e-6
    (state,) = (tmp_path / "out" / "graft").glob("job-*/checkpoints/step-00000003")
    written, handed_on = ((state / name).stat().st_mtime_ns for name in ("state.json", "kept"))
    assert written <= handed_on, "a process other than rank 0 has written its copy here"


@own_processes
def test_train_steps_starts_processes_that_go_on_from_what_this_one_trained(
    alone, execute, base, job, monkeypatch
):
    """A step each: saved and loaded again, then ended by Finish, and then in two processes."""
    monkeypatch.setattr(sys, "argv", ["main.py", "--cpu", "--base-directory", str(base)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(
        session, "_send_run", lambda live: live.node == "finished" and session.request_finish(live.run)
    )
    prompt = compile_job(job, base / "input").prompt
    number, save = (of_kind(prompt, kind)[0] for kind in ("GraftTrainSteps", "GraftSaveLora"))
    steps = prompt.pop(number)
    inputs = {**NODES["optimizer"].inputs, "gradient_accumulation": 2}
    twice = {"class_type": "GraftOptimizerSettings", "inputs": inputs}

    def train(**inputs):
        return {**steps, "inputs": {**steps["inputs"], **inputs}}

    first = train(steps=1, optimizer_settings=["twice", 0], name="first")
    keep = {"class_type": "GraftSaveTrainingState", "inputs": {"state": ["first", 2], "name": "one step"}}
    execute(
        {key: prompt[key] for key in prompt if key != save} | {"twice": twice, "first": first, "keep": keep}
    )
    prompt |= {
        "twice": twice,
        "load": {"class_type": "GraftLoadTrainingState", "inputs": {"name": "one step"}},
        "finished": train(steps=9, start=["load", 0], optimizer_settings=["twice", 0], name="second"),
        number: train(steps=1, start=["finished", 2], name="third", gpus=2),
    }
    prompt[save]["inputs"]["name"] = "by two"
    execute(prompt)
    assert difference(load_file(base / "output" / "loras" / "by two.safetensors"), alone) <= 1e-6
    for name, last in {"first": 1, "second": 2, "third": 3}.items():
        runs = list((base / "output" / "graft").glob(f"{name}-*"))
        assert [Checkpoints(Run(run)).latest().step for run in runs] == [last]


@own_processes
@posix
def test_processes_of_a_server_that_is_killed_save_and_end(comfyui, job, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prompt = compile_job(job, tmp_path / "server" / "input").prompt
    [number] = of_kind(prompt, "GraftTrainSteps")
    prompt[number]["inputs"] |= {"steps": 100_000, "gpus": 2}
    put_small_base(tmp_path / "server" / "models" / "checkpoints")
    with server(comfyui, tmp_path / "server", cpu=True) as running:
        images(running.base / "input" / "together")
        queued = running.post(prompt)
        while len(log := steps_in(running.base)) < 3:
            assert running.history(queued) is None, running.log()
            time.sleep(0.2)
        processes = psutil.Process(running.process.pid).children(recursive=True)
        assert len(processes) == 3 and list(tmp_path.glob("graft-gpus-*"))
        running.kill()
    assert psutil.wait_procs(processes, 60)[1] == []
    [run] = (running.base / "output" / "graft").glob("job-*")
    saved = Checkpoints(Run(run)).latest().step
    assert len(log) <= saved == len(steps_in(running.base)) < 100_000
    assert not list(tmp_path.glob("graft-*"))


def test_a_process_that_would_train_another_run_than_the_server_shows_ends_before_its_first_step(monkeypatch):
    monkeypatch.setattr(workers, "_last", None)
    monkeypatch.setattr(workers, "_run", None)
    workers.require_same_run("7", "rex-01")
    workers.end_with("7", "rex-01")
    workers.require_same_run("7", "rex-01")
    workers.require_same_run("5", "stage-one-01")  # before it in the graph
    with pytest.raises(ValueError, match="would train rex-02, but ComfyUI shows rex-01"):
        workers.require_same_run("7", "rex-02")


def steps_in(base):
    return [line for path in (base / "output" / "graft").glob("job-*/log.jsonl") for line in read_log(path)]


def test_only_rank_0_writes_into_the_output_folder(monkeypatch):
    runs = paths.graft_folder()
    assert paths.own_folder(runs / "one") == runs / "one"
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    assert not paths.own_folder(runs / "one").is_relative_to(runs.parent)


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Have a shell script run in torchrun's place: `processes("exit 1")`."""

    def use(script):
        file = tmp_path / "torchrun.sh"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))

    return use


def train(folder):
    return workers.train(Run(folder), {"5": {}}, "5", 2, 0, 10, lambda progress: None)


def cancelled_when_there(folder, monkeypatch):
    """Train, and press Cancel when the processes have made the file `there`."""

    def cancel():
        if (folder / "there").exists():
            raise comfy.model_management.InterruptProcessingException

    monkeypatch.setattr(comfy.model_management, "throw_exception_if_processing_interrupted", cancel)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        train(folder)


@posix
def test_processes_that_fail_are_quoted(processes, tmp_path):
    processes("echo no room left on the card; exit 3")
    with pytest.raises(ValueError, match="no room left on the card"):
        train(tmp_path)


@posix
def test_what_the_processes_end_with_is_quoted_alone(processes, tmp_path):
    processes("echo graft worker: no room; echo graft worker: no room; seq 30; exit 3")
    with pytest.raises(ValueError, match="last output:\ngraft worker: no room$"):
        train(tmp_path)


@posix
def test_an_error_that_nobody_expected_is_quoted_without_what_torchrun_adds(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "LAUNCH", tmp_path / "launch.py")
    workers.LAUNCH.write_text("raise RuntimeError('no such device')")
    with pytest.raises(ValueError, match="RuntimeError: no such device") as error:
        train(tmp_path)
    assert "failed (exitcode: 1)" in str(error.value) and "ChildFailedError" not in str(error.value)


@posix
def test_cancel_asks_the_processes_to_save_and_end(processes, tmp_path, monkeypatch):
    processes(
        f"trap 'touch {tmp_path}/saved; exit 1' TERM; touch {tmp_path}/there; while :; do sleep 0.1; done"
    )

    cancelled_when_there(tmp_path, monkeypatch)
    assert (tmp_path / "saved").exists()


@posix
def test_cancel_asks_the_process_that_keeps_the_run_and_gives_it_time(processes, tmp_path, monkeypatch):
    """torchrun passes on what it gets, and ends its processes by force soon after."""
    keeper = f"trap 'touch {tmp_path}/asked; sleep 1; touch {tmp_path}/saved; exit 1' TERM; "
    keeper += f"touch {tmp_path}/there; while :; do sleep 0.1; done"
    processes(f"trap 'kill -9 $!; exit 1' TERM; RANK=0 sh -c \"{keeper}\" & wait; wait; exit 1")

    cancelled_when_there(tmp_path, monkeypatch)
    assert (tmp_path / "saved").exists()


@posix
def test_finish_ends_the_processes_and_queueing_again_starts_none(processes, tmp_path):
    go(tmp_path, 3)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")  # the log is ahead of what was saved
    processes("sleep 100")
    assert workers.train(Run(tmp_path), {"5": {}}, "5", 2, 0, 10, lambda progress: STOP) == 2
    processes("exit 3")
    assert train(tmp_path) == 2


@posix
def test_a_node_outside_the_queued_graph_cannot_use_several_cards(tmp_path):
    with pytest.raises(ValueError, match="gpus: only a Train Steps in the queued graph"):
        workers.train(Run(tmp_path), {"5": {}}, "12:3", 2, 0, 10, lambda progress: None)


def test_several_cards_are_refused_on_windows_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match="no NCCL.* Set gpus to 1 .* or run ComfyUI in WSL 2 or on Linux"):
        train(tmp_path)


def test_equal_tensors_differ_by_nothing():
    tensors = {"a": torch.ones(2)}
    assert difference(tensors, {"a": torch.ones(2) + 1e-3}) > 1e-6 and difference(tensors, tensors) == 0
