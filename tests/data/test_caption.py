"""Captions as the model sees them."""

import pytest

from graft.training.data import CaptionConfig, DatasetConfig
from graft.training.data.caption import preserved_texts, variations

TAGS = "cat, red hat, blue sky, bad quality, grass"


def texts(*captions, regularisation=False, **rules):
    return variations(captions, DatasetConfig(caption=CaptionConfig(**rules), regularisation=regularisation))


@pytest.mark.feature(49)
@pytest.mark.parametrize(
    "caption, expected",
    [
        ("a photo of [trigger] outside", "a photo of sks outside"),
        ("a cat", "sks, a cat"),
        ("a SKS cat", "a SKS cat"),
        ("a flasks of wine", "sks, a flasks of wine"),
        ("", "sks"),
    ],
)
def test_the_trigger_replaces_its_mark_or_goes_in_front(caption, expected):
    assert texts(caption, trigger="sks") == [expected]


def test_a_trigger_may_hold_any_characters():
    assert texts("a cat", trigger="c+t*") == ["c+t*, a cat"]
    assert texts("my c+t*", trigger="c+t*") == ["my c+t*"]


@pytest.mark.parametrize("caption", ["my ganyu (genshin)", r"my ganyu \(genshin\)"])
def test_brackets_are_escaped_once(caption):
    assert texts(caption) == [r"my ganyu \(genshin\)"] == texts(caption, trigger="ganyu (genshin)")
    assert texts("a bow", trigger="ganyu (genshin)") == [r"ganyu \(genshin\), a bow"]
    assert texts(":)", suffix="(best)") == [r":\) \(best\)"]


def test_regularisation_images_never_get_the_trigger():
    assert texts("a photo of a [trigger] , cat", trigger="sks", regularisation=True) == ["a photo of a , cat"]


@pytest.mark.parametrize(
    ("caption", "preserved"),
    [
        ("a photo of [trigger] outside", "a photo of dog outside"),
        ("a photo of SKS outside, sks", "a photo of dog outside, dog"),
        ("grass", "dog, grass"),
        ("two [trigger]s and flasks", "two dogs and flasks"),
        ("", "dog"),
    ],
)
def test_the_class_word_takes_the_place_of_the_trigger_in_what_is_preserved(caption, preserved):
    rules = CaptionConfig(trigger="sks", class_word="dog")
    [(text, other)] = preserved_texts((caption,), DatasetConfig(caption=rules)).items()
    assert [text] == texts(caption, trigger="sks") and other == preserved


def test_what_is_preserved_varies_with_its_caption_and_has_its_prefix_and_suffix():
    rules = CaptionConfig(
        trigger="sks (a)", class_word="dog", prefix="an sks (a)", suffix=r"best \(x\)", shuffle=True
    )
    pairs = preserved_texts((TAGS,), DatasetConfig(caption=rules))
    assert len(pairs) > 3
    assert all(text.replace(r"sks \(a\)", "dog") == other != text for text, other in pairs.items())


def test_without_a_class_word_what_is_preserved_is_empty_and_a_regularisation_image_stays():
    for rules in ({"trigger": "sks"}, {"class_word": "dog"}, {}):
        config = DatasetConfig(caption=CaptionConfig(**rules))
        assert list(preserved_texts(("a", "b"), config).values()) == ["", ""]
    config = DatasetConfig(caption=CaptionConfig(trigger="sks", class_word="dog"), regularisation=True)
    assert preserved_texts(("a [trigger] cat",), config) == {"a cat": "a cat"}


def test_prefix_and_suffix_go_around_the_caption():
    assert texts("a cat", prefix="photo of ", suffix=", film grain") == ["photo of a cat , film grain"]
    assert texts("", prefix="[trigger] style", trigger="sks") == ["sks style"]


def test_a_caption_without_rules_is_left_as_it_was_written():
    assert texts(" a cat,with  odd , commas,") == ["a cat,with  odd , commas,"]


@pytest.mark.feature(52)
def test_filtered_tags_are_taken_out_whatever_their_case():
    assert texts(TAGS, remove=("*Quality", "grass")) == ["cat, red hat, blue sky"]


@pytest.mark.feature(51)
def test_shuffling_keeps_the_first_tags_and_loses_none():
    found = texts(TAGS, shuffle=True, keep_tokens=2)
    assert len(found) > 3 and len(set(found)) == len(found) <= 8
    for text in found:
        assert text.startswith("cat, red hat, ") and sorted(text.split(", ")) == sorted(TAGS.split(", "))


def test_tag_dropout_leaves_out_its_share_and_never_a_kept_tag():
    many = ", ".join(f"t{i}" for i in range(200))
    found = texts(many, tag_dropout=0.25, keep_tokens=3, variations=40)
    kept = [len(text.split(", ")) for text in found]
    assert all(text.startswith("t0, t1, t2") for text in found) and 0.7 < sum(kept) / len(kept) / 200 < 0.8


def test_variations_are_the_same_in_every_run_and_do_not_depend_on_other_captions():
    alone = texts(TAGS, shuffle=True)
    assert (
        alone == texts(TAGS, shuffle=True)
        and texts("other, words", TAGS, shuffle=True)[-len(alone) :] == alone
    )


def test_several_captions_are_alternatives():
    assert texts("one", "two", "one", trigger="sks") == ["sks, one", "sks, two"]


def test_other_separators_divide_tags():
    assert texts("a | b | c", separator="|", remove=("b",)) == ["a| c"]


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"tag_dropout": 1.0}, "tag dropout must be at least 0 and below 1"),
        ({"dropout": 1.5}, "caption dropout must be between 0 and 1"),
        ({"dropout": float("nan")}, "caption dropout must be between 0 and 1"),
        ({"keep_tokens": -1}, "keep_tags must not be negative"),
        ({"variations": 0}, "variations must be 1 to 1000"),
        ({"separator": ""}, "separator must not be empty"),
        ({"missing": "trigger"}, "there is no trigger word"),
    ],
)
def test_impossible_settings_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        CaptionConfig(**rules)
