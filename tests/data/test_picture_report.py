"""Judging pictures by their losses."""

import json

import pytest

from graft.training.data.picture_report import (
    LEARNED,
    MISFIT,
    NOT_LEARNED,
    OVERFITTED,
    Picture,
    compare,
    judge,
    tabulate,
    to_json,
)
from graft.training.data.samples import ImageSet, Sample, SampleTable

LOSSES = {"base": 0.5, "base_without": 0.55, "trained": 0.4, "trained_without": 0.44}


def pictures(**others):
    """Ten ordinary pictures, slightly different, and others by name with some losses of their own."""
    ordinary = [{key: value * (1 + i / 100) for key, value in LOSSES.items()} for i in range(10)]
    named = {**{f"{i}.png": losses for i, losses in enumerate(ordinary)}, **others}
    return [Picture(i, name, **{**LOSSES, **losses}) for i, (name, losses) in enumerate(named.items())]


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ({"trained": 0.5, "trained_without": 0.4}, MISFIT),
        ({"base": 1.3, "trained": 1.2, "trained_without": 1.25}, NOT_LEARNED),
        ({"base": 0.4, "trained": 0.41}, NOT_LEARNED),
        ({"trained": 0.2, "trained_without": 0.22}, OVERFITTED),
    ],
)
def test_a_picture_unlike_the_others_is_judged_and_comes_first(losses, verdict):
    report = judge(pictures(odd=losses))
    assert (report[0].picture.name, report[0].verdict) == ("odd", verdict)
    assert {each.verdict for each in report[1:]} == {LEARNED}


def test_pictures_that_are_all_alike_are_learned():
    assert {each.verdict for each in judge(pictures()[:1] * 5)} == {LEARNED}


def test_table_and_json_say_the_same():
    report = judge(pictures(odd={"trained": 0.5, "trained_without": 0.4}))
    table, data = tabulate(report).splitlines(), json.loads(to_json(report))
    assert table[0].split() == ["verdict", "base", "LoRA", "learned", "caption", "helps", "image"]
    assert table[1].split() == ["caption", "does", "not", "fit", "0.5000", "0.5000", "0%", "-25%", "odd"]
    assert data[0]["loss"] == {
        "base": 0.5, "base_without_caption": 0.55, "lora": 0.5, "lora_without_caption": 0.4,
    }  # fmt: skip
    assert len(table) - 1 == len(data) == 11 and data[0]["caption_helps"] == -0.25


def test_a_loss_that_is_no_number_is_named():
    images = ImageSet(SampleTable([Sample("a.png", 8, 8, ("",))]), ())
    with pytest.raises(ValueError, match=r"a\.png: its loss is .*nan"):
        compare(images, [0], [(1.0, 1.0)], [(float("nan"), 1.0)])


def test_a_picture_at_several_sizes_has_their_mean():
    images = ImageSet(SampleTable([Sample(name, 8, 8, ("",)) for name in ("a.png", "b.png")]), ())
    found = compare(images, [0, 1, 0], [(1.0, 2.0), (5.0, 6.0), (3.0, 4.0)], [(0.5, 1.0)] * 3)
    assert found == [Picture(0, "a.png", 2.0, 3.0, 0.5, 1.0), Picture(1, "b.png", 5.0, 6.0, 0.5, 1.0)]
