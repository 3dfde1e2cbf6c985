"""Settings of a dataset: defaults that need nothing, and impossible ones refused."""

import json

import pytest

from graft.training.config import from_dict, to_dict
from graft.training.data import AugmentConfig, BucketConfig, DatasetConfig, MaskConfig, SplitConfig


def test_settings_survive_json():
    config = DatasetConfig(
        repeats=3, bucket=BucketConfig(resolutions=(512, 768)), augment=AugmentConfig(flip=True)
    )
    assert from_dict(DatasetConfig, json.loads(json.dumps(to_dict(config)))) == config
    assert from_dict(DatasetConfig, {}) == DatasetConfig()


def test_a_misspelt_setting_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"caption\.trigerr: unknown setting.*Did you mean 'trigger'"):
        from_dict(DatasetConfig, {"caption": {"trigerr": "x"}})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: DatasetConfig(repeats=0), "repeats must be 1 to 1000000, got 0"),
        (lambda: DatasetConfig(weight=0), "weight must be positive, got 0; 1 is neutral"),
        (lambda: DatasetConfig(weight=float("inf")), "weight must be positive"),
        (lambda: DatasetConfig(background="white"), "background must look like #ffffff, got 'white'"),
        (lambda: AugmentConfig(hue=0.7), "hue jitter must be between 0 and 0.5"),
        (lambda: AugmentConfig(brightness=-1), "brightness jitter must be between 0 and 1"),
        (lambda: AugmentConfig(variations=0), "image variations must be 1 to 1000"),
        (lambda: MaskConfig(outside=2), "weight outside the mask must be between 0 and 1"),
        (lambda: SplitConfig(fraction=1), "fraction must be at least 0 and below 1"),
        (lambda: BucketConfig(step=-8), "bucket step must be 0 to 1024"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
