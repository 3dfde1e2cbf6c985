"""A process computes on the GPU it was given, and on no other."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from graft.commands import train
from graft.commands.headless import gpu
from graft.commands.headless.gpu import choose_gpu
from graft.tests.support.jobs import document
from graft.training.job.read import compile_job


@pytest.fixture
def visible(monkeypatch):
    """Set what the process was given: `visible(cuda, hip)`."""

    def give(*values):
        for name, value in zip(gpu.VISIBLE, values, strict=True):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    give("0", "0")  # put back afterwards
    return give


@pytest.mark.parametrize(
    ("cuda", "hip", "number", "chosen"),
    [
        (None, None, 1, "1"),
        ("1", None, 0, "1"),
        ("2,3", None, 1, "3"),
        (None, "2,3", 1, "3"),
        ("2,3", "2,3", 0, "2"),
        ("GPU-8f,GPU-9a", None, 1, "GPU-9a"),
    ],
)
def test_a_gpu_is_counted_among_the_visible_ones_on_nvidia_and_amd(visible, cuda, hip, number, chosen):
    visible(cuda, hip)
    choose_gpu(number)
    assert [os.environ[name] for name in gpu.VISIBLE] == [chosen, chosen]


def test_hidden_gpus_stay_hidden(visible):
    visible("", None)
    choose_gpu(0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and "HIP_VISIBLE_DEVICES" not in os.environ


def test_a_gpu_that_is_not_visible_is_refused(visible):
    visible("4,5", None)
    with pytest.raises(ValueError, match="GPU 2 was asked for, but only 2 can be seen.*from 0 to 1"):
        choose_gpu(2)


@pytest.mark.parametrize(
    ("device", "chosen"), [(None, "2,3"), ("cuda", "2,3"), ("cuda:0", "2"), ("cuda:1", "3"), ("cpu", "2,3")]
)
def test_a_job_is_trained_on_the_visible_gpu_it_names(visible, monkeypatch, tmp_path, device, chosen):
    seen = []

    @contextmanager
    def server(comfyui, base, *, options, cpu):
        seen.append((os.environ["CUDA_VISIBLE_DEVICES"], "--cuda-device" in options))
        yield

    job = compile_job(document("device", device) if device else document(), tmp_path)
    given = {
        "read_job": lambda path, **options: job,
        "find_comfyui": lambda: tmp_path,
        "comfyui_version": lambda folder: "0",
        "server": server,
        "reporting": nullcontext,
        "train": lambda *args: None,
    }
    for name, stand_in in given.items():
        monkeypatch.setattr(train, name, stand_in)
    visible("2,3", None)
    assert train.run(SimpleNamespace(job=None, cpu=False)) == 0
    assert seen == [(chosen, False)]
