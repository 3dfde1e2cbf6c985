"""The datasets of sliders: two ends that fit, and texts that are cached."""

from dataclasses import replace

import pytest
import torch

from graft.tests.support.datasets import SMALL, FakeEncoder, add, picture
from graft.training.data import AugmentConfig, BucketConfig, SplitConfig, encode, join, report, scan
from graft.training.data.slider import pair_images, slide_words
from graft.training.data.slider_words import SliderWords

WORDS = SliderWords(positive="aaa (old)", negative="bb", neutral="c", guidance=2.0, anchor="dd")


def ends(tmp_path, names="abc", config=SMALL, other=None, sizes=None):
    """Two folders, high and low, with pictures of these names; `other` are the low end's settings."""
    for seed, name in enumerate(names):
        size = (sizes or {}).get(name, (64, 64))
        add(tmp_path / "high", f"{name}.png", f"{name} high", picture(64, 64, seed=seed))
        add(tmp_path / "low", f"{name}.jpg", f"{name} low", picture(*size, seed=50 + seed))
    return scan(tmp_path / "high", config), scan(tmp_path / "low", other or config)


def paired(tmp_path, **options):
    return encode(pair_images(*ends(tmp_path, **options)), FakeEncoder(), tmp_path / "cache")


def assert_equal(one, other):
    assert one.names == other.names and one.captions == other.captions
    assert torch.equal(one.latents, other.latents)
    for a, b in zip(one.conditioning, other.conditioning, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_each_picture_comes_with_the_other_end_of_its_name(tmp_path):
    found = paired(tmp_path, config=replace(SMALL, augment=AugmentConfig(flip=True)))
    low = encode(scan(tmp_path / "low", found.images.sources[1].config), FakeEncoder(), tmp_path / "cache")
    views = {name: set() for name in "abc"}
    for index in range(20):
        batch = found.batch(2, seed=1, index=index)
        other = batch.opposite
        assert [name[0] for name in batch.names] == [name[0] for name in other.names]
        assert set(batch.names) <= {"a.png", "b.png", "c.png"} and other.names[0].endswith(".jpg")
        assert list(other.captions) == [f"{name[0]} low" for name in other.names]
        for name, one, two in zip(other.names, batch.latents, other.latents, strict=True):
            views[name[0]].add((one.sum((0, 1)).argmax().item(), two.sum((0, 1)).argmax().item()))
    assert len(found) == 3 and found.batch(3, seed=0, index=0).opposite is not None
    assert all(1 < len(seen) <= 2 for seen in views.values()), "both ends are mirrored together"
    assert len(low) == 3


def test_another_end_is_another_dataset(tmp_path):
    before = paired(tmp_path).fingerprint
    assert paired(tmp_path).fingerprint == before
    assert encode(scan(tmp_path / "high", SMALL), FakeEncoder(), tmp_path / "cache").fingerprint != before
    picture(64, 64, seed=99).save(tmp_path / "low" / "b.jpg")
    ends_now = scan(tmp_path / "high", SMALL), scan(tmp_path / "low", SMALL)
    assert encode(pair_images(*ends_now), FakeEncoder(), tmp_path / "cache").fingerprint != before


def test_a_pair_with_a_bad_file_is_left_out(tmp_path):
    skip = replace(SMALL, skip_bad=True)
    images = ends(tmp_path, config=skip)
    (tmp_path / "low" / "b.jpg").write_bytes((tmp_path / "low" / "b.jpg").read_bytes()[:300])
    found = encode(pair_images(*images), FakeEncoder(), tmp_path / "cache")
    assert found.names == ["a.png", "c.png"] and [bad.name for bad in found.skipped] == ["b.jpg"]


def test_pairs_are_split_and_planned_together(tmp_path):
    found = paired(tmp_path)
    rest, held_out = found.split(SplitConfig(names=("b.*",)))
    assert held_out.sample(0).names == ("b.png",) and set(rest.names) == {"a.png", "c.png"}
    assert rest.batch(1, seed=0, index=0).opposite is not None
    largest = found.largest_batch(2)
    assert largest.opposite.latents.shape == largest.latents.shape == (2, 3, 8, 8)
    assert "Folder high: 3 images" in report(found)
    assert "Folder low: the other ends, at strength -1" in report(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"other": replace(SMALL, augment=AugmentConfig(flip=True))}, "the two ends differ in resolution, f"),
        ({"config": replace(SMALL, augment=AugmentConfig(crop="random"))}, "random crops and colors would"),
        ({"config": replace(SMALL, augment=AugmentConfig(hue=0.1))}, "random crops and colors would"),
        ({"sizes": {"b": (64, 128)}}, r"1 image\(s\) have another shape at the other end; .*: b\."),
    ],
)
def test_ends_that_do_not_fit_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        pair_images(*ends(tmp_path, **options))


