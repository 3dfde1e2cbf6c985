"""The grid holds every picture where its prompt and row meet; the plot shows every kind of loss."""

from __future__ import annotations

import pytest
from PIL import Image, ImageChops

from graft.training.run.plots import (
    FAINT,
    MARK,
    PAPER,
    RULE,
    STRONG,
    Column,
    axis,
    loss_plot,
    sample_grid,
    smooth,
    step_ticks,
)

TEXT = {"title": "my_lora", "subtitle": "600 steps"}


def colors(image):
    return {color for _, color in image.getcolors(1 << 24)}


def shows(page, wanted):
    """Whether a color is there, give or take what resampling does to a thin line."""
    return any(max(abs(a - b) for a, b in zip(wanted, found, strict=True)) <= 12 for found in colors(page))


def test_every_picture_is_on_the_grid_at_one_height():
    made = [Image.new("RGB", (64, 32 * (n + 1)), (n + 1, 200, 10)) for n in range(4)]
    columns = [Column("a prompt that is long", "", made[:2]), Column("another", "note", made[2:])]
    page = sample_grid(columns, ["step 1\nstrength 1", "step 2\nstrength 1"], height=48, **TEXT)
    found = {color: count for count, color in page.getcolors(1 << 24)}
    for n, image in enumerate(made):
        width = round(48 * image.width / image.height)
        assert found[n + 1, 200, 10] == 48 * width, "no picture lies on another"


def test_every_text_is_on_the_grid_and_that_of_a_row_beside_its_picture():
    def draw(name="", note="", prompt="", under="", **texts):
        images = [Image.new("RGB", (64, 64), (9, 200, 10))] * 3
        rows = ["", "", f"{name}\n{note}"]
        return sample_grid(
            [Column(prompt, under, images)], rows, height=64, **{"title": "", "subtitle": ""} | texts
        )

    def difference(**texts):
        return ImageChops.difference(draw(**texts), draw()).getbbox()

    for text in ("title", "subtitle", "prompt", "under"):
        assert difference(**{text: "word"}), text
    for text in ("prompt", "under"):
        assert difference(**{text: "word"})[3] <= draw().height - 28 - 3 * 64 - 2 * 10, "above the pictures"
    right = [x for x in range(draw().width) if draw().getpixel((x, draw().height - 60)) == (9, 200, 10)]
    name, note = (difference(**{text: "word"}) for text in ("name", "note"))
    assert name[3] <= note[1], "the name stands above the note"
    for _, y0, x1, y1 in (name, note):
        assert x1 < right[0] and draw().height - 28 - 64 <= y0 and y1 <= draw().height - 28


def test_a_picture_of_a_pixel_by_a_thousand_stays_one_wide():
    page = sample_grid(
        [Column("", "", [Image.new("RGB", (1, 1000), (9, 200, 10))])], ["step 1"], height=48, **TEXT
    )
    assert (9, 200, 10) in colors(page)


@pytest.mark.parametrize(
    ("count", "ticks"),
    [
        (1, [1]),
        (7, [*range(1, 8)]),
        (71, [1, 20, 40, 60]),
        (100, [1, 20, 40, 60, 80, 100]),
        (130, [1, 20, 40, 60, 80, 100, 120]),
    ],
)
def test_the_first_and_round_steps_are_numbered(count, ticks):
    assert step_ticks(count) == ticks


@pytest.mark.parametrize("losses", [[0.5], [0.5, 0.5], [1.0 / (n + 1) for n in range(600)], [0.0] * 9])
def test_a_run_of_any_length_is_plotted(losses):
    page = loss_plot(losses, **TEXT)
    assert shows(page, STRONG) and shows(page, FAINT)


def rows_of(page, wanted, least):
    """The rows of the plot in which a color has so many pixels."""
    pixels = page.load()
    rows = ([pixels[x, y] for x in range(page.width)] for y in range(100, page.height))
    near = [sum(max(abs(a - b) for a, b in zip(wanted, p)) <= 24 for p in row) for row in rows]
    return [y for y, count in enumerate(near, 100) if count >= least]


def test_one_great_loss_does_not_flatten_the_others():
    losses = [0.2 if n // 50 % 2 else 0.8 for n in range(600)]
    losses[300] = 1e6
    rows = rows_of(loss_plot(losses, **TEXT), FAINT, 100)
    assert max(rows) - min(rows) > 200


def test_every_number_of_the_axis_has_a_line():
    assert len(rows_of(loss_plot([0.5, 1.0, 0.7, 0.0], **TEXT), RULE, 700)) in range(4, 19)


def test_the_legend_shows_the_color_of_each_line():
    page = loss_plot([1.0 / (n + 1) for n in range(50)], validations=[(50, 0.4)], **TEXT)
    legend = page.crop((0, 20, page.width, 52))
    assert all(shows(legend, color) for color in (STRONG, FAINT, MARK))
    assert colors(legend.crop((page.width - 24, 0, page.width, 32))) == {PAPER}, "the margin"


def test_held_out_losses_are_drawn_where_there_are_any():
    losses = [1.0 / (n + 1) for n in range(100)]
    assert shows(loss_plot(losses, validations=[(50, 0.4), (100, 2.0)], **TEXT), MARK)
    assert shows(loss_plot(losses, validations=[(50, 0.4)], **TEXT), MARK)
    assert not shows(loss_plot(losses, **TEXT), MARK)


def test_the_mean_has_no_lag_and_the_axis_round_ends():
    assert smooth([2.0, 2.0, 2.0], 10) == pytest.approx([2.0] * 3)
    low, high, step = axis(0.31, 0.88)
    assert low <= 0.31 and high >= 0.88 and (high - low) / step == pytest.approx(round((high - low) / step))
