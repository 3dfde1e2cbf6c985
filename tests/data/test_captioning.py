"""Captions are made for images that have none, and nothing that a person wrote is replaced."""

import pytest

from graft.tests.support.datasets import SMALL, FakeEncoder, add, picture
from graft.training.data import CaptionConfig, DatasetConfig, encode, from_images, scan
from graft.training.data.captioning import (
    CaptioningConfig,
    caption_images,
    described,
    files_of,
    given_captions,
    pixels_of,
)
from graft.training.data.config import BucketConfig
from graft.training.data.samples import ImageSet, Sample, SampleTable
from graft.training.user_error import UserError

CONFIG = DatasetConfig(bucket=BucketConfig(resolutions=(64,)), caption=CaptionConfig(missing="empty"))
NAMES = ("a", "b", "c")


class Cancelled(Exception):
    pass


class Writer:
    """A text encoder that names the color in the middle of an image, and counts its calls."""

    def __init__(self, words="shade"):
        self.words, self.calls = words, 0

    def __call__(self, image):
        self.calls += 1
        red, green, blue = (image[0, image.shape[1] // 2, image.shape[2] // 2] * 255).int().tolist()
        return f"{self.words} {red} {green} {blue}"


@pytest.fixture
def folder(tmp_path):
    """Three images; only b has a caption."""
    for seed, name in enumerate(NAMES):
        add(tmp_path / "set", f"{name}.png", "by hand" if name == "b" else None, picture(seed=seed))
    return tmp_path / "set"


def caption(folder, writer=None, config=CONFIG, **options):
    """What a graph of Load Dataset and Caption Dataset gives: {name: caption}, the set, the report."""
    writer = writer or Writer()
    settings = {key: options.pop(key) for key in ("template", "write") if key in options}
    cache = folder.parent / "cache"
    make = options.pop("make", None) or described(writer, writer.words, cache)
    images, report = caption_images(
        scan(folder, config), make, CaptioningConfig(**settings), cache, **options
    )
    return {sample.name: sample.captions[0] for sample in images.samples}, images, report


def on_disk(folder):
    return {path.stem: path.read_text().strip() for path in folder.glob("*.txt")}


def test_new_captions_are_written_beside_their_images_and_others_stay(folder):
    captions, _, report = caption(folder)
    assert captions["b.png"] == "by hand" and captions["a.png"].startswith("shade ")
    assert captions["a.png"] != captions["c.png"]
    assert on_disk(folder) == {name: captions[f"{name}.png"] for name in NAMES}
    assert report.splitlines()[0] == "3 images: 2 captioned, 1 with a caption of their own"
    assert f"a.png: {captions['a.png']}" in report


def test_a_second_run_asks_nothing_and_trains_the_same_run(folder):
    first = caption(folder)[1]
    writer = Writer()
    captions, second, report = caption(folder, writer)
    assert writer.calls == 0 and "2 captioned before" in report
    assert [encode(each, FakeEncoder(), folder.parent / "cache").fingerprint for each in (first, second)] == [
        encode(scan(folder, CONFIG), FakeEncoder(), folder.parent / "cache").fingerprint
    ] * 2


def test_an_edited_caption_stays_and_one_that_was_made_follows_the_settings(folder):
    caption(folder)
    (folder / "a.txt").write_text("edited\n")
    trigger = DatasetConfig(bucket=CONFIG.bucket, caption=CaptionConfig(missing="empty", trigger="ohwx"))
    template = "photo of [trigger], {caption}"
    captions = caption(folder, Writer("color"), trigger, template=template)[0]
    assert captions["a.png"] == "edited" and captions["b.png"] == "by hand"
    assert captions["c.png"].startswith("photo of [trigger], color ")
    assert on_disk(folder)["c"] == captions["c.png"] and on_disk(folder)["a"] == "edited"


def test_a_made_caption_under_another_image_is_a_persons(folder):
    captions, _, _ = caption(folder)
    (folder / "b.txt").write_text(captions["a.png"])
    assert caption(folder, Writer("color"))[0]["b.png"] == captions["a.png"]


def test_cancel_keeps_those_that_are_done(folder):
    def cancel(done, total, message):
        if done == 2:
            raise Cancelled

    writer = Writer()
    with pytest.raises(Cancelled):
        caption(folder, writer, on_progress=cancel)
    assert writer.calls == 1 and set(on_disk(folder)) == {"a", "b"}
    caption(folder, writer)
    assert writer.calls == 2 and set(on_disk(folder)) == set(NAMES)


def test_a_caption_that_is_edited_meanwhile_wins(folder):
    class Slow(Writer):
        def __call__(self, image):
            (folder / "a.txt").write_text("typed meanwhile")
            return super().__call__(image)

    captions, _, report = caption(folder, Slow())
    assert captions["a.png"] == on_disk(folder)["a"] == "typed meanwhile"
    assert "1 captioned, " in report and "2 with a caption of their own" in report


@pytest.mark.parametrize("how", ["off", "read only", "another source"])
def test_captions_that_cannot_be_written_are_in_the_graph_and_the_report_says_why(folder, how):
    def refuse(root):
        raise UserError("These images stay as they are.")

    options = {"off": {"write": False}, "read only": {"require_writable": refuse}}.get(how, {})
    source = CaptionConfig(missing="empty", source="json" if how == "another source" else "auto")
    captions, _, report = caption(
        folder, config=DatasetConfig(bucket=CONFIG.bucket, caption=source), **options
    )
    assert all(captions.values()) and set(on_disk(folder)) == {"b"}
    assert ("not written" in report) == (how != "off")


def test_texts_of_another_node_go_to_their_images_and_empty_ones_are_counted(folder):
    captions, _, report = caption(folder, make=given_captions([" a cat\n", "a dog", ""]))
    assert captions == {"a.png": "a cat", "b.png": "by hand", "c.png": ""}
    assert set(on_disk(folder)) == {"a", "b"} and "1 without a caption, as none was written" in report


def test_images_of_the_graph_are_captioned_in_the_graph(tmp_path):
    pixels = [pixels_of(*_source(tmp_path, seed)) for seed in (1, 2)]
    images = from_images(pixels, ["", "mine"], config=CONFIG)
    captioned, _ = caption_images(images, described(Writer(), "w", tmp_path), CaptioningConfig(), tmp_path)
    assert captioned.samples[0].captions[0].startswith("shade ") and captioned.samples[1].captions == (
        "mine",
    )


def _source(folder, seed):
    add(folder / str(seed), "x.png", "x", picture(300, 200, seed=seed))
    images = scan(folder / str(seed), SMALL)
    return images.sources[0], images.samples[0]


def test_an_image_is_shown_whole_and_not_larger_than_it_need_be(tmp_path):
    source, sample = _source(tmp_path, 3)
    assert pixels_of(source, sample).shape == (1, 200, 300, 3)
    assert pixels_of(source, sample, 100 * 150).shape == (1, 100, 150, 3)


@pytest.mark.parametrize(
    "template", ["a photo", "{trigger}, {caption}", "{caption}" + "x" * 2000, "{} {caption}"]
)
def test_a_template_without_its_place_or_with_others_is_refused(template):
    with pytest.raises(UserError, match="template: "):
        CaptioningConfig(template=template)


def test_a_trigger_that_is_missing_is_told_before_anything_is_written(folder):
    writer = Writer()
    with pytest.raises(UserError, match="template: .*fill in 'trigger'"):
        caption(folder, writer, template="[trigger], {caption}")
    assert writer.calls == 0


def test_a_clip_in_several_pieces_has_one_caption(folder):
    pieces = [Sample("a.mp4", 8, 8, ("",), frames=5, start=start) for start in (0, 5)]
    images = ImageSet(SampleTable([*pieces, Sample("b.mp4", 8, 8, ("",), frames=5)]), ())
    assert files_of(images) == [[0, 1], [2]]
