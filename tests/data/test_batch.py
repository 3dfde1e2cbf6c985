"""Batches: which samples, how often, in which order, and what comes with them."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from graft.tests.support.datasets import SMALL, FakeEncoder, add, picture
from graft.training.data import (
    AugmentConfig,
    BucketConfig,
    CaptionConfig,
    DatasetConfig,
    MaskConfig,
    SplitConfig,
    encode,
    join,
    scan,
)
from graft.training.data.order import Order


def order(counts, repeats=1, **options):
    """Return an order over buckets with these numbers of entries."""
    buckets = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return Order(buckets, np.full(len(buckets), repeats, np.int32), **options)


def epoch(order, size, seed=0, number=0):
    steps = order.steps(size)
    return [order.choose(size, seed=seed, index=number * steps + i).tolist() for i in range(steps)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("number", [0, 1, 7])
def test_an_epoch_shows_every_entry_its_repeats_number_of_times(size, number):
    found = order([1, 7, 30], repeats=3)
    shown = Counter(entry for batch in epoch(found, size, number=number) for entry in batch)
    assert shown == dict.fromkeys(range(38), 3)


@pytest.mark.feature(55)
def test_a_batch_never_mixes_buckets_and_only_a_buckets_last_is_smaller():
    found = order([1, 7, 30])
    batches = epoch(found, 4)
    bucket_of = np.repeat([0, 1, 2], [1, 7, 30])
    assert all(len(set(bucket_of[batch])) == 1 for batch in batches)
    assert Counter(map(len, batches)) == {4: 8, 3: 1, 2: 1, 1: 1} and found.steps(4) == 11


def test_the_order_is_a_pure_function_of_seed_and_index():
    one, two = order([5, 9]), order([5, 9])
    late_first = [two.choose(2, seed=3, index=i).tolist() for i in reversed(range(40))][::-1]
    assert late_first == [one.choose(2, seed=3, index=i).tolist() for i in range(40)]


def test_epochs_and_seeds_differ_in_order():
    found = order([40])
    assert len({str(epoch(found, 4, seed, number)) for seed in (0, 1) for number in (0, 1)}) == 4


def test_the_same_images_do_not_meet_again_in_the_next_epoch():
    found = order([40])
    assert len({frozenset(batch) for number in range(3) for batch in epoch(found, 4, number=number)}) == 30


def test_a_steady_order_is_always_the_same():
    found = order([3, 2], steady=True)
    assert epoch(found, 2, seed=0) == epoch(found, 2, seed=9, number=4) == [[0, 1], [2], [3, 4]]


def dataset(tmp_path, config=SMALL, **images):
    """Encode images given as name=(size or image); each is captioned with its name."""
    for number, (name, image) in enumerate(images.items()):
        add(
            tmp_path / "set",
            f"{name}.png",
            name,
            picture(*image, seed=number) if isinstance(image, tuple) else image,
        )
    return encode(scan(tmp_path / "set", config), FakeEncoder(), tmp_path / "cache")


def test_the_largest_batch_is_of_the_largest_bucket(tmp_path):
    found = dataset(tmp_path, square=(64, 64), wide=(128, 64), small=(32, 32))
    largest = max(batch.latents[0].numel() for batch in all_batches(found))
    batch = found.largest_batch(3)
    assert batch.latents[0].numel() == largest and len(batch.latents) == 3
    assert len(batch.conditioning) == len(batch.extras) == 3


class WordByWord(FakeEncoder):
    """Texts are as long as they are; CLIP's are all of one length."""

    def encode_text(self, caption):
        return {"cross_attn": torch.ones(1, len(caption), 8)}


def test_the_largest_batch_has_the_longest_text_whichever_pictures(tmp_path):
    for name, words in (("a", "a"), ("b", "a long caption"), ("c", "shorter")):
        add(tmp_path / "set", f"{name}.png", words)
    found = encode(scan(tmp_path / "set", SMALL), WordByWord(), tmp_path / "cache")
    batch = found.largest_batch(4)
    assert batch.captions == ["a long caption", "shorter", "a", "a long caption"]
    assert {c["cross_attn"].shape[1] for c in batch.conditioning} == {len("a long caption")}


