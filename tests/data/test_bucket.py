"""Buckets and crops: pure functions of sizes."""

import math
import random

import pytest

from graft.training.data.bucket import bucket_for, bucket_sizes, buckets_for, crop_box, crops_for, nearest
from graft.training.data.config import AugmentConfig, BucketConfig


def sizes(count, seed=0):
    draw = random.Random(seed)
    return [(draw.randint(8, 6000), draw.randint(8, 6000)) for _ in range(count)]


@pytest.mark.feature(53)
@pytest.mark.parametrize("resolution, step", [(1024, 64), (512, 16), (768, 32)])
def test_the_bucket_is_the_nearest_of_all_by_brute_force(resolution, step):
    buckets = bucket_sizes(resolution, step=step)

    def distance(bucket, width, height):
        return abs(math.log(bucket[0] / bucket[1]) - math.log(width / height))

    for width, height in sizes(10_000 // 3 + 1, seed=step):
        found = nearest(buckets, width, height)
        assert distance(found, width, height) == pytest.approx(
            min(distance(b, width, height) for b in buckets), abs=1e-12
        )


@pytest.mark.parametrize("resolution, step", [(1024, 64), (512, 8), (128, 16), (1000, 64)])
def test_buckets_are_multiples_of_the_step_near_their_area(resolution, step):
    for width, height in bucket_sizes(resolution, step=step):
        assert width % step == height % step == 0 and width * height <= resolution**2
        assert (width + step) * height > resolution**2 or (height + step) * width > resolution**2
        assert resolution / 2 <= min(width, height) and max(width, height) <= 2 * resolution


def test_sdxl_buckets_are_the_well_known_ones():
    known = {(1024, 1024), (896, 1152), (832, 1216), (768, 1344), (640, 1536), (1216, 832)}
    assert known <= set(bucket_sizes(1024, step=64))


def test_sides_stay_within_their_limits():
    found = bucket_sizes(1024, step=64, min_side=768, max_side=1344)
    assert min(min(s) for s in found) == 768 and max(max(s) for s in found) == 1344


def test_limits_that_leave_no_bucket_say_so():
    with pytest.raises(ValueError, match="resolution 32 leaves no bucket: sides must be multiples of 64"):
        bucket_sizes(32, step=64)


def test_a_larger_step_makes_fewer_buckets_that_still_fit_the_model():
    found = {buckets_for(*size, BucketConfig(step=40), step=16)[0] for size in sizes(300)}
    assert all(side % 80 == 0 for bucket in found for side in bucket) and len(found) < 30


@pytest.mark.feature(54)
def test_several_resolutions_give_each_image_a_bucket_at_each():
    config = BucketConfig(resolutions=(512, 1024))
    assert buckets_for(300, 300, config, step=64) == [(512, 512), (1024, 1024)]


@pytest.mark.parametrize("side, resolution", [(300, 512), (800, 512), (1024, 1024), (5000, 1024)])
def test_or_only_the_largest_that_needs_no_enlarging(side, resolution):
    config = BucketConfig(resolutions=(1024, 512), each=False)
    assert buckets_for(side, side, config, step=64) == [(resolution, resolution)]


def test_without_enlarging_no_image_is_enlarged():
    config = BucketConfig(resolutions=(512,), upscale=False)
    for width, height in sizes(2000):
        if min(width, height) < 16 or max(width, height) / min(width, height) > 20:
            continue
        bucket = bucket_for(width, height, 512, config, step=16)
        assert bucket[0] <= width and bucket[1] <= height and max(bucket) <= 1024
        assert bucket[0] % 16 == bucket[1] % 16 == 0 and bucket[0] * bucket[1] <= 512 * 512


def test_an_image_smaller_than_a_step_is_refused_without_enlarging():
    with pytest.raises(
        ValueError, match="12 x 40 px is smaller than one bucket step .16 px.; allow enlarging"
    ):
        bucket_for(12, 40, 512, BucketConfig(upscale=False), step=16)


def test_square_buckets_crop_everything_to_a_square():
    config = BucketConfig(resolutions=(512,), square=True)
    assert {bucket_for(*size, 512, config, step=64) for size in sizes(50)} == {(512, 512)}


def test_a_square_without_enlarging_is_as_large_as_the_shorter_side():
    config = BucketConfig(square=True, upscale=False)
    for size, side in (((3000, 400), 400), ((390, 3000), 384), ((3000, 600), 512), ((300, 300), 288)):
        assert bucket_for(*size, 512, config, step=16) == (side, side)


def test_a_small_picture_keeps_its_own_size_without_enlarging():
    config = BucketConfig(upscale=False)
    assert bucket_for(300, 200, 512, config, step=16) == (288, 192)
    assert bucket_for(3000, 200, 512, config, step=16) == (1024, 128)  # 1983 x 132 of 512 x 512 pixels


def test_a_crop_has_the_buckets_shape_and_touches_two_sides():
    for width, height in sizes(500):
        left, top, right, bottom = crop_box(width, height, (832, 1216), at=(0.3, 0.8))
        assert (right - left) / (bottom - top) == pytest.approx(832 / 1216)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert right - left == pytest.approx(width) or bottom - top == pytest.approx(height)


def test_the_share_that_was_cut_off_is_known():
    (crop,) = crops_for(200, 100, (64, 64), AugmentConfig(), content="x")
    assert (
        crop.box == (50, 0, 150, 100) and crop.cut_off(200, 100) == pytest.approx(0.5) and crop.scale == 0.64
    )


def test_corner_crops_visit_the_four_corners():
    crops = crops_for(100, 300, (64, 64), AugmentConfig(crop="corners"), content="x")
    assert [crop.box[:2] for crop in crops] == [(0, 0), (0, 0), (0, 200), (0, 200)]
    crops = crops_for(300, 100, (64, 64), AugmentConfig(crop="corners"), content="x")
    assert [crop.box[:2] for crop in crops] == [(0, 0), (200, 0), (0, 0), (200, 0)]


def test_random_crops_differ_but_are_the_same_in_every_run():
    def places(content):
        return [
            c.box
            for c in crops_for(
                100, 300, (64, 64), AugmentConfig(crop="random", variations=5), content=content
            )
        ]

    assert len(set(places("x"))) == 5 and places("x") == places("x") and places("x") != places("y")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"resolutions": ()}, "at least one resolution"),
        ({"resolutions": (4,)}, "resolution must be 8 to 16384"),
        ({"resolutions": (512, 512)}, "resolutions repeat"),
        ({"min_side": 512, "max_side": 256}, "must not exceed its longest"),
        ({"min_side": -1}, "must not be negative"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BucketConfig(**options)
