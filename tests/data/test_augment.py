"""What is made of one image: where a mirrored crop began, and which colors it has."""

import colorsys
import math

import numpy as np
import pytest

from graft.tests.support.datasets import SMALL
from graft.training.data.augment import Jitter, View, recolor, views_for
from graft.training.data.bucket import Crop
from graft.training.data.config import AugmentConfig, DatasetConfig

LUMA = [0.299, 0.587, 0.114]


def test_a_mirrored_crop_began_as_far_from_the_other_side():
    crop = Crop((64, 64), (50.0, 10.0, 178.0, 138.0))
    assert View(crop).offset(300, 200) == (25, 5)
    assert View(crop, flip=True).offset(300, 200) == (61, 5)


@pytest.mark.parametrize("hue", [-0.25, 0.1, 0.5])
def test_hue_turns_the_color_circle_and_keeps_the_light(hue):
    image = 0.4 + 0.2 * np.random.default_rng(0).random((8, 8, 3), np.float32)
    found = recolor(image, Jitter(1, 1, 1, hue))
    np.testing.assert_allclose(found @ np.float32(LUMA), image @ np.float32(LUMA), rtol=1e-4)
    for before, after in zip(image.reshape(-1, 3), found.reshape(-1, 3)):
        (_, i, q), (_, turned_i, turned_q) = colorsys.rgb_to_yiq(*before), colorsys.rgb_to_yiq(*after)
        angle = math.atan2(turned_q, turned_i) - math.atan2(q, i) - 2 * math.pi * hue
        assert abs(math.remainder(angle, 2 * math.pi)) < 0.1
    np.testing.assert_allclose(recolor(found, Jitter(1, 1, 1, -hue)), image, atol=1e-4)


def test_colors_stay_within_their_range():
    found = recolor(np.float32([[[0.9, 0.1, 0.5]]]), Jitter(1.5, 2, 1, 0))
    assert found.dtype == np.float32 and found.min() == 0 and found.max() == 1


@pytest.mark.feature(57)
def test_colors_are_drawn_within_what_was_asked_for_and_alike_in_every_run():
    augment = AugmentConfig(brightness=0.2, hue=0.1, variations=60)
    config = DatasetConfig(bucket=SMALL.bucket, augment=augment)
    [views] = views_for(100, 100, "content", config, step=16)
    assert views == views_for(100, 100, "content", config, step=16)[0]
    for name, middle, amount in (("brightness", 1, 0.2), ("contrast", 1, 0), ("hue", 0, 0.1)):
        drawn = [getattr(view.jitter, name) - middle for view in views]
        assert max(drawn) <= amount and min(drawn) >= -amount
        assert max(drawn) >= 0.8 * amount and min(drawn) <= -0.8 * amount


def test_latents_of_sides_that_the_model_does_not_take_are_refused():
    for size in ((64, 72), (72, 64)):
        with pytest.raises(ValueError, match="needs multiples of 16 on both sides"):
            views_for(100, 100, "content", SMALL, step=16, encoded=[size])
