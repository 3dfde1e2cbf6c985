"""Runs in their folder: the list of all, what differs, sizes, and deleting one."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from graft.commands.cli import main
from graft.tests.support.runs import CONFIG, counting, finish_at, go
from graft.training.config import CheckpointConfig
from graft.training.data.store import Store
from graft.training.data.thumbnail import thumbnail
from graft.training.run.checkpoints import PINNED
from graft.training.run.delete_run import DELETED, delete_run
from graft.training.run.lock import lock_folder
from graft.training.run.queued import note_queued
from graft.training.run.run_list import DEEPEST, find_runs, list_runs, size_of
from graft.training.run.watch import SAVE
from graft.training.user_error import UserError

ANNA, LATER, REX = "people/anna-0123456789abcdef", "people/anna-fedcba9876543210", "rex-0123456789abcdef"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three runs: anna's, anna's at another rate that Finish ended, and rex's; beside what is no run."""
    root = tmp_path_factory.mktemp("output") / "graft"
    slower = replace(CONFIG, optimizer=replace(CONFIG.optimizer, lr=1e-4))
    for date, (run, config, on_step) in enumerate(
        ((ANNA, CONFIG, counting([])), (LATER, slower, finish_at(2)), (REX, CONFIG, counting([])))
    ):
        go(root / run, 4, config=config, on_step=on_step)
        note_queued(root / run, "digest", 4)
        for file in ("log.jsonl", "config.json"):
            os.utime(root / run / file, (1e9 + date, 1e9 + date))
    for other in ("cache/latents-0123456789abcdef", "states/anna-0123456789abcdef", "notes"):
        (root / other).mkdir(parents=True)
        (root / other / "config.json").write_text("{}")
    return root


def test_every_run_is_listed_with_what_it_reached_and_how_it_differs(trained):
    rows = list_runs(trained)
    assert [(row.run, row.name, row.step, row.last, row.ended) for row in rows] == [
        (REX, "rex", 4, 4, True),
        (LATER, "people/anna", 2, 4, True),
        (ANNA, "people/anna", 4, 4, True),
    ]
    assert rows[1].differs == [("optimizer.lr", 1e-3, 1e-4)] and not rows[0].differs and not rows[2].differs
    last = json.loads((trained / REX / "log.jsonl").read_text().splitlines()[-1])
    assert rows[0].loss == last["smoothed"] and rows[0].settings["adapter.rank"] == 4
    files = [path for path in (trained / REX).rglob("*") if path.is_file()]
    assert rows[0].bytes == size_of(trained / REX) == sum(path.stat().st_size for path in files)


def test_a_run_is_as_old_as_the_newest_of_its_files(tmp_path):
    for number, dates in enumerate(((5, 1), (2, 3))):
        folder = tmp_path / f"run-000000000000000{number}"
        folder.mkdir()
        for file, date in zip(("log.jsonl", "config.json"), dates, strict=True):
            (folder / file).write_text("{}")
            os.utime(folder / file, (1e9 + date, 1e9 + date))
    assert [row.run[-1] for row in list_runs(tmp_path)] == ["0", "1"]


def test_runs_lie_at_most_so_deep(tmp_path):
    deep = tmp_path
    for number in range(DEEPEST + 1):
        deep = deep / f"folder {number}"
        (deep / "run-0123456789abcdef").mkdir(parents=True)
        (deep / "run-0123456789abcdef" / "config.json").write_text("{}")
    assert len(list(find_runs(tmp_path))) == DEEPEST - 1


def test_a_run_is_shown_by_the_first_picture_of_its_newest_samples(tmp_path):
    samples = tmp_path / REX / "samples"
    samples.mkdir(parents=True)
    (tmp_path / REX / "config.json").write_text("{}")
    assert [row.sample for row in list_runs(tmp_path)] == [""]
    for step, number in ((2, 1), (2, 2), (4, 1), (4, 2)):
        (samples / f"step-{step:08d}-{number}.png").touch()
    assert [row.sample for row in list_runs(tmp_path)] == ["step-00000004-1.png"]


