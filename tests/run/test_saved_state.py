"""A folder holds the state before or the state after a save, never anything else."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from graft import __main__ as launch
from graft.tests.support.runs import CONFIG, assert_same, run
from graft.training.config import EmaConfig
from graft.training.files import leftovers, whole_file
from graft.training.files.tensor_file import write_tensors
from graft.training.files.whole_file import remove_leftovers
from graft.training.run import saved_state as checkpoint
from graft.training.run.saved_state import load_state, open_state, save_state, size_in_bytes, write_text


@pytest.fixture(scope="module")
def state():
    return run(steps=2, config=dataclasses.replace(CONFIG, ema=EmaConfig(decay=0.9)))


@pytest.fixture(scope="module")
def later(state):
    return run(state, steps=1, config=dataclasses.replace(CONFIG, ema=EmaConfig(decay=0.9)))


def test_a_state_comes_back_from_disk_bit_for_bit(state, tmp_path):
    handle = save_state(state, tmp_path)
    assert_same(load_state(tmp_path), state)
    assert open_state(tmp_path) == handle and handle.step == 2


def test_equal_states_have_equal_digests(state, later, tmp_path):
    digests = [
        save_state(s, tmp_path / name).digest for s, name in ((state, "a"), (load(state, tmp_path), "b"))
    ]
    assert digests[0] == digests[1] != save_state(later, tmp_path / "c").digest


def load(state, folder):
    return save_state(state, folder / "copy").load()


def test_saving_twice_leaves_the_files_of_one_state(state, later, tmp_path):
    save_state(state, tmp_path)
    save_state(later, tmp_path)
    save_state(later, tmp_path)
    assert_same(load_state(tmp_path), later)
    assert len(list(tmp_path.iterdir())) == 2


def test_saving_again_repairs_a_state_whose_tensors_were_damaged(state, tmp_path):
    handle = save_state(state, tmp_path)
    [tensors] = tmp_path.glob("state-*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is damaged"):
        open_state(tmp_path)
    assert save_state(state, tmp_path) == open_state(tmp_path) == handle
    assert_same(load_state(tmp_path), state)


def test_the_size_of_a_state_on_the_disk_is_known_before_it_is_written(state, tmp_path):
    save_state(state, tmp_path)
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size_in_bytes(state) == pytest.approx(written, rel=0.1)
    long = dataclasses.replace(state, losses=[n / 7 for n in range(20_000)])
    save_state(long, tmp_path / "long")
    written = sum(file.stat().st_size for file in (tmp_path / "long").iterdir())
    assert written < size_in_bytes(long) < 2 * written


@pytest.mark.parametrize("moment", range(6))
def test_a_save_that_breaks_at_any_moment_leaves_the_state_before_or_after(
    moment, state, later, tmp_path, monkeypatch
):
    save_state(state, tmp_path)
    calls = []

    def breaking(function):
        def call(*args):
            calls.append(function)
            if len(calls) == moment + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*args)

        return call

    monkeypatch.setattr(checkpoint, "save_file", breaking(checkpoint.save_file))
    monkeypatch.setattr(os, "replace", breaking(os.replace))
    monkeypatch.setattr(os, "fsync", breaking(os.fsync))
    broke = False
    try:
        save_state(later, tmp_path)
    except OSError:
        broke = True
    monkeypatch.undo()
    assert_same(load_state(tmp_path), state if broke else later)
    open_state(tmp_path)
    assert not list(tmp_path.glob(".writing-*"))


DEEP = "[" * 100_000
NO_STATES = [
    DEEP,
    "{}",
    "[]",
    "5",
    "null",
    '{"format": 1}',
    '{"format": 1, "step": "x", "tensors": "\\u0000"}',
    "\ud800",
]
NO_STATES += ['{"format": 1, "tensors": "\\ud800"}']
NO_STATES += [f'{{"format": 1, "x": {"[" * depth}{"]" * depth}}}' for depth in (300, 600, 900, 950, 980)]


@pytest.mark.parametrize("text", NO_STATES, ids=lambda text: text[:20])
def test_whatever_lies_in_place_of_a_state_is_refused_by_name(text, state, tmp_path):
    save_state(state, tmp_path)
    (tmp_path / "state.json").write_text(text, "utf-8", "surrogatepass")
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}.*training state") as error:
        open_state(tmp_path)
    assert "codec can't encode" not in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("file", ["state.json", "state-*.safetensors"])
def test_a_pipe_in_place_of_a_states_file_is_refused_by_name_and_not_waited_for(file, state, tmp_path):
    save_state(state, tmp_path)
    [path] = tmp_path.glob(file)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}.*training state.*a pipe"):
        open_state(tmp_path)


def test_a_state_with_a_flipped_bit_anywhere_is_refused_or_the_same(state, tmp_path):
    handle = save_state(state, tmp_path)
    values = tmp_path / "state.json"
    text = values.read_bytes()
    for at in range(0, len(text), 7):
        values.write_bytes(text[:at] + bytes([text[at] ^ 1 << at % 8]) + text[at + 1 :])
        with contextlib.suppress(ValueError):
            assert open_state(tmp_path) == handle


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "edit", "empty"])
def test_a_damaged_state_is_refused_by_name(damage, state, tmp_path):
    save_state(state, tmp_path)
    [tensors] = tmp_path.glob("*.safetensors")
    values = tmp_path / "state.json"
    if damage == "remove":
        tensors.unlink()
    elif damage == "edit":
        values.write_text(values.read_text().replace('"step": 2', '"step": 3'))
    elif damage == "empty":
        values.write_text("")
    else:
        data = bytearray(tensors.read_bytes())
        data[-1] ^= 1
        tensors.write_bytes(data if damage == "flip" else data[:-8])
    with pytest.raises(ValueError, match="training state"):
        open_state(tmp_path)


def test_a_state_of_another_format_is_refused(state, tmp_path):
    save_state(state, tmp_path)
    values = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**values, "format": 99}))
    with pytest.raises(ValueError, match="not a Graft training state of format"):
        load_state(tmp_path)


def test_a_state_never_names_a_file_outside_its_folder(state, tmp_path):
    save_state(state, tmp_path / "state")
    secret = tmp_path / "other.safetensors"
    secret.write_bytes(next((tmp_path / "state").glob("*.safetensors")).read_bytes())
    values = json.loads((tmp_path / "state" / "state.json").read_text())
    (tmp_path / "state" / "state.json").write_text(json.dumps({**values, "tensors": "../other.safetensors"}))
    with pytest.raises(ValueError, match="cannot be read"):
        load_state(tmp_path / "state")


def test_a_loaded_state_outlives_its_files(state, tmp_path):
    loaded = save_state(state, tmp_path / "gone").load()
    before = {name: tensor.clone() for name, tensor in loaded.weights.items()}
    checkpoint.remove_state(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
    assert all(torch.equal(before[name], loaded.weights[name]) for name in before)
    assert_same(run(loaded, steps=1), run(state, steps=1))


def busy(times, replace, calls):
    def call(source, target):
        calls.append(target)
        if len(calls) <= times:
            raise PermissionError(errno.EACCES, "Access is denied")
        replace(source, target)

    return call


@pytest.fixture
def windows(tmp_path, monkeypatch):
    """A file that is there already, as on Windows: one that a program has open cannot be replaced."""
    monkeypatch.setattr(whole_file, "WINDOWS", True)
    monkeypatch.setattr(whole_file.time, "sleep", lambda seconds: None)
    (tmp_path / "file").write_text("old")
    return tmp_path / "file"


def test_a_file_that_a_scanner_holds_for_a_moment_is_replaced(windows, monkeypatch):
    monkeypatch.setattr(os, "replace", busy(3, os.replace, calls := []))
    write_text(windows, "new")
    assert windows.read_text() == "new" and len(calls) == 4
    monkeypatch.setattr(whole_file, "WINDOWS", False)
    monkeypatch.setattr(os, "replace", busy(1, os.replace, []))
    with pytest.raises(PermissionError):
        write_text(windows, "newer")


def test_a_file_that_stays_mapped_is_moved_aside_and_removed_later(windows, monkeypatch):
    monkeypatch.setattr(whole_file, "HELD_SECONDS", 0.0)
    monkeypatch.setattr(os, "replace", busy(1, os.replace, []))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", mapped)
        write_text(windows, "new")
    [aside] = set(windows.parent.iterdir()) - {windows}
    assert (windows.read_text(), aside.read_text()) == ("new", "old")
    remove_leftovers(windows.parent)
    assert not aside.exists()


def test_what_a_killed_process_was_writing_goes_at_once_and_what_a_living_one_writes_stays(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, launch.__file__, str(tmp_path)]) as process:
        process.wait(600)
    (killed,) = tmp_path.iterdir()
    unknown = tmp_path / ".writing-0a"
    unknown.write_text("by another computer, or by a Graft of before")
    with whole_file.temporary_in(tmp_path) as living:
        living.write_text("half")
        write_tensors(tmp_path / "lora.safetensors", {"a": torch.ones(1)}, {})
        assert living.exists() and unknown.exists() and not killed.exists()


KILLED = """
import os, runpy, signal, sys
from pathlib import Path

