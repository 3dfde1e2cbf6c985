"""A run never trains the same step twice and never loses one, whatever ends it."""

from __future__ import annotations

import csv
import dataclasses
import errno
import itertools
import json
import logging
import os
import shutil
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from graft.tests.support.runs import (
    CONFIG,
    Cancelled,
    assert_same,
    checkpoints,
    counting,
    failing_at,
    finish_at,
    go,
)
from graft.tests.support.runs import run as train_without_a_folder
from graft.training import loop
from graft.training.config import CheckpointConfig, OptimizerConfig, from_dict, to_dict
from graft.training.live_state import LiveState
from graft.training.optimizer.rows import OPTIMIZERS
from graft.training.run import execute as execute_module
from graft.training.run import lock
from graft.training.run.checkpoints import Checkpoints
from graft.training.run.execute import execute, run_key
from graft.training.run.folder import Run
from graft.training.run.lock import lock_folder
from graft.training.run.new_run_notes import new_run_notes
from graft.training.run.run_log import read_log
from graft.training.run.saved_state import open_state, save_state

from ..support.tiny import TinyDataset, TinyDenoiser, TinySamples


def test_a_finished_run_costs_no_step(tmp_path):
    first, seen = go(tmp_path, 4), []
    assert go(tmp_path, 4, on_step=counting(seen)) == first and not seen


def test_more_steps_continue_where_fewer_ended(tmp_path):
    go(tmp_path, 3)
    seen = []
    assert_same(go(tmp_path, 5, on_step=counting(seen)).load(), train_without_a_folder(steps=5))
    assert seen == [4, 5]


def test_fewer_steps_give_the_earlier_state_and_leave_the_later_one(tmp_path):
    later = go(tmp_path, 5)
    assert_same(go(tmp_path, 2).load(), train_without_a_folder(steps=2))
    assert_same(later.load(), train_without_a_folder(steps=5))


def test_two_runs_in_a_chain_equal_one(tmp_path):
    half = go(tmp_path / "a", 3)
    assert_same(go(tmp_path / "b", 3, start=half).load(), train_without_a_folder(steps=6))


