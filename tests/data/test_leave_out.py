"""Images that 'leave out' names are not trained, nothing about them stops a run, and the report says so."""

from __future__ import annotations

import pytest
from PIL import Image

from graft.training.data import DatasetConfig, scan, summary
from graft.training.user_error import UserError


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b[1].png", "10_cat/c.png", "a-mask.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (64, 64)).save(tmp_path / name)
    for name in ("a.txt", "b[1].txt", "10_cat/c.txt"):
        (tmp_path / name).write_text("a cat")
    return tmp_path


def names(folder, *leave_out):
    return [sample.name for sample in scan(folder, DatasetConfig(leave_out=leave_out)).samples]


def test_names_and_patterns_leave_out_images_and_their_masks(folder):
    assert names(folder) == ["a.png", "b[1].png", "10_cat/c.png"]
    assert names(folder, "b[1].png", "10_cat/*") == ["a.png"]
    assert names(folder, "a.png") == ["b[1].png", "10_cat/c.png"]


def test_an_unusable_image_that_is_left_out_stops_nothing(folder):
    (folder / "bad.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"bad\.png"):
        names(folder)
    assert len(names(folder, "bad.png")) == 3


def test_of_two_images_that_share_a_caption_one_may_be_left_out(folder):
    Image.new("RGB", (64, 64)).save(folder / "a.jpg")
    with pytest.raises(UserError, match="shares its caption or mask"):
        names(folder)
    assert "a.png" in names(folder, "a.jpg")


def test_the_report_names_what_is_left_out(folder):
    assert "Left out by 'leave out': 1 (a.png)" in summary(scan(folder, DatasetConfig(leave_out=("a.png",))))


def test_leaving_out_everything_is_an_error(folder):
    with pytest.raises(UserError, match="leaves out all 3 images"):
        names(folder, "*")