def all_batches(dataset, size=1, seed=0, epochs=1):
    return [dataset.batch(size, seed=seed, index=i) for i in range(epochs * dataset.steps_per_epoch(size))]


def test_every_image_is_seen_its_repeats_number_of_times_at_each_resolution(tmp_path):
    config = DatasetConfig(repeats=2, bucket=BucketConfig(resolutions=(32, 64)))
    found = dataset(tmp_path, config, a=(64, 64), b=(90, 40), c=(40, 90))
    shown = Counter(name for batch in all_batches(found, 2) for name in batch.names)
    assert shown == {"a.png": 4, "b.png": 4, "c.png": 4} and len(found) == 6 and found.visits == 12


def test_batches_are_the_same_after_a_restart_from_another_place(tmp_path):
    one = dataset(tmp_path, a=(64, 64), b=(64, 64), c=(64, 64))
    (tmp_path / "set").rename(tmp_path / "moved")
    two = encode(scan(tmp_path / "moved", SMALL), FakeEncoder(), tmp_path / "cache")
    assert one.fingerprint == two.fingerprint
    for a, b in zip(all_batches(one, 2, epochs=3), all_batches(two, 2, epochs=3), strict=True):
        assert a.names == b.names and torch.equal(a.latents, b.latents) and a.extras == b.extras


@pytest.mark.parametrize(
    "change",
    [
        {"repeats": 2},
        {"weight": 0.5},
        {"caption": CaptionConfig(dropout=0.5)},
        {"mask": MaskConfig(outside=0.5)},
        {"caption": CaptionConfig(trigger="sks")},
        {"augment": AugmentConfig(flip=True)},
    ],
)
def test_the_fingerprint_changes_with_whatever_changes_a_batch(tmp_path, change):
    images = {"a": (64, 64), "b": (64, 64)}
    assert (
        dataset(tmp_path, **images).fingerprint
        != dataset(tmp_path, replace(SMALL, **change), **images).fingerprint
    )


def test_sdxl_is_told_the_original_size_and_where_the_crop_began(tmp_path):
    config = replace(SMALL, bucket=BucketConfig(resolutions=(64,), square=True))
    batch = dataset(tmp_path, config, wide=(256, 128)).batch(1, seed=0, index=0)
    assert batch.extras == [
        {"width": 256, "height": 128, "crop_w": 32, "crop_h": 0, "target_width": 64, "target_height": 64}
    ]


@pytest.mark.feature(57)
def test_both_orientations_are_cached_and_shown(tmp_path):
    found = dataset(tmp_path, replace(SMALL, augment=AugmentConfig(flip=True)), a=(64, 64))
    shown = {
        tuple(batch.latents.flatten().tolist()): batch.latents for batch in all_batches(found, epochs=20)
    }
    one, two = shown.values()
    assert torch.allclose(one, two.flip(-1), atol=0.01)


@pytest.mark.feature(56)
def test_random_crops_and_colors_are_drawn_among_the_cached_ones(tmp_path):
    augment = AugmentConfig(
        crop="random", brightness=0.2, contrast=0.2, saturation=0.2, hue=0.1, variations=3
    )
    found = dataset(tmp_path, replace(SMALL, augment=augment), a=(64, 200))
    shown = {str(batch.latents.tolist()) for batch in all_batches(found, epochs=40)}
    assert len(shown) == 3


@pytest.mark.feature(126)
def test_captions_vary_although_their_conditioning_is_cached(tmp_path):
    add(tmp_path / "set", "a.png", "a, b, c, d, e")
    config = replace(SMALL, caption=CaptionConfig(tag_dropout=0.5, variations=6))
    found = encode(scan(tmp_path / "set", config), encoder := FakeEncoder(), tmp_path / "cache")
    shown = {str(batch.conditioning[0]["cross_attn"]) for batch in all_batches(found, epochs=60)}
    assert len(shown) == len(set(encoder.texts) - {""}) > 3