def test_ends_of_other_sizes_are_refused_where_they_are_not_enlarged(tmp_path):
    config = replace(SMALL, bucket=BucketConfig(resolutions=(64,), upscale=False))
    with pytest.raises(ValueError, match=r"have another size at the other end; .*: b\.png"):
        paired(tmp_path, config=config, sizes={"b": (32, 32)}).batch(1, seed=0, index=0)


def test_an_image_without_its_other_end_is_named(tmp_path):
    high, _ = ends(tmp_path)
    (tmp_path / "low" / "b.jpg").unlink()
    low = scan(tmp_path / "low", SMALL)
    with pytest.raises(ValueError, match=r"1 image\(s\) have no negative image of the same name: b\."):
        pair_images(high, low)
    with pytest.raises(ValueError, match=r"1 image\(s\) have no positive image of the same name: b\."):
        pair_images(low, high)


def test_the_texts_of_a_slider_are_cached_and_come_with_every_batch(tmp_path):
    add(tmp_path / "set", "x.png", "e", picture())
    images, encoder = slide_words(scan(tmp_path / "set", SMALL), WORDS), FakeEncoder()
    found = encode(images, encoder, tmp_path / "cache")
    assert {r"aaa \(old\)", "bb", "c", "dd"} <= set(encoder.texts)
    slider = found.batch(1, seed=0, index=0).slider
    assert [each.texts for each in (slider.positive, slider.negative, slider.neutral)] == [
        [r"aaa \(old\)"],
        ["bb"],
        ["c"],
    ]
    again = FakeEncoder().encode_text(r"aaa \(old\)")["cross_attn"]
    assert torch.equal(slider.positive.conditioning[0]["cross_attn"], again) and slider.guidance == 2.0
    assert found.preserved_captions(1, seed=0, index=0).texts == ["dd"]
    assert found.largest_batch(3).slider.neutral.texts == ["c"] * 3
    encode(images, again := FakeEncoder(), tmp_path / "cache")
    assert again.calls == (0, 0)


def test_another_word_or_guidance_is_another_dataset(tmp_path):
    add(tmp_path / "set", "x.png", "e", picture())
    images = scan(tmp_path / "set", SMALL)
    every = [None, WORDS, *(replace(WORDS, **{name: "zz"}) for name in ("positive", "neutral", "anchor"))]
    every.append(replace(WORDS, guidance=3.0))
    found = {
        encode(slide_words(images, w) if w else images, FakeEncoder(), tmp_path / "cache").fingerprint
        for w in every
    }
    assert len(found) == len(every)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"positive": "a ", "negative": " a"}, "the positive and the negative text are both 'a'"),
        ({"positive": "a", "guidance": 0.0}, "guidance must be above 0, got 0.0"),
        ({"positive": "a" * 2001}, "the positive text has 2001 letters; the limit is 2000"),
    ],
)
def test_impossible_words_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        SliderWords(**words)


def test_a_slider_is_made_once_and_last(tmp_path):
    high, low = ends(tmp_path)
    for slider in (slide_words(high, WORDS), pair_images(high, low)):
        with pytest.raises(ValueError, match="this dataset is that of a slider already"):
            slide_words(slider, WORDS)
        with pytest.raises(ValueError, match="the dataset of a slider cannot be joined"):
            join([slider, low])
