"""Which pictures teach: the losses of each with the base and with the LoRA, with its caption and without.

Pictures are compared with one another, as how much a loss means depends on model and subject: what counts is
how far one lies from the median, in robust standard deviations (1.4826 times the median absolute deviation).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..model import OnProgress, no_progress
from ..user_error import UserError
from .caption import variations
from .preview import draw_sheet
from .samples import ImageSet

MISFIT, NOT_LEARNED, OVERFITTED, LEARNED = "caption does not fit", "not learned", "overfitted", "learned"
FAR = 2.0
"""Standard deviations from the other pictures, from which on one is named."""
MEMORIZED = 0.5
"""Share of the base's loss that a LoRA can only take away by knowing the very picture."""
SMALLEST_SPREAD = 0.02
"""Of shares and logarithms: where pictures are nearly alike, smaller differences mean nothing."""


@dataclass(frozen=True)
class Picture:
    """The mean losses of a picture at fixed noise."""

    position: int
    """In the image set."""
    name: str
    base: float
    base_without: float
    """Without its caption."""
    trained: float
    trained_without: float

    @property
    def learned(self) -> float:
        """Share of the base's loss that the LoRA takes away."""
        return 1 - self.trained / self.base

    @property
    def caption_helps(self) -> float:
        """Share of the loss without a caption that the caption takes away with the LoRA; below 0 it harms."""
        return 1 - self.trained / self.trained_without


@dataclass(frozen=True)
class Judgment:
    """What is said of a picture."""

    picture: Picture
    verdict: str
    score: float
    """Standard deviations by which it is worse than the others: in its loss or in what its caption does."""


def compare(
    images: ImageSet,
    positions: Sequence[int],
    base: Sequence[tuple[float, float]],
    trained: Sequence[tuple[float, float]],
) -> list[Picture]:
    """Return the pictures of a set, from the losses (with caption, without) of the samples at `positions`.

    A picture that is trained at several sizes has their mean. Raises UserError for a loss that is no number.
    """
    found = []
    for position in dict.fromkeys(positions):
        places = [place for place, each in enumerate(positions) if each == position]
        losses = [
            statistics.fmean(measured[place][caption] for place in places)
            for measured in (base, trained)
            for caption in (0, 1)
        ]
        name = images.samples.names[position]
        if not all(math.isfinite(loss) and loss > 0 for loss in losses):
            raise UserError(
                f"{name}: its loss is {losses}, which cannot be compared; look at the image, and whether the "
                "LoRA draws anything at all."
            )
        found.append(Picture(position, name, *losses))
    return found


def judge(pictures: Sequence[Picture]) -> list[Judgment]:
    """Return a judgment of each picture, the worst first."""
    losses = _deviations([math.log(picture.trained) for picture in pictures])
    captions = _deviations([picture.caption_helps for picture in pictures])
    found = [
        Judgment(picture, _verdict(picture, loss, caption), max(loss, -caption))
        for picture, loss, caption in zip(pictures, losses, captions, strict=True)
    ]
    order = (MISFIT, NOT_LEARNED, OVERFITTED, LEARNED)
    return sorted(found, key=lambda each: (max(1, order.index(each.verdict)), -each.score))


def _verdict(picture: Picture, loss: float, caption: float) -> str:
    if caption < -FAR and picture.caption_helps < 0 and -caption >= loss:
        return MISFIT
    if loss > FAR or picture.learned <= 0:
        return NOT_LEARNED
    return OVERFITTED if picture.learned > MEMORIZED else LEARNED


def _deviations(values: Sequence[float]) -> list[float]:
    """Return how many robust standard deviations each value lies above the median."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return [(value - middle) / max(spread, SMALLEST_SPREAD) for value in values]


def draw(images: ImageSet, judgments: Sequence[Judgment], *, on_progress: OnProgress = no_progress) -> Tensor:
    """Return a sheet of the pictures with verdict and caption below each, as `draw_sheet` does."""
    lines = {}
    for each in judgments:
        sample, picture = images.samples[each.picture.position], each.picture
        text = variations(sample.captions, images.source(sample).config)[0] or "(empty caption)"
        loss = f"loss {picture.base:.3f} -> {picture.trained:.3f}"
        lines[picture.position] = (each.verdict.upper(), picture.name, loss, text)
    return draw_sheet(images, lines, on_progress=on_progress)


def tabulate(judgments: Sequence[Judgment]) -> str:
    """Return a table, one picture a line: verdict, losses, what was learned and what its caption does."""
    rows = [("verdict", "base", "LoRA", "learned", "caption helps", "image")]
    for each in judgments:
        picture = each.picture
        shares = f"{picture.learned:.0%}", f"{picture.caption_helps:.0%}"
        rows.append((each.verdict, f"{picture.base:.4f}", f"{picture.trained:.4f}", *shares, picture.name))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def to_json(judgments: Sequence[Judgment]) -> str:
    """Return the same as JSON, with all four losses: a list of objects, the worst picture first."""
    return json.dumps([_as_object(each) for each in judgments], indent=1)


def _as_object(judgment: Judgment) -> Mapping[str, Any]:
    picture = judgment.picture
    return {
        "image": picture.name,
        "verdict": judgment.verdict,
        "score": round(judgment.score, 3),
        "learned": round(picture.learned, 4),
        "caption_helps": round(picture.caption_helps, 4),
        "loss": {
            "base": picture.base,
            "base_without_caption": picture.base_without,
            "lora": picture.trained,
            "lora_without_caption": picture.trained_without,
        },
    }