@pytest.mark.feature(50)
def test_caption_dropout_shows_the_empty_caption_its_share_of_the_time(tmp_path):
    found = dataset(tmp_path, replace(SMALL, caption=CaptionConfig(dropout=0.3)), a=(64, 64))
    batches = all_batches(found, epochs=400)
    empty = [not batch.conditioning[0]["cross_attn"].any() for batch in batches]
    assert 0.24 < sum(empty) / len(empty) < 0.36
    # What text encoders in training read is what the conditioning was made of.
    assert [batch.captions for batch in batches] == [[""] if is_empty else ["a"] for is_empty in empty]


def test_conditioning_keeps_integers_and_shapes(tmp_path):
    (entry,) = dataset(tmp_path, a=(64, 64)).batch(1, seed=0, index=0).conditioning
    assert entry["attention_mask"].dtype == torch.int32 and entry["cross_attn"].shape == (1, 1, 8)
    assert entry["cross_attn"].dtype == entry["pooled_output"].dtype == torch.float32


def half_mask(size=(64, 64)):
    mask = Image.new("L", size, 0)
    mask.paste(255, (0, 0, size[0] // 2, size[1]))
    return mask


@pytest.mark.feature(59)
def test_a_mask_file_weighs_the_latents_and_an_image_without_one_counts_fully(tmp_path):
    add(tmp_path / "set", "a-mask.png", None, half_mask())
    config = replace(SMALL, mask=MaskConfig(outside=0.25))
    batch = dataset(tmp_path, config, a=(64, 64), b=(64, 64)).batch(2, seed=0, index=0)
    masks = dict(zip(batch.names, batch.masks, strict=True))
    assert masks["b.png"].eq(1).all() and masks["a.png"].shape == (1, 8, 8)
    assert masks["a.png"][0, 0].tolist() == [1, 1, 1, 1, 0.25, 0.25, 0.25, 0.25]


def test_a_mask_is_mirrored_and_cropped_with_its_image(tmp_path):
    add(tmp_path / "set", "a-mask.png", None, half_mask((128, 64)))
    config = replace(
        SMALL, augment=AugmentConfig(flip=True), bucket=BucketConfig(resolutions=(64,), square=True)
    )
    found = dataset(tmp_path, config, a=(128, 64))
    rows = {tuple(batch.masks[0, 0, 0].tolist()) for batch in all_batches(found, epochs=20)}
    assert rows == {(1, 1, 1, 1, 0, 0, 0, 0), (0, 0, 0, 0, 1, 1, 1, 1)}


@pytest.mark.parametrize("source, masked", [("off", False), ("file", False), ("alpha", True), ("auto", True)])
def test_transparency_is_a_mask_when_asked_for(tmp_path, source, masked):
    image = picture().convert("RGBA")
    image.putalpha(half_mask())
    batch = dataset(tmp_path, replace(SMALL, mask=MaskConfig(source=source)), a=image).batch(
        1, seed=0, index=0
    )
    assert (batch.masks is not None) == masked
    assert not masked or batch.masks[0, 0, 0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_editing_a_mask_encodes_no_image_again(tmp_path):
    add(tmp_path / "set", "a-mask.png", None, half_mask())
    before = dataset(tmp_path, a=(64, 64))
    add(tmp_path / "set", "a-mask.png", None, half_mask().transpose(Image.Transpose.ROTATE_90))
    encoder = FakeEncoder()
    after = encode(scan(tmp_path / "set", SMALL), encoder, tmp_path / "cache")
    assert encoder.calls == (0, 0) and after.fingerprint != before.fingerprint
    assert after.batch(1, seed=0, index=0).masks[0, 0, 0].tolist() == [0] * 8


def test_a_black_mask_is_named(tmp_path):
    add(tmp_path / "set", "a-mask.png", None, Image.new("L", (64, 64)))
    with pytest.raises(ValueError, match=r"a\.png: its mask is black over the whole crop"):
        dataset(tmp_path, a=(64, 64))


def test_a_damaged_mask_is_named(tmp_path):
    add(tmp_path / "set", "a-mask.png", None).write_bytes(b"no mask")
    with pytest.raises(ValueError, match=r"a\.png: its mask a-mask\.png: is not an image"):
        dataset(tmp_path, a=(64, 64))


def two_folders(tmp_path, **options):
    """Return four images and one for regularisation, encoded as one dataset."""
    for name in "abcd":
        add(tmp_path / "mine", f"{name}.png", name)
    add(tmp_path / "class", "x.png", "[trigger] x")
    mine = scan(tmp_path / "mine", replace(SMALL, caption=CaptionConfig(trigger="sks")))
    general = replace(SMALL, weight=0.25, regularisation=True, caption=CaptionConfig(trigger="sks"))
    return encode(
        join([mine, scan(tmp_path / "class", general)], **options), FakeEncoder(), tmp_path / "cache"
    )


def test_regularisation_images_come_with_their_own_weight(tmp_path):
    found = two_folders(tmp_path)
    weights = {}
    for batch in all_batches(found, 5, epochs=2):
        weights |= dict(zip(batch.names, batch.weights.tolist(), strict=True))
    assert weights == {"a.png": 1, "b.png": 1, "c.png": 1, "d.png": 1, "x.png": 0.25}


def test_what_is_preserved_goes_with_the_captions_of_its_batch(tmp_path):
    for name in "abcd":
        add(tmp_path / "mine", f"{name}.png", f"[trigger] {name}")
    add(tmp_path / "class", "x.png", "eeee")
    rules = CaptionConfig(trigger="sks", class_word="hh", dropout=0.5)
    mine = scan(tmp_path / "mine", replace(SMALL, caption=rules))
    general = scan(tmp_path / "class", replace(SMALL, regularisation=True))
    found = encode(join([mine, general]), FakeEncoder(), tmp_path / "cache")
    expected = {**{f"{name}.png": f"hh {name}" for name in "abcd"}, "x.png": "eeee"}
    for index in range(6):
        names = found.batch(2, seed=3, index=index).names
        preserved = found.preserved_captions(2, seed=3, index=index)
        assert list(preserved.texts) == [expected[name] for name in names]
        for conditioning, text in zip(preserved.conditioning, preserved.texts, strict=True):
            assert torch.equal(conditioning["cross_attn"], FakeEncoder().encode_text(text)["cross_attn"])


def test_a_class_word_makes_another_dataset_and_its_captions_count_as_the_longest(tmp_path):
    rules = CaptionConfig(trigger="sks", class_word="h" * 9)
    plain = dataset(tmp_path, replace(SMALL, caption=replace(rules, class_word="")), a=(64, 64))
    found = dataset(tmp_path, replace(SMALL, caption=rules), a=(64, 64))
    assert found.fingerprint != plain.fingerprint
    assert not plain.preserved_captions(1, seed=0, index=0).texts[0]


def test_the_trigger_word_is_the_first_that_a_folder_has(tmp_path):
    add(tmp_path / "a", "a.png"), add(tmp_path / "b", "b.png")
    named = replace(SMALL, caption=CaptionConfig(trigger="sks"))
    folders = join([scan(tmp_path / "a", SMALL), scan(tmp_path / "b", named)])
    assert encode(folders, FakeEncoder(), tmp_path / "cache").trigger == "sks"


@pytest.mark.feature(58)
def test_folders_fill_an_epoch_by_their_shares(tmp_path):
    shown = Counter(n for batch in all_batches(two_folders(tmp_path, shares=(1, 1)), 2) for n in batch.names)
    assert shown == {"a.png": 1, "b.png": 1, "c.png": 1, "d.png": 1, "x.png": 4}
    shown = Counter(n for batch in all_batches(two_folders(tmp_path, shares=(2, 1)), 2) for n in batch.names)
    assert shown == {"a.png": 1, "b.png": 1, "c.png": 1, "d.png": 1, "x.png": 2}


@pytest.mark.parametrize("shares", [(1,), (1, 0), (1, -1), (1, float("nan"))])
def test_impossible_shares_are_refused(tmp_path, shares):
    with pytest.raises(ValueError, match="2 datasets need 2 positive shares"):
        two_folders(tmp_path, shares=shares)


def many(tmp_path, config=SMALL, count=20):
    return dataset(tmp_path, config, **{f"i{n}": (64, 64) for n in range(count)})


def test_a_validation_fraction_is_held_out_by_content(tmp_path):
    train, held = many(tmp_path).split(SplitConfig(fraction=0.2))
    assert len(held.names) == 4 and not set(held.names) & set(train.names)
    (tmp_path / "set").rename(tmp_path / "moved")
    add(tmp_path / "moved", "new.png", "new", picture(seed=1234))
    again = encode(scan(tmp_path / "moved", SMALL), FakeEncoder(), tmp_path / "cache")
    assert len(set(again.split(SplitConfig(fraction=0.2))[1].names) & set(held.names)) >= 3


def test_validation_images_can_be_named(tmp_path):
    add(tmp_path / "set/held", "x.png"), add(tmp_path / "set/held", "y.png")
    found = dataset(tmp_path, replace(SMALL, recursive=True), a=(64, 64), b=(64, 64), c=(64, 64))
    train, held = found.split(SplitConfig(names=("held/*", "b.png")))
    assert held.names == ["b.png", "held/x.png", "held/y.png"] and train.names == ["a.png", "c.png"]


def test_regularisation_images_are_never_held_out(tmp_path):
    train, held = two_folders(tmp_path).split(SplitConfig(fraction=0.9, names=("x.png",)))
    assert "x.png" in train.names and len(held.names) == 4


def test_validation_shows_each_image_once_and_always_alike(tmp_path):
    config = replace(SMALL, repeats=3, augment=AugmentConfig(flip=True), caption=CaptionConfig(dropout=1.0))
    dataset = many(tmp_path, config, count=12)
    for held, count in ((dataset.validation(), 12), (dataset.split(SplitConfig(fraction=0.5))[1], 6)):
        assert held.steps_per_epoch(1) == count
        one, two = all_batches(held, seed=0), all_batches(held, seed=5, epochs=2)[count:]
        assert all(
            torch.equal(a.latents, b.latents) and a.names == b.names for a, b in zip(one, two, strict=True)
        )
        assert len({batch.names for batch in one}) == count


def test_samples_are_the_entries_of_the_validation_set_one_by_one(tmp_path):
    config = replace(SMALL, repeats=3, augment=AugmentConfig(flip=True), caption=CaptionConfig(dropout=1.0))
    dataset = many(tmp_path, config, count=6)
    held = dataset.validation()
    assert len(dataset) == len(held) == 6
    for index, batch in enumerate(all_batches(held, seed=0)):
        for found in (dataset.sample(index), held.sample(index)):
            assert torch.equal(found.latents, batch.latents) and found.names == batch.names
            assert torch.equal(found.conditioning[0]["cross_attn"], batch.conditioning[0]["cross_attn"])


@pytest.mark.parametrize("options", [{"names": ("nothing*",)}, {"names": ("*",)}, {}])
def test_a_split_that_leaves_a_side_empty_is_refused(tmp_path, options):
    with pytest.raises(ValueError, match="leaves no image for (training|validation), out of 3"):
        many(tmp_path, count=3).split(SplitConfig(**options))


def test_a_cache_that_was_removed_says_what_to_do(tmp_path):
    found = dataset(tmp_path, a=(64, 64))
    found.store.clean(unused_days=0)
    with pytest.raises(ValueError, match="cannot be read .*Run Encode Dataset with 'encode again'"):
        found.batch(1, seed=0, index=0)
