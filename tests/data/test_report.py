"""What a person is shown of a dataset: text and a preview picture."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from graft.tests.support.datasets import SMALL, FakeEncoder, add, picture
from graft.training.data import BucketConfig, CaptionConfig, encode, join, preview, report, scan, summary


@pytest.fixture
def images(tmp_path):
    """Three images of different shapes, one bad file and one that is no image."""
    add(tmp_path / "set", "square.png", "a square", picture(64, 64))
    add(tmp_path / "set", "wide.png", "a wide one", picture(400, 40))
    add(tmp_path / "set", "4_small/small.png", "a small one", picture(32, 32))
    (tmp_path / "set/empty.png").touch()
    (tmp_path / "set/film.mp4").touch()
    return scan(tmp_path / "set", replace(SMALL, skip_bad=True))


def test_the_summary_counts_what_the_scan_found(images):
    lines = summary(images).splitlines()
    assert lines[0] == "Folder set: 3 images, each 1 to 4 times, loss weight 1"
    assert lines[1:] == ["Not images: 1 .mp4", "Left out: 1", "  empty.png: the file is empty (0 bytes)"]


def test_the_summary_says_what_has_no_caption_and_which_folders_are_not_read(tmp_path):
    add(tmp_path / "set", "a.png", None), add(tmp_path / "set", "b.png"), add(tmp_path / "set", "more/c.png")
    empty = scan(tmp_path / "set", replace(SMALL, caption=CaptionConfig(missing="empty")))
    called = scan(tmp_path / "set", replace(SMALL, caption=CaptionConfig(missing="empty", trigger="sks")))
    assert "Without a caption: 1, trained with an empty one" in summary(empty).splitlines()
    lines = summary(join([called, called])).splitlines()
    assert lines.count('Without a caption: 1, trained with "sks" alone') == 2
    assert lines[-1] == "Subfolders that are not read ('recursive' is off): 2"


@pytest.mark.parametrize(
    ("setting", "beside", "told"),
    [
        ({"bucket": {"min_side": 48}}, {"square": True}, "min_side 48 has no effect with square True."),
        ({"bucket": {"max_side": 80}}, {"square": True}, "max_side 80 has no effect with square True."),
        ({"bucket": {"max_side": 80}}, {}, ""),
        (
            {"bucket": {"min_side": 48}},
            {"upscale": False},
            "min_side 48 has no effect on images smaller than their bucket with upscale False.",
        ),
        (
            {"caption": {"keep_tokens": 1}},
            {},
            "keep_tags 1 has no effect with shuffle_tags False and tag_dropout 0.",
        ),
        ({"caption": {"keep_tokens": 1}}, {"shuffle": True}, ""),
        ({"mask": {"outside": 0.5}}, {"source": "off"}, "outside_mask 0.5 has no effect with masks off."),
        ({"mask": {"outside": 0.5}}, {}, ""),
    ],
)
def test_the_summary_says_which_settings_have_no_effect_and_they_have_none(setting, beside, told, tmp_path):
    add(tmp_path / "set", "wide.png", "a, b, c, d", picture(40 if "upscale" in beside else 200, 16))
    add(tmp_path / "set", "wide-mask.png", None, picture(40 if "upscale" in beside else 200, 16))
    ((part, values),) = setting.items()

    def found(**changes):
        config = replace(SMALL, **{part: replace(getattr(SMALL, part), **beside, **changes)})
        images = scan(tmp_path / "set", config)
        batch = encode(images, coder := FakeEncoder(), tmp_path / str(len(changes))).batch(1, seed=0, index=0)
        masked = None if batch.masks is None else batch.masks.tolist()
        return summary(images).splitlines(), (batch.latents.tolist(), masked, coder.texts)

    (lines, shown), (_, plain) = found(**values), found()
    assert lines[1:] == [told] * bool(told) and (shown == plain) == bool(told)


def test_the_report_says_what_is_trained(images, tmp_path):
    text = report(encode(images, FakeEncoder(), tmp_path / "cache"), batch_size=2)
    for line in (
        "3 images with 3 captions; an epoch has 6 showings in 4 steps of 2",
        "Folder set: 3 images, each 1 to 4 times, 100% of an epoch, loss weight 1",
        "Bucket 64 x 64: 2 images, 5 showings in 3 steps",
        "Bucket 128 x 32: 1 images, 1 showings in 1 steps",
        "Cropping cuts off 20.0% on average, at most 60.0% (wide.png)",
        "Enlarged: 1 images, at most 2.00 times (4_small/small.png)",
        "  empty.png: the file is empty (0 bytes)",
    ):
        assert line in text.splitlines()


def test_the_report_covers_several_folders_and_a_validation_set(images, tmp_path):
    add(tmp_path / "more", "x.png")
    joined = join([images, scan(tmp_path / "more", SMALL)], shares=(1, 1))
    both = encode(joined, FakeEncoder(), tmp_path / "cache")
    assert "Folder more: 1 images, each 6 times, 50% of an epoch, loss weight 1" in report(both)
    assert report(both.validation()).startswith(
        "4 images with 4 captions; an epoch has 4 showings in 4 steps of 1"
    )


def test_the_preview_darkens_what_is_cut_off_and_shows_the_rest(tmp_path):
    add(tmp_path, "wide.png", image=Image.new("RGB", (400, 100), (255, 255, 255)))
    config = replace(SMALL, bucket=BucketConfig(resolutions=(64,), square=True))
    grid = preview(scan(tmp_path, config), step=16, cell=200)
    row = grid[0, 8 + 100, 8:208]
    assert grid.shape[0] == 1 and grid.shape[3] == 3 and grid.dtype == torch.float32
    assert row[100].eq(1).all() and row[20].max() < 0.4 and row[180].max() < 0.4


def test_the_preview_is_a_grid_of_evenly_chosen_images(tmp_path):
    for number in range(9):
        add(tmp_path, f"{number}.png")
    images = scan(tmp_path, SMALL)
    assert preview(images, step=16, count=4, columns=2, cell=64).shape[1:3] == (2 * 178, 2 * 80)
    assert preview(images, step=16, count=100, columns=3, cell=64).shape[1:3] == (3 * 178, 3 * 80)


@pytest.mark.parametrize("caption", ["\u732b \U0001f408", "word " * 200, "[trigger]"])
def test_the_preview_takes_any_caption(tmp_path, caption):
    add(tmp_path, "a.png", caption)
    images = scan(tmp_path, replace(SMALL, caption=CaptionConfig(trigger="sks")))
    assert preview(images, step=16, cell=64).isfinite().all()


def test_the_preview_shows_a_file_that_became_bad_as_text(tmp_path):
    path = add(tmp_path, "a.png")
    images = scan(tmp_path, SMALL)
    path.unlink()
    assert preview(images, step=16, cell=64).shape[3] == 3


def test_drawing_a_preview_can_be_cancelled(tmp_path):
    for name in "abcd":
        add(tmp_path, f"{name}.png")
    seen = []

    def cancel(done, total, message):
        seen.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preview(scan(tmp_path, SMALL), step=16, on_progress=cancel)
    assert list(dict.fromkeys(seen)) == [(0, 4), (1, 4), (2, 4)]
