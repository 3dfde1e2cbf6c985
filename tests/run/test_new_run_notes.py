"""A run that begins anew says what makes it another run than the last one of its name."""

from __future__ import annotations

import dataclasses

from graft.tests.support.runs import CONFIG, go
from graft.training.config import MemoryConfig, OptimizerConfig
from graft.training.loop import STOP
from graft.training.run.folder import Run
from graft.training.run.new_run_notes import new_run_notes

OTHER = dataclasses.replace(CONFIG, batch_size=1, optimizer=OptimizerConfig(lr=0.5))


def test_a_run_that_begins_anew_names_what_changed(tmp_path):
    go(tmp_path / "kitty-01", 2)
    go(tmp_path / "dog-02", 2)
    [note] = new_run_notes(Run(tmp_path / "kitty-03"), OTHER, None, 4)
    assert "not more steps of kitty-01 (step 2): batch_size is 1, was 2; optimizer.lr is 0.5, was" in note
    assert "load that name with Load Training State" in note


def test_a_run_that_goes_on_has_nothing_to_say(tmp_path):
    state = go(tmp_path / "kitty-01", 2)
    assert not new_run_notes(Run(tmp_path / "kitty-01"), CONFIG, None, 4)
    assert not new_run_notes(Run(tmp_path / "kitty-02"), OTHER, state, 4)
    assert not new_run_notes(Run(tmp_path / "bird-01"), CONFIG, None, 4)


def test_a_run_that_finish_ended_says_so_until_another_number_is_asked_for(tmp_path):
    run = Run(tmp_path / "kitty-01")
    go(run.folder, 6, on_step=lambda progress, handles: STOP if progress.step == 2 else None)
    assert "ended by Finish at step 2 of 6" in new_run_notes(run, CONFIG, None, 6)[0]
    assert [new_run_notes(run, CONFIG, None, last) for last in (2, 3, 5, 7)] == [[]] * 4


def test_where_the_settings_are_the_same_it_must_be_the_pictures(tmp_path):
    go(tmp_path / "kitty-01", 1)
    frugal = dataclasses.replace(CONFIG, memory=dataclasses.replace(CONFIG.memory, checkpointing="block"))
    [note] = new_run_notes(Run(tmp_path / "kitty-02"), frugal, None, 4)
    assert "the images, their captions, the base model or the start are different" in note
    for damaged in ("{}", "[]", "5", "[" * 100_000, '{"se'):
        (tmp_path / "kitty-01" / "config.json").write_text(damaged)
        assert new_run_notes(Run(tmp_path / "kitty-02"), OTHER, None, 4)
    assert MemoryConfig().deciding() == frugal.memory.deciding()