@pytest.mark.parametrize("error", [Cancelled(), RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_run_that_was_cancelled_resumes_bit_equal(tmp_path, error):
    rarely = CheckpointConfig(minutes=60)
    with pytest.raises(type(error)):
        go(tmp_path, 6, on_step=failing_at(3, error), saving=rarely)
    seen = []
    assert_same(
        go(tmp_path, 6, on_step=counting(seen), saving=rarely).load(), train_without_a_folder(steps=6)
    )
    assert seen == [4, 5, 6]


def test_a_finished_run_costs_nothing_for_the_same_steps_and_goes_on_for_any_other_number(tmp_path):
    stop = go(tmp_path, 9, on_step=finish_at(2))
    assert stop.step == 2 and Checkpoints(Run(tmp_path)).find_result(None, 9, CONFIG) == stop
    seen = []
    assert [go(tmp_path, steps, on_step=counting(seen)) for steps in (9, 2)] == [stop] * 2
    assert not seen and go(tmp_path, 1).step == 1
    for steps in (3, 7, 9):  # what was trained since then makes 9 a number like any other
        assert_same(go(tmp_path, steps, on_step=counting(seen)).load(), train_without_a_folder(steps=steps))
    assert seen == [3, 4, 5, 6, 7, 8, 9]


def test_a_finished_run_goes_on_beyond_what_was_asked_for_then(tmp_path):
    go(tmp_path, 6, on_step=finish_at(2))
    assert_same(go(tmp_path, 7).load(), train_without_a_folder(steps=7))


def test_a_run_behind_a_finished_one_is_finished_and_continued_in_the_same_way(tmp_path):
    first = go(tmp_path / "a", 6, on_step=finish_at(2))
    second = go(tmp_path / "b", 4, start=first, on_step=finish_at(3))
    again = go(tmp_path / "a", 6)
    assert again == first and go(tmp_path / "b", 4, start=again) == second and second.step == 3
    assert_same(go(tmp_path / "b", 3, start=again).load(), train_without_a_folder(steps=5))


def test_an_error_inside_an_optimizer_step_falls_back_to_the_saved_one(tmp_path, monkeypatch, caplog):
    optimize = torch.optim.AdamW.step

    def fails(self, *args):
        optimize(self, *args)
        if next(iter(self.state.values()))["step"] == 3:
            raise RuntimeError("out of memory")

    go(tmp_path, 1)
    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        go(tmp_path, 4, saving=CheckpointConfig(minutes=60))
    assert checkpoints(tmp_path) == [1] and "half done" in caplog.text
    monkeypatch.undo()
    assert_same(go(tmp_path, 4).load(), train_without_a_folder(steps=4))


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", '{"format": 1, "st'])
def test_a_damaged_file_of_values_never_blocks_a_resume(tmp_path, caplog, text):
    with pytest.raises(Cancelled):
        go(tmp_path, 6, on_step=failing_at(4, Cancelled()))
    (tmp_path / "checkpoints" / "step-00000004" / "state.json").write_text(text)
    (tmp_path / "config.json").write_text(text)
    assert new_run_notes(Run(tmp_path), CONFIG, None, 6) == []
    seen = []
    assert_same(go(tmp_path, 6, on_step=counting(seen)).load(), train_without_a_folder(steps=6))
    assert seen == [4, 5, 6] and "Falling back" in caplog.text


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_goes_on_with_the_defaults_its_model_had_when_it_began(tmp_path, monkeypatch, caplog, kept):
    straight, half = train_without_a_folder(steps=4), go(tmp_path, 2).load()
    if not kept:  # as by an earlier version, or damaged
        (tmp_path / "objective.json").write_text("{")
    row = dataclasses.replace(TinyDenoiser.family, sigmas="uniform", shift=6.0, space="x0")
    monkeypatch.setattr("graft.tests.support.tiny.TinyDenoiser.family", row)
    changed = train_without_a_folder(half, steps=2)
    assert straight.losses[2:] != changed.losses[2:]
    for _ in range(2):
        assert_same(go(tmp_path, 4).load(), straight if kept else changed)
    assert ("objective.json" in caplog.text) != kept


def test_a_run_goes_on_with_the_guidance_its_model_had_when_it_began(tmp_path, monkeypatch):
    seen, denoise = [], TinyDenoiser.denoise

    def watched(self, x_t, sigma, batch):
        seen.append(batch.extras[0].get("guidance") if batch.extras else None)
        return denoise(self, x_t, sigma, batch)

    monkeypatch.setattr("graft.tests.support.tiny.TinyDenoiser.denoise", watched)
    for steps, guidance, expected in ((1, 1.0, 1.0), (2, 3.5, 1.0), (3, None, None)):
        row = dataclasses.replace(TinyDenoiser.family, guidance=guidance)
        monkeypatch.setattr("graft.tests.support.tiny.TinyDenoiser.family", row)
        seen.clear()
        go(tmp_path, steps)
        assert set(seen) == {expected}
    kept = json.loads((tmp_path / "objective.json").read_text())
    (tmp_path / "objective.json").write_text(json.dumps({**kept, "guidance": -1.0}))  # an earlier version's
    row = dataclasses.replace(TinyDenoiser.family, guidance=2.0)
    monkeypatch.setattr("graft.tests.support.tiny.TinyDenoiser.family", row)
    seen.clear()
    go(tmp_path, 4)
    assert set(seen) == {2.0}


def test_the_log_keeps_what_it_says_of_later_checkpoints(tmp_path):
    rarely = CheckpointConfig(minutes=60)
    go(tmp_path, 6, saving=rarely)
    go(tmp_path, 3, saving=rarely)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert go(tmp_path, 6).step == 6


@pytest.mark.feature(100)
def test_the_log_has_every_step_once_after_a_resume(tmp_path):
    with pytest.raises(Cancelled):
        go(tmp_path, 6, on_step=failing_at(4, Cancelled()))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    with (tmp_path / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "lo')
    state = go(tmp_path, 6).load()
    lines = read_log(tmp_path / "log.jsonl")
    table = list(csv.DictReader((tmp_path / "log.csv").open(encoding="utf-8")))
    assert [line["step"] for line in lines] == [int(row["step"]) for row in table] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == pytest.approx(state.losses, rel=1e-6)


def test_the_folder_says_how_it_was_trained(tmp_path):
    go(tmp_path, 1)
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert from_dict(type(CONFIG), settings) == CONFIG and settings == json.loads(json.dumps(to_dict(CONFIG)))


def test_progress_counts_time_images_and_steps(tmp_path):
    seen = []
    go(tmp_path, 3, on_step=lambda progress, handles: seen.append(progress))
    assert [(p.step, p.total, p.images) for p in seen] == [(1, 3, 2), (2, 3, 2), (3, 3, 2)]
    assert seen[-1].smoothed == pytest.approx(sum(p.loss for p in seen) / 3) and seen[-1].time_left == 0


def test_the_time_that_is_left_goes_by_the_pace_so_far(tmp_path, monkeypatch):
    seen, moments = [], itertools.count()  # of the start, and each step's begin, end and report
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: float(next(moments))))
    go(tmp_path, 3, on_step=lambda progress, handles: seen.append(progress))
    assert [p.seconds for p in seen] == [1, 1, 1]
    assert [p.time_left for p in seen] == [2 * 3 / 1, 1 * 6 / 2, 0]


def test_one_run_is_not_trained_twice_at_a_time(tmp_path):
    go(tmp_path, 1)
    with lock_folder(tmp_path), pytest.raises(ValueError, match=f"already, by process {os.getpid()}; wait"):
        go(tmp_path, 2)
    assert go(tmp_path, 2).step == 2


def test_a_drive_without_locks_is_trained_on_all_the_same(tmp_path, monkeypatch, caplog):
    def without_locks(file):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_lock", without_locks)
    assert go(tmp_path, 1).step == 1 and "cannot be locked" in caplog.text


def test_a_folder_that_cannot_be_written_is_named_before_any_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="no run can be kept here"):
        go(tmp_path / "file" / "run", 1)


