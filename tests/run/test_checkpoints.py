"""Checkpoints: the newest sound one is found, those that are needed stay, the others go."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from graft.training.config import CheckpointConfig, ValidationConfig
from graft.training.run import checkpoints as checkpoints_module
from graft.training.run import watch
from graft.training.run.checkpoints import Checkpoints
from graft.training.run.folder import Run
from graft.training.run.saved_state import open_state, save_state

from ..support.runs import CONFIG, Cancelled, assert_same, checkpoints, counting, failing_at, go
from ..support.runs import run as train_without_a_folder
from ..support.tiny import TinySamples


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, caplog):
    with pytest.raises(Cancelled):
        go(tmp_path, 6, on_step=failing_at(4, Cancelled()))
    [tensors] = (tmp_path / "checkpoints" / "step-00000004").glob("state-*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-100])
    seen = []
    assert_same(go(tmp_path, 6, on_step=counting(seen)).load(), train_without_a_folder(steps=6))
    assert seen == [4, 5, 6] and "Falling back" in caplog.text


def test_newest_checkpoints_results_and_the_best_one_are_kept(tmp_path):
    go(tmp_path, 3)
    config = dataclasses.replace(CONFIG, validation=ValidationConfig(every=1))
    go(tmp_path, 9)
    assert checkpoints(tmp_path) == [3, 8, 9]
    handle = go(tmp_path / "v", 9, config=config, validation=TinySamples())
    lowest = min(handle.load().validations, key=lambda entry: entry[1])[0]
    assert checkpoints(tmp_path / "v") == sorted({lowest, 8, 9})


def test_a_state_knows_the_sound_ones_of_its_run_before_it(tmp_path):
    go(tmp_path / "run", 4, saving=CheckpointConfig(minutes=0, steps=0, keep=9))
    handle = open_state(Run(tmp_path / "run").checkpoint(3))
    leading = Checkpoints(Run(tmp_path / "run")).leading_to
    assert [state.step for state in leading(handle)] == [1, 2, 3]
    (Run(tmp_path / "run").checkpoint(2) / "state.json").write_text("torn")
    assert [state.step for state in leading(handle)] == [1, 3]
    elsewhere = save_state(handle.load(), tmp_path / "saved")
    assert Run.of(elsewhere) is None and Run.of(handle) == Run(tmp_path / "run")


@pytest.mark.feature(95)
def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path):
    go(tmp_path, 7, saving=CheckpointConfig(minutes=0, steps=0, keep=4))
    assert checkpoints(tmp_path) == [4, 5, 6, 7]


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    go(tmp_path, 2)
    torn = tmp_path / "checkpoints" / "step-00000007"
    torn.mkdir()
    (torn / "state-00.safetensors").write_text("half")
    for folder in (".", "loras", "samples", "checkpoints/step-00000002"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / ".writing-0a").write_text("half")
    go(tmp_path, 3)
    assert not torn.exists() and not list(tmp_path.rglob(".writing-*"))


def test_checkpoints_at_multiples_are_kept_whatever_the_clock_adds(tmp_path):
    """Every step is late here; what goes is the state, and never the LoRA of a step that was asked for."""
    saving = CheckpointConfig(minutes=0, steps=3, keep=2)
    go(tmp_path / "kitty-0123", 11, saving=saving)
    assert checkpoints(tmp_path / "kitty-0123") == [6, 9, 10, 11]
    loras = sorted(path.name for path in (tmp_path / "kitty-0123" / "loras").iterdir())
    assert loras == [f"kitty-{step:06d}.safetensors" for step in (3, 6, 9, 10, 11)]


def test_a_run_that_was_deleted_hands_nothing_on(tmp_path):
    stop = go(tmp_path, 2)
    with pytest.raises(ValueError, match="no training state after step 2 here.* queue the graph again"):
        Checkpoints(Run(tmp_path)).find_result(stop, 4, CONFIG)


def test_a_kill_between_a_checkpoint_and_its_lora_file_costs_neither(tmp_path, monkeypatch):
    """The file is written when the run goes on; and one whose checkpoint is pruned never outlives it."""
    saving = CheckpointConfig(steps=2, minutes=0, keep=1, lora=True)
    monkeypatch.setattr(watch, "save_lora", failing)
    with pytest.raises(Cancelled):
        go(tmp_path, 4, saving=saving)
    assert saved(tmp_path) and not list((tmp_path / "loras").glob("*"))
    monkeypatch.undo()
    go(tmp_path, 4, saving=saving)
    assert [path.stem[-6:] for path in sorted((tmp_path / "loras").iterdir())][:1] == ["000002"]
    with pytest.raises(RuntimeError):
        go(tmp_path, 12, saving=saving, on_step=failing_at(5, RuntimeError()))
    assert Run(tmp_path, saving).lora(5).exists()
    monkeypatch.setattr(checkpoints_module, "remove_state", failing)
    with pytest.raises(Cancelled):
        go(tmp_path, 12, saving=saving)
    monkeypatch.undo()
    kept = {int(path.parent.name[-8:]) for path in saved(tmp_path)}
    assert {int(path.stem[-6:]) for path in (tmp_path / "loras").iterdir()} <= kept | {2, 4, 6, 8, 10, 12}
    go(tmp_path, 12, saving=saving)
    assert not Run(tmp_path, saving).lora(5).exists()


def test_a_lora_that_a_kill_left_out_is_written_when_the_run_goes_on(tmp_path, monkeypatch):
    saving = CheckpointConfig(steps=2, minutes=60, keep=1, lora=True)
    monkeypatch.setattr(watch, "save_lora", failing)
    with pytest.raises(Cancelled):
        go(tmp_path, 4, saving=saving)
    assert checkpoints(tmp_path)[-1] == 2
    monkeypatch.undo()
    go(tmp_path, 4, saving=saving)
    assert [path.stem[-6:] for path in sorted((tmp_path / "loras").iterdir())] == ["000002", "000004"]


def failing(*ignored):
    raise Cancelled


def saved(folder):
    return list((folder / "checkpoints").glob("*/state.json"))


def test_a_lora_file_that_cannot_be_removed_does_not_keep_a_run_from_being_saved(tmp_path, monkeypatch):
    """Windows removes none that a Load LoRA has read."""

    def held(self, missing_ok=False):
        if self.suffix == ".safetensors" and self.parent.name == "loras":
            raise PermissionError("held")
        unlink(self, missing_ok)

    unlink = Path.unlink
    go(tmp_path / "run-0", 3)
    monkeypatch.setattr(Path, "unlink", held)
    assert go(tmp_path / "run-0", 5, saving=CheckpointConfig(minutes=60, keep=1)).step == 5
    assert checkpoints(tmp_path / "run-0") == [3, 5]


def test_the_newest_checkpoint_may_be_that_of_step_0(tmp_path):
    run = Run(tmp_path)
    save_state(dataclasses.replace(train_without_a_folder(steps=1), step=0), run.checkpoint(0))
    assert Checkpoints(run).latest().step == 0 and Checkpoints(run).latest(after=0) is None