runpy.run_path(sys.argv[1])["import_graft"]()
from graft.training.files.whole_file import temporary_in

with temporary_in(Path(sys.argv[2])) as temporary:
    temporary.write_text("half")
    os._exit(9)
"""


def test_folders_of_killed_processes_are_removed_and_those_of_living_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(600)
    with leftovers.scratch_folder("graft-gpus-") as living:
        killed = tmp_path / living.name.replace(f"-{os.getpid()}-", f"-{process.pid}-")
        killed.mkdir()
        (killed / "graph.json").write_text("{}")
        elsewhere = tmp_path / living.name.replace(leftovers.HOST, "0" * 6)
        elsewhere.mkdir()
        with leftovers.scratch_folder("graft-gpus-") as second:
            assert set(tmp_path.iterdir()) == {living, second, elsewhere}
    assert list(tmp_path.iterdir()) == [elsewhere]


def mapped(self, missing_ok=False):
    if self.exists():
        raise PermissionError("mapped")


def test_what_cannot_be_replaced_at_all_stays(windows, monkeypatch):
    monkeypatch.setattr(whole_file, "HELD_SECONDS", 0.0)
    monkeypatch.setattr(os, "replace", busy(9, os.replace, []))
    with pytest.raises(PermissionError):
        write_text(windows, "new")
    assert [(path.name, path.read_text()) for path in windows.parent.iterdir()] == [("file", "old")]
    (windows.parent / "folder").mkdir()
    with pytest.raises(PermissionError):
        write_text(windows.parent / "folder", "new")
    assert {path.name for path in windows.parent.iterdir()} == {"file", "folder"}


def test_values_nested_without_end_are_named_like_other_damage(tmp_path):
    (tmp_path / "state.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=f"{tmp_path.name}: no training state here .its lists lie too deep"):
        open_state(tmp_path)
