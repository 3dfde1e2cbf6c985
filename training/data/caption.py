"""Captions as the text encoder gets them: filter, shuffle and drop tags, add prefix and suffix, then the
trigger.

Brackets in a caption are plain characters, not prompt weights, and are escaped here. The one rule: the
variations of a caption are a pure function of the caption and the settings, so they are encoded once and
cached for every later run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import product

import torch

from ..files.text import require_letters
from ..rng import generator
from ..user_error import UserError
from .config import CaptionConfig, DatasetConfig
from .image_file import BadImage

TRIGGER = "[trigger]"
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
    rules = config.caption
    count = rules.variations if rules.shuffle or rules.tag_dropout else 1
    texts: dict[str, None] = {}
    for caption, i in product(captions, range(count)):
        check()
        texts[finish(_vary_tags(caption, rules, i), config)] = None
    return list(texts)


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
    if trigger and not re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text, re.IGNORECASE):
        return f"{trigger}, {text}" if text else trigger
    return text


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
