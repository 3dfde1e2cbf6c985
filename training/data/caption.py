"""Captions as the text encoder gets them: filter, shuffle and drop tags, add prefix and suffix, then the
trigger.

Brackets in a caption are plain characters, not prompt weights, and are escaped here. The one rule: the
variations of a caption are a pure function of the caption and the settings, so they are encoded once and
cached for every later run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product

import torch

from ..files.text import require_letters
from ..rng import generator
from ..user_error import UserError
from .config import CaptionConfig, DatasetConfig
from .image_file import BadImage

TRIGGER = "[trigger]"
LYRICS = "\n[lyrics]\n"
"""Between the tags and the lyrics of a sound's caption. Lyrics are trained as they are."""
LONGEST = 16_384
"""Letters of a caption as the text encoder gets it: some 4,000 tokens, several times what any was trained
with. Encoders that take them all need memory and time by the square of their number."""


def variations(
    captions: tuple[str, ...], config: DatasetConfig, check: Callable[[], None] = lambda: None
) -> list[str]:
    """Return every text that an image with these captions is trained with, each once.

    Without shuffle and tag dropout there is one for each caption; otherwise up to `variations` for each.
    `check` is called before each and may raise to cancel.
    """
    return list(preserved_texts(captions, config, check))


def preserved_texts(
    captions: tuple[str, ...], config: DatasetConfig, check: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Return {text: the same without what is learned} for every one of `variations`, in their order."""
    rules = config.caption
    count = rules.variations if rules.shuffle or rules.tag_dropout else 1
    texts: dict[str, str] = {}
    for caption, i in product(captions, range(count)):
        check()
        tags, mark, lyrics = caption.partition(LYRICS)
        varied, rest = _vary_tags(tags, rules, i), mark + lyrics
        swapped = without_trigger(varied, config)
        texts.setdefault(finish(varied, config) + rest, swapped and swapped + rest)
    return texts


def without_trigger(caption: str, config: DatasetConfig) -> str:
    """Return a caption as the model sees it with the class word in place of the trigger; without a class word
    or a trigger it is empty. That of a regularisation image, which has no trigger, stays.
    """
    rules = config.caption
    trigger, word = rules.trigger.strip(), rules.class_word.strip()
    if config.regularisation:
        return finish(caption, config)
    if not (trigger and word):
        return ""

    def mark(text: str) -> str:
        return _word(literal(trigger)).sub(TRIGGER, literal(text))

    swapped = replace(rules, trigger=word, prefix=mark(rules.prefix), suffix=mark(rules.suffix))
    return finish(mark(caption), replace(config, caption=swapped))


def finish(caption: str, config: DatasetConfig) -> str:
    """Return a caption with prefix, suffix and trigger word, as the model sees it.

    The trigger replaces [trigger]; a caption with neither gets it in front. Regularisation images don't get
    the trigger: their [trigger] is removed.
    """
    rules = config.caption
    trigger = "" if config.regularisation else literal(rules.trigger.strip())
    parts = (rules.prefix.strip(), caption.strip(), rules.suffix.strip())
    text = literal(" ".join(part for part in parts if part))
    if TRIGGER in text:
        text = text.replace(TRIGGER, trigger)
        return text if trigger else re.sub(r"\s+", " ", text).strip(" ,")
    if trigger and not _word(trigger).search(text):
        return f"{trigger}, {text}" if text else trigger
    return text


def _word(text: str) -> re.Pattern[str]:
    """Return the pattern of a word or words that stand alone, in small or capital letters."""
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.IGNORECASE)


def literal(text: str) -> str:
    """Return text as a prompt in which brackets are plain characters, not weights.

    ComfyUI takes every bracket after a backslash literally (comfy/sd1_clip.py, escape_important), also for
    text encoders without weights.
    """
    return re.sub(r"(?<!\\)[()]", r"\\\g<0>", text)


def require_usable(captions: tuple[str, ...], config: DatasetConfig) -> None:
    """Raise BadImage for captions that no text encoder can take."""
    rules = config.caption
    texts = (*captions, rules.prefix, rules.suffix)
    if not config.regularisation and not rules.trigger.strip() and any(TRIGGER in text for text in texts):
        raise BadImage(f"its caption uses {TRIGGER}, but no trigger word is given; fill in 'trigger'")
    for text in captions:
        try:
            require_letters(text, "its caption")
        except UserError as error:
            raise BadImage(str(error).rstrip(".")) from error
        if (letters := len(finish(text, config))) > LONGEST:
            raise BadImage(f"its caption, as trained, has {letters} characters; shorten it to {LONGEST}")


def _vary_tags(caption: str, rules: CaptionConfig, variation: int) -> str:
    """Return one variation of a caption: filtered, with its tags shuffled and dropped."""
    if not (rules.remove or rules.shuffle or rules.tag_dropout):
        return caption
    tags = [tag.strip() for tag in caption.split(rules.separator)]
    tags = [tag for tag in tags if tag and not _matches(tag, rules.remove)]
    fixed, rest = tags[: rules.keep_tokens], tags[rules.keep_tokens :]
    draws = generator(0, "caption", caption, variation)
    order = torch.randperm(len(rest), generator=draws).tolist() if rules.shuffle else range(len(rest))
    stays = (torch.rand(len(rest), generator=draws) >= rules.tag_dropout).tolist()
    space = "" if rules.separator[-1].isspace() else " "
    return (rules.separator + space).join(fixed + [rest[i] for i in order if stays[i]])


def _matches(tag: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(tag.casefold(), pattern.strip().casefold()) for pattern in patterns)
