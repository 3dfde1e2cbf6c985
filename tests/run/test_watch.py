"""A run is saved as it goes and at its end, whatever the disk does."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from graft.training.config import CheckpointConfig, EmaConfig
from graft.training.files.lora.write import lora_tensors
from graft.training.run import watch
from graft.training.run.folder import Run
from graft.training.run.watch import DiskFull

from ..support.runs import CONFIG, assert_same, checkpoints, go
from ..support.runs import run as train_without_a_folder
from ..support.tiny import FAMILY


@pytest.mark.parametrize(("reserved", "is_enough"), [(100, True), (99, False)])
def test_a_checkpoint_needs_its_size_and_a_margin_of_what_is_free_and_what_is_held(
    reserved, is_enough, tmp_path, monkeypatch
):
    free = SimpleNamespace(free=watch.MARGIN)
    monkeypatch.setattr(watch.shutil, "disk_usage", lambda folder: free)
    with nullcontext() if is_enough else pytest.raises(DiskFull, match="32 MB are free"):
        watch.require_space(Run(tmp_path), 100, reserved)


@pytest.mark.feature(94)
def test_a_checkpoint_is_written_every_so_many_steps(tmp_path):
    saving = CheckpointConfig(minutes=60, steps=2, keep=9)
    go(tmp_path, 5, saving=saving)
    assert checkpoints(tmp_path) == [2, 4, 5]


def test_a_run_does_not_start_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(watch.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(DiskFull, match="0 MB are free"):
        go(tmp_path, 1)


def test_a_disk_that_fills_up_stops_the_run_with_a_saved_state(tmp_path, monkeypatch):
    free = iter([1 << 40, 1 << 40, 0])
    usage = shutil._ntuple_diskusage
    monkeypatch.setattr(watch, "DISK_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(watch.shutil, "disk_usage", lambda path: usage(1, 1, next(free)))
    with pytest.raises(DiskFull, match="queue the graph again"):
        go(tmp_path, 9, saving=CheckpointConfig(minutes=60))
    monkeypatch.undo()
    assert checkpoints(tmp_path) == [2]
    assert_same(go(tmp_path, 4).load(), train_without_a_folder(steps=4))


def test_a_failed_write_is_reported_and_training_goes_on(tmp_path, monkeypatch, caplog):
    save, failures = watch.save_state, [OSError("locked")] * 3  # the first is tried again at once

    def sometimes(state, folder):
        if failures:
            raise failures.pop()
        return save(state, folder)

    monkeypatch.setattr(watch, "save_state", sometimes)
    assert_same(go(tmp_path, 4).load(), train_without_a_folder(steps=4))
    assert caplog.text.count("could not be saved (locked)") == 2


def test_a_checkpoint_has_its_lora_file(tmp_path):
    config = dataclasses.replace(CONFIG, ema=EmaConfig(decay=0.5))
    state = go(tmp_path / "kitty-0123", 2, config=config).load()
    path = tmp_path / "kitty-0123" / "loras" / "kitty-000002.safetensors"
    expected = lora_tensors(dataclasses.replace(state, weights=state.ema), FAMILY, torch.bfloat16)
    found = load_file(path)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    exact = {key for key, tensor in found.items() if tensor.dtype == torch.float32}
    assert exact == {key for key in found if key.endswith(".alpha")} < found.keys()
    with safe_open(path, "pt") as file:
        assert file.metadata()["modelspec.title"] == "kitty at step 2"
    go(tmp_path / "without", 1, saving=CheckpointConfig(lora=False))
    assert not (tmp_path / "without" / "loras").exists()


def test_a_lora_file_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch, "write_lora", full)
    assert_same(go(tmp_path, 3).load(), train_without_a_folder(steps=3))
    assert "the LoRA file of step 1 could not be written" in caplog.text


def test_a_drive_that_is_away_for_a_moment_does_not_end_a_run(tmp_path, monkeypatch):
    def away(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(watch.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 0, 1 << 40))
    monkeypatch.setattr(watch, "DISK_CHECK_SECONDS", 0.0)

    def on_step(progress, handles):
        monkeypatch.setattr(watch.shutil, "disk_usage", away)

    assert go(tmp_path, 3, on_step=on_step).step == 3


def test_the_last_save_waits_for_a_drive_and_says_what_is_lost_without_one(tmp_path, monkeypatch):
    save, failures = watch.save_state, [OSError("away"), OSError("away")]
    monkeypatch.setattr(watch, "save_state", lambda *args: _fail(failures) or save(*args))
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)
    rarely = CheckpointConfig(minutes=60)
    assert go(tmp_path, 3, saving=rarely).step == 3 and not failures
    monkeypatch.setattr(watch, "AWAY_SECONDS", 0.0)
    failures += [OSError("away")] * 2
    with pytest.raises(OSError, match="could not be saved .away.. What it trained after .* is lost") as error:
        go(tmp_path, 5, saving=rarely)
    assert str(tmp_path) in str(error.value)


def _fail(failures):
    if failures:
        raise failures.pop()


def test_a_full_disk_is_told_from_one_with_room_and_from_one_that_is_away(tmp_path, monkeypatch):
    guard = watch.Watch(Run(tmp_path), FAMILY, train_without_a_folder(steps=1), lambda *of_step: None)
    free = [0, 1 << 40]
    monkeypatch.setattr(watch.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free.pop(0)))
    assert guard.is_disk_full() is True and not guard.is_disk_full()
    monkeypatch.setattr(watch.shutil, "disk_usage", lambda folder: _fail([OSError("away")]))
    assert not guard.is_disk_full()