def test_the_list_takes_damaged_runs_as_they_are(trained, tmp_path):
    folder = tmp_path / "x-0123456789abcdef"
    folder.mkdir()
    (folder / "log.jsonl").write_text('{"step": "two"}\n{"step": 3')
    (folder / "config.json").write_text("[" * 100_000)
    (folder / "queued.json").write_text("5")
    [row] = list_runs(tmp_path)
    assert (row.step, row.last, row.loss, row.settings, row.ended) == (0, 0, None, {}, False)
    assert find_runs(tmp_path / "nowhere") == []


@pytest.fixture
def copied(trained, tmp_path):
    """A folder with one run, and a link to another."""
    go(tmp_path / REX, 2)
    try:
        (tmp_path / "linked-0123456789abcdef").symlink_to(trained / ANNA, target_is_directory=True)
    except OSError:
        pytest.skip("no symbolic links here")
    return tmp_path


def test_a_run_is_deleted_whole_and_nothing_else(copied, trained):
    dead = copied / f"{DELETED}half"
    dead.mkdir()
    size = size_of(copied / REX)
    assert delete_run(copied, REX) == size > 0
    assert {path.name for path in copied.iterdir()} == {"linked-0123456789abcdef", dead.name}
    assert (trained / ANNA / "log.jsonl").is_file()


@pytest.mark.parametrize("run", ["linked-0123456789abcdef", "nobody", "", "..", f"../{REX}", "\0", "*"])
def test_what_is_no_run_is_not_deleted(copied, run):
    before = sorted(copied.rglob("*"))
    with pytest.raises(UserError, match="no such run"):
        delete_run(copied, run)
    assert sorted(copied.rglob("*")) == before


def test_a_run_that_is_trained_is_not_deleted(copied):
    before = size_of(copied / REX)
    with lock_folder(copied / REX), pytest.raises(UserError, match="is being trained already"):
        delete_run(copied, REX)
    assert abs(size_of(copied / REX) - before) < 100  # the lock's text


def test_where_an_open_file_holds_the_folder_its_files_go_nevertheless(copied, monkeypatch):
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError()))
    delete_run(copied, REX)
    assert not (copied / REX).exists()


def test_the_command_lists_runs_and_deletes_those_it_is_told_once_it_was_asked(copied, capsys, monkeypatch):
    clean = ["clean", "runs", str(copied)]
    assert main(clean) == 0
    listed = capsys.readouterr().out
    assert REX in listed and f"{size_of(copied / REX) / 1e6:.1f} MB" in listed and "in 1 runs" in listed
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert main([*clean, REX]) == 1 and (copied / REX).is_dir()
    assert main([*clean, REX, "nobody"]) == 2 and "nobody: no such run" in capsys.readouterr().err
    assert main(["clean", "runs"]) == 2 and main(["clean", "runs", str(copied / "none")]) == 2
    assert main([*clean, REX, "--yes"]) == 0 and not (copied / REX).exists()


def test_the_cache_is_cleaned_of_thumbnails_that_nobody_has_seen_for_a_while(tmp_path):

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    drawn = thumbnail(tmp_path / "a.png", tmp_path / "cache")
    for date, files in ((None, 0), (1e9, 1)):
        if date:
            os.utime(drawn, (date, date))
        assert Store(tmp_path / "cache").clean(unused_days=30).files == files
    drawn = thumbnail(tmp_path / "a.png", tmp_path / "cache")
    os.utime(drawn, (1e9, 1e9))
    thumbnail(tmp_path / "a.png", tmp_path / "cache")
    assert Store(tmp_path / "cache").clean(unused_days=30).files == 0


def test_a_step_is_saved_on_request_with_its_lora_and_kept(tmp_path):
    saving = CheckpointConfig(lora=False, steps=0)
    folder = tmp_path / REX
    go(folder, 9, saving=saving, on_step=lambda progress, _: SAVE if progress.step == 3 else None)
    assert (folder / "checkpoints" / "step-00000003" / PINNED).is_file()
    assert [path.name for path in (folder / "loras").iterdir()] == ["rex-000003.safetensors"]
    uninterrupted = go(tmp_path / "b", 9, saving=saving)
    assert uninterrupted.digest == go(folder, 9, saving=saving).digest
