"""The texts of a slider from words: what strength 1 and strength -1 bring."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import require, setting
from .caption import literal
from .config import MOST_ADDED


@dataclass(frozen=True, kw_only=True)
class SliderWords:
    """The texts of a slider from words (Gandikota et al. 2023, arXiv:2311.12092, sec. 4.1)."""

    positive: str = setting("", "What strength 1 brings, such as: a very old person.", multiline=True)
    negative: str = setting("", "What strength -1 brings, such as: a very young person.", multiline=True)
    neutral: str = setting(
        "", "What the slider changes, without the property, such as: a person.", multiline=True
    )
    guidance: float = setting(
        3.0, "How far strength 1 goes, as a multiple of the difference of the texts.", low=0.1, high=100
    )
    anchor: str = setting(
        "",
        "What stays as it is at every strength, such as: a landscape. It counts with preservation in "
        "Objective Settings.",
        multiline=True,
    )

    def __post_init__(self) -> None:
        for name in ("positive", "negative", "neutral", "anchor"):
            length = len(getattr(self, name))
            require(length <= MOST_ADDED, f"the {name} text has {length} letters; the limit is {MOST_ADDED}.")
        require(
            self.positive.strip() != self.negative.strip(),
            f"the positive and the negative text are both {self.positive.strip()!r}; the slider goes from "
            "one to the other, such as: a very old person, a very young person.",
        )
        require(
            math.isfinite(self.guidance) and self.guidance > 0,
            f"guidance must be above 0, got {self.guidance}; 3 is usual.",
        )

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Return the positive, negative, neutral and anchor text as prompts without weights."""
        texts = (self.positive, self.negative, self.neutral, self.anchor)
        positive, negative, neutral, anchor = (literal(text.strip()) for text in texts)
        return positive, negative, neutral, anchor
