"""Console line, log files and TensorBoard say the same of a step, and none of them can stop a run."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
import sys
from contextlib import closing

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from graft.tests.support.runs import CONFIG
from graft.training.config import CheckpointConfig
from graft.training.loop import Progress
from graft.training.optional_packages import optional
from graft.training.run import run_log
from graft.training.run.execute import execute
from graft.training.run.folder import Run
from graft.training.run.run_log import (
    RunLog,
    clock,
    describe,
    entry_of,
    progress_of,
    read_entries,
    read_log,
)

from ..support.tiny import TinyDataset, TinyDenoiser

STEP = Progress(
    step=40,
    loss=0.125,
    lr=1e-4,
    grad_norm=0.5,
    seconds=2.0,
    total=100,
    smoothed=0.25,
    images=4,
    time_left=125.0,
)


@pytest.mark.feature(99)
def test_a_line_says_where_a_run_stands():
    text = describe(dataclasses.replace(STEP, validation=0.3, memory=3 << 30, plan="fp8, block"))
    assert text == (
        "step 40/100  loss 0.1250 (mean 0.2500)  validation 0.3000  2.00 s/step  2:05 left  lr 1.00e-04  "
        "gradient 0.5  3.0 GB (fp8, block)"
    )


def test_a_line_leaves_out_what_is_not_known():
    text = describe(dataclasses.replace(STEP, time_left=math.nan))
    assert text == "step 40/100  loss 0.1250 (mean 0.2500)  2.00 s/step  lr 1.00e-04  gradient 0.5"


def test_a_step_that_is_read_from_the_log_of_another_process_is_described_as_it_was_there(tmp_path):
    """All of a Progress can be written down: what a step can do is in its Handles."""
    steps = [STEP, dataclasses.replace(STEP, step=41, validation=0.3, time_left=math.nan)]
    log = RunLog(tmp_path, 39)
    for step in steps:
        log.write(step)
    again = [progress_of(entry, total=100) for entry in read_entries(tmp_path / "log.jsonl", 0)["entries"]]
    assert [describe(step) for step in again] == [describe(step) for step in steps]
    assert not any(callable(value) for value in vars(STEP).values())


def test_durations_read_like_a_clock():
    assert [clock(seconds) for seconds in (42, 725, 3723)] == ["0:42", "12:05", "1:02:03"]


def test_an_entry_holds_the_same_and_none_for_what_does_not_apply():
    line = entry_of(STEP)
    assert (line["step"], line["loss"], line["images_per_second"], line["time_left"]) == (
        40,
        0.125,
        2.0,
        125.0,
    )
    assert line["validation"] is None and line["memory"] is None and line["epoch"] is None


def test_an_epoch_is_counted_where_the_dataset_knows_its_length(tmp_path):
    class Counted(TinyDataset):
        def steps_per_epoch(self, size):
            return 4 // size

    execute(Run(tmp_path), TinyDenoiser(), Counted(), CONFIG, None, steps=3)
    assert [line["epoch"] for line in read_log(tmp_path / "log.jsonl")] == [0.5, 1.0, 1.5]


def test_a_log_that_cannot_be_written_does_not_stop_a_run(tmp_path, caplog):
    (tmp_path / "log.csv").mkdir()
    assert execute(Run(tmp_path), TinyDenoiser(), TinyDataset(), CONFIG, None, steps=2).step == 2
    assert "log.csv cannot be written" in caplog.text and "training goes on without it" in caplog.text
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2]


def test_a_log_that_could_not_be_written_for_a_while_lacks_no_line(tmp_path, monkeypatch):
    """Excel has log.csv open from the first step on, then a drive goes away in the middle of a line."""
    monkeypatch.setattr(run_log, "RETRY_SECONDS", 0.0)
    table = tmp_path / "log.csv"
    table.mkdir()

    def on_step(progress, handles):
        if progress.step == 2:
            table.rmdir()
        if progress.step == 4:
            with table.open("a") as file:
                file.write("4,torn")
            table.rename(tmp_path / "away")
            table.mkdir()
        if progress.step == 6:
            table.rmdir()
            (tmp_path / "away").rename(table)

    execute(Run(tmp_path), TinyDenoiser(), TinyDataset(), CONFIG, None, steps=8, on_step=on_step)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [*range(1, 9)]
    first, *lines = table.read_text().splitlines()
    assert first.startswith("step,") and [int(line.split(",")[0]) for line in lines] == [*range(1, 9)]


def test_after_a_failure_a_log_is_left_alone_for_a_while_and_completed_at_the_end(tmp_path):
    (tmp_path / "log.csv").mkdir()
    log = RunLog(tmp_path, 0)
    (tmp_path / "log.csv").rmdir()
    log.write(STEP)
    assert not (tmp_path / "log.csv").exists()
    log.close()
    assert (tmp_path / "log.csv").read_text().count("\n") == 2


def rows(path, fields="step"):
    with closing(sqlite3.connect(path)) as table:
        return table.execute(f"SELECT {fields} FROM steps ORDER BY step").fetchall()


@pytest.mark.feature(100)
def test_a_log_as_a_table_has_every_step_once_after_a_resume(tmp_path):
    run = Run(tmp_path, CheckpointConfig(steps=4, sqlite=True))
    execute(run, TinyDenoiser(), TinyDataset(), CONFIG, None, steps=4)
    (tmp_path / "log.sqlite-journal").write_bytes(b"of a process that was killed")
    execute(run, TinyDenoiser(), TinyDataset(), CONFIG, None, steps=6)
    known = [tuple(line[name] for name in run_log.FIELDS) for line in read_log(tmp_path / "log.jsonl")]
    assert rows(tmp_path / "log.sqlite", ", ".join(run_log.FIELDS)) == known and len(known) == 6
    execute(Run(tmp_path / "plain"), TinyDenoiser(), TinyDataset(), CONFIG, None, steps=1)
    assert not (tmp_path / "plain" / "log.sqlite").exists()


def test_a_table_that_somebody_holds_or_that_is_gone_stops_no_run_and_lacks_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "RETRY_SECONDS", 0.0)
    table, away = tmp_path / "log.sqlite", tmp_path / "away"

    def on_step(progress, handles):
        if progress.step == 2:
            holder.append(sqlite3.connect(table, isolation_level=None))
            holder[0].execute("BEGIN EXCLUSIVE")
        if progress.step == 4:
            holder.pop().close()
        if progress.step == 5:
            table.rename(away)
        if progress.step == 7:
            assert not table.exists(), "nothing is begun in its place"
            away.rename(table)

    holder = []
    run = Run(tmp_path, CheckpointConfig(sqlite=True))
    execute(run, TinyDenoiser(), TinyDataset(), CONFIG, None, steps=8, on_step=on_step)
    assert rows(table) == [(step,) for step in range(1, 9)]


def test_a_python_without_sqlite_is_named_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.raises(ValueError, match="switch sqlite off in Checkpoint Settings"):
        RunLog(tmp_path, 0, sqlite=True)


@pytest.mark.parametrize("python, shown", [("/a b/python", '"/a b/python"'), ("/a/python", "/a/python")])
def test_a_command_is_quoted_only_where_it_must_be(python, shown, monkeypatch):
    """PowerShell takes a quoted path for text, and then -m for an error."""
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(ValueError, match=f"\\n{shown} -m pip install no_such"):
        optional("no_such", "it", "do without")


def test_a_log_that_is_no_log_is_begun_anew(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b"\xff\xfe\x00")
    RunLog(tmp_path, 0).write(STEP)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [40]


@pytest.mark.feature(100, 136)
def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path):
    """By its own reader. The steps after a checkpoint are logged twice; the later ones count."""
    for begin, steps, loss in ((0, range(1, 5), 0.5), (2, range(3, 7), 0.25)):
        log = RunLog(tmp_path, begin, tensorboard=True)
        for step in steps:
            log.write(dataclasses.replace(STEP, step=step, loss=loss))
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {
        f"graft/{name}" for name in ("loss", "smoothed", "lr", "grad_norm")
    }
    shown = [(event.step, event.value) for event in events.Scalars("graft/loss")]
    assert shown == [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25), (5, 0.25), (6, 0.25)]


@pytest.mark.feature(136)
def test_a_run_writes_for_tensorboard_what_its_state_says(tmp_path):
    run = Run(tmp_path, CheckpointConfig(), tensorboard=True)
    state = execute(run, TinyDenoiser(), TinyDataset(), CONFIG, None, steps=2).load()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("graft/loss")] == pytest.approx(state.losses, rel=1e-6)


def test_missing_tensorboard_is_named_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = Run(tmp_path, tensorboard=True)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        execute(run, TinyDenoiser(), TinyDataset(), CONFIG, None, steps=1)


def test_new_lines_are_read_once_and_torn_ones_later(tmp_path):
    file = tmp_path / "log.jsonl"
    assert read_entries(file, 0) == {"start": 0, "next": 0, "more": False, "entries": []}
    file.write_bytes(b'{"step": 1}\n{"ste')
    part = read_entries(file, 0)
    assert part["entries"] == [{"step": 1}]
    file.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    part = read_entries(file, part["next"])
    assert part["entries"] == [{"step": 2}]
    file.write_bytes(b'{"step": 1}\n')
    assert read_entries(file, part["next"])["entries"] == [{"step": 1}]


def test_a_long_log_is_read_piece_by_piece_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "CHUNK", 20)
    file, place, found = tmp_path / "log.jsonl", 0, []
    file.write_bytes(b"".join(b'{"step": %d}\n' % step for step in (1, 2, 3)))
    for _ in range(4):
        part = read_entries(file, place)
        found.append(([line["step"] for line in part["entries"]], part["start"], part["more"]))
        place = part["next"]
    assert found == [([1], 0, True), ([2], 12, True), ([3], 24, False), ([], 36, False)]