def test_a_state_that_another_one_replaced_is_not_loaded(tmp_path):
    handle = go(tmp_path, 2)
    save_state(train_without_a_folder(steps=1), handle.path)
    with pytest.raises(ValueError, match="another training state"):
        handle.load()


def test_the_key_follows_everything_that_decides_the_result(tmp_path):
    denoiser, dataset = TinyDenoiser(), TinyDataset()
    other = dataclasses.replace(CONFIG, seed=8)
    keys = {
        run_key(denoiser, dataset, CONFIG, None),
        run_key(denoiser, dataset, other, None),
        run_key(TinyDenoiser(1), dataset, CONFIG, None),
        run_key(denoiser, dataset, CONFIG, go(tmp_path, 1)),
        run_key(denoiser, dataset, CONFIG, None, TinySamples()),
    }
    assert len(keys) == 5 and run_key(denoiser, dataset, CONFIG, None) in keys


def test_a_run_in_another_thread_is_saved_by_an_interrupt(tmp_path):
    errors = []

    def work():
        try:
            go(tmp_path, 6, on_step=failing_at(2, Cancelled()), saving=CheckpointConfig(minutes=60))
        except Cancelled as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors and checkpoints(tmp_path) == [2]
    assert_same(go(tmp_path, 6).load(), train_without_a_folder(steps=6))


@pytest.mark.feature(101)
def test_a_parameter_that_no_gradient_reaches_is_named(caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    build = LiveState.__init__

    def cut_off(self, *args):
        build(self, *args)
        self.adapters["blocks.0.mlp"].forward = lambda layer, x: layer.forward(x)

    monkeypatch.setattr(LiveState, "__init__", cut_off)
    train_without_a_folder(steps=1)
    assert "no gradient" not in caplog.text
    train_without_a_folder(steps=2)
    assert "no gradient has reached 2 of" in caplog.text and "blocks.0.mlp.down" in caplog.text


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_that_reaches_every_parameter_is_said_to_leave_some_out(name, caplog):
    optimizer = dataclasses.replace(CONFIG.optimizer, name=name)
    train_without_a_folder(steps=9, config=dataclasses.replace(CONFIG, optimizer=optimizer))
    assert "no gradient" not in caplog.text


def test_a_run_that_nothing_reaches_is_stopped(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "any", lambda self: False)
    with pytest.raises(ValueError, match="nothing would be learned"):
        train_without_a_folder(steps=2)


def test_an_image_that_is_no_number_is_named_and_the_weights_are_kept(tmp_path):
    class Spoilt(TinyDataset):
        def batch(self, size, *, seed, index):
            batch = super().batch(size, seed=seed, index=index)
            if index == 2:
                batch.latents[1] = float("nan")
            return batch

    with pytest.raises(FloatingPointError, match=r"step 3: .* 1\.png at sigma 0\.\d+"):
        execute(Run(tmp_path), TinyDenoiser(), Spoilt(), CONFIG, None, steps=4)
    saved = open_state(tmp_path / "checkpoints" / "step-00000002").load()
    assert_same(saved, train_without_a_folder(steps=2))


def test_a_clock_that_is_set_back_disturbs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", iter(range(10**9, 0, -1000)).__next__)
    assert_same(go(tmp_path, 3).load(), train_without_a_folder(steps=3))
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]


def test_a_changed_setting_takes_effect_on_a_state_from_elsewhere(tmp_path):
    start = go(tmp_path / "a", 2)
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.5))
    assert not torch.equal(
        next(iter(go(tmp_path / "b", 2, start=start, config=config).load().weights.values())),
        next(iter(go(tmp_path / "c", 2, start=start).load().weights.values())),
    )


def test_another_process_than_rank_0_ends_when_its_own_step_says_so(monkeypatch, tmp_path):
    """What `on_step` answers reaches the training, and so does a signal."""
    state, told = train_without_a_folder(steps=1), []
    shared = iter([(state, CONFIG.objective), state])
    monkeypatch.setattr(execute_module.distributed, "share", lambda value: next(shared))

    def trained(denoiser, dataset, config, state, *, on_step, **options):
        told.append(on_step(None, None))

    monkeypatch.setattr(execute_module, "train", trained)
    follow = partial(execute_module.follow, on_step=lambda *of_step: loop.STOP, validation=None)
    follow(Run(tmp_path), TinyDenoiser(), TinyDataset(), CONFIG, 2)
    assert told == [loop.STOP]
