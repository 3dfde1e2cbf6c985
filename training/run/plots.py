"""Plots of a run, drawn with Pillow alone: a labeled grid of samples, and the loss by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

Color = tuple[int, int, int]

PAPER: Color = (255, 255, 255)
INK: Color = (28, 30, 36)
GRAY: Color = (120, 124, 134)
RULE: Color = (226, 228, 233)
FAINT: Color = (176, 202, 238)
STRONG: Color = (24, 95, 196)
MARK: Color = (214, 84, 34)

MARGIN, GUTTER, LABEL_WIDTH, IMAGE_HEIGHT = 28, 10, 168, 176


@dataclass(frozen=True)
class Column:
    """One prompt: the text above it, and its images from top to bottom."""

    title: str
    note: str
    images: Sequence[Image.Image]


def sample_grid(
    columns: Sequence[Column],
    rows: Sequence[str],
    *,
    title: str,
    subtitle: str,
    height: int = IMAGE_HEIGHT,
) -> Image.Image:
    """Draw prompts from left to right and models from top to bottom; `rows` names the models.

    All images are scaled to one `height`; wider ones make a wider column.
    """
    cells = [[_to_height(image, height) for image in column.images] for column in columns]
    widths = [max(image.width for image in column) for column in cells]
    heads = [_wrap(column.title, font(17), width, lines=3) for column, width in zip(columns, widths)]
    head_height = 21 * max(len(head) for head in heads) + 30
    top = MARGIN + 34 + 24 + 18 + head_height
    page_width = 2 * MARGIN + LABEL_WIDTH + sum(widths) + GUTTER * (len(columns) - 1)
    page_height = top + len(rows) * (height + GUTTER) - GUTTER + MARGIN
    page = Image.new("RGB", (page_width, page_height), PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((MARGIN, MARGIN), title, INK, font(28))
    draw.text((MARGIN, MARGIN + 38), subtitle, GRAY, font(16))
    for index, label in enumerate(rows):
        name, _, note = label.partition("\n")
        y = top + index * (height + GUTTER) + height // 2
        draw.text((MARGIN, y - 11), name, INK, font(20), anchor="lm")
        draw.text((MARGIN, y + 13), note, GRAY, font(15), anchor="lm")
    x = MARGIN + LABEL_WIDTH
    for column, head, images, width in zip(columns, heads, cells, widths):
        draw.text((x + width / 2, top - 30), column.note, GRAY, font(13), anchor="ma")
        for line, text in enumerate(reversed(head)):
            draw.text((x + width / 2, top - 52 - 21 * line), text, INK, font(17), anchor="ma")
        for index, image in enumerate(images):
            y = top + index * (height + GUTTER)
            page.paste(image, (x + (width - image.width) // 2, y))
            draw.rectangle((x - 1, y - 1, x + width, y + height), outline=RULE)
        x += width + GUTTER
    return page


def loss_plot(
    losses: Sequence[float],
    *,
    title: str,
    subtitle: str,
    validations: Sequence[tuple[int, float]] = (),
) -> Image.Image:
    """Draw the loss of each step, and its mean over about a tenth of the run, which is the one to look at.

    `validations` are (step, loss on held-out images), drawn as a line of their own.
    """
    scale, size, left, top, right, bottom = 2, (960, 520), 78, 104, 28, 58
    page = Image.new("RGB", (size[0] * scale, size[1] * scale), PAPER)
    draw = ImageDraw.Draw(page)

    def at(x: float, y: float) -> tuple[float, float]:
        return x * scale, y * scale

    window = max(1, len(losses) // 10)
    means = smooth(losses, window)
    held_out = [loss for _, loss in validations]
    low, high, step = axis(min([*losses, *held_out]), max([_percentile(losses, 0.995), *held_out]))

    def place(index: int, value: float) -> tuple[float, float]:
        across = index / max(1, len(losses) - 1)
        up = (min(value, high) - low) / (high - low)
        return at(left + across * (size[0] - left - right), size[1] - bottom - up * (size[1] - top - bottom))

    draw.text(at(left, 26), title, INK, font(24 * scale))
    draw.text(at(left, 60), subtitle, GRAY, font(15 * scale))
    for tick in range(round((high - low) / step) + 1):
        value = low + tick * step
        (x0, y), (x1, _) = place(0, value), place(max(1, len(losses) - 1), value)
        draw.line((x0, y, x1, y), RULE, scale)
        draw.text((x0 - 10 * scale, y), f"{value:.{_digits(step)}f}", GRAY, font(14 * scale), anchor="rm")
    for step_number in step_ticks(len(losses)):
        x, y = place(step_number - 1, low)
        draw.text((x, y + 10 * scale), str(step_number), GRAY, font(14 * scale), anchor="ma")
    draw.text(at(size[0] - right, size[1] - 14), "step", GRAY, font(14 * scale), anchor="rb")
    marks = [place(step_number - 1, value) for step_number, value in validations]
    draw.line([place(i, v) for i, v in enumerate(losses)], FAINT, scale, joint="curve")
    draw.line([place(i, v) for i, v in enumerate(means)], STRONG, 3 * scale, joint="curve")
    draw.line(marks, MARK, 2 * scale, joint="curve")
    for x, y in marks:
        draw.ellipse((x - 3 * scale, y - 3 * scale, x + 3 * scale, y + 3 * scale), MARK)
    x = size[0] - right
    legend = [(STRONG, f"mean of {window} steps"), (FAINT, "every step")]
    for color, text in [(MARK, "held out"), *legend] if marks else legend:
        draw.text(at(x, 36), text, INK, font(14 * scale), anchor="rm")
        x -= draw.textlength(text, font(14 * scale)) / scale + 12
        draw.line((*at(x - 22, 36), *at(x, 36)), color, 3 * scale)
        x -= 44
    return page.resize(size, Image.Resampling.LANCZOS)


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font, the same on every machine."""
    return ImageFont.load_default(size)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the exponential mean over about `window` values, corrected for its start from zero."""
    decay, total, weight, means = 1 - 1 / window, 0.0, 0.0, []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        means.append(total / weight)
    return means


def axis(low: float, high: float) -> tuple[float, float, float]:
    """Return round ends of an axis that contains `low` and `high`, and a round step: 4 to 8 on the axis."""
    span = max(high - low, 1e-6 * max(1.0, abs(high)))
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * factor for factor in (0.1, 0.2, 0.5, 1.0, 2.0) if span / (power * factor) <= 7)
    bottom, top = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return bottom * step, max(top, bottom + 1) * step, step


def _digits(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def step_ticks(count: int) -> list[int]:
    """Return the numbers under an axis of `count` steps: the first and round ones."""
    _, _, step = axis(0, count)
    return sorted({1, *range(round(step), count + 1, round(step))}) if step >= 1 else sorted({1, count})


def _to_height(image: Image.Image, height: int) -> Image.Image:
    size = (max(1, round(image.width * height / image.height)), height)
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def _wrap(
    text: str, used: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int, *, lines: int
) -> list[str]:
    """Break text into at most `lines` lines of `width` pixels; "..." at the end marks what is left out."""
    broken: list[str] = []
    for word in text.split() or [""]:
        if broken and used.getlength(f"{broken[-1]} {word}") <= width:
            broken[-1] += f" {word}"
        else:
            broken.append(word)
    if len(broken) > lines:
        broken = [*broken[: lines - 1], broken[lines - 1] + " ..."]
    return [_shorten(line, used, width) for line in broken]


def _shorten(line: str, used: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    while len(line) > 4 and used.getlength(line) > width:
        line = line.removesuffix("...").rstrip()[:-1] + "..."
    return line
