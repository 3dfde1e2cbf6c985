"""A preview of a dataset: a sheet of images with crop, bucket and caption as trained."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from ..model import OnProgress, no_progress
from ..user_error import UserError
from .augment import View, views_for
from .bucket import Size
from .caption import variations
from .hashes import file_digest
from .image import UprightImage, image_from_array
from .open_sample import content_of, mask_file, open_clip, open_references, open_sample
from .read_ahead import load_ahead
from .samples import ImageSet, Sample, Source

_PAPER, _INK, _FRAME = (24, 24, 24), (230, 230, 230), (255, 176, 0)
_MARGIN, _LINE, _LINES = 8, 15, 6
FRAMES = 4
"""Most frames shown of a clip."""


def preview(
    images: ImageSet,
    *,
    step: int,
    count: int = 16,
    columns: int = 4,
    cell: int = 320,
    on_progress: OnProgress = no_progress,
) -> Tensor:
    """Draw images spread evenly over the set; areas outside the crop or the mask are darkened. References
    are at the left of their image.

    `step` is the encoder's `bucket_step`, `cell` the width of an image in pixels. Below each image: its
    bucket, the share cut off, enlarging, and the first caption as trained. Returns (1, H, W, 3) float32 in
    0..1. `on_progress` may raise to cancel.
    """
    chosen = np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int)).tolist()
    cells = list(
        load_ahead(
            lambda index: _cell(images, images.samples[index], step, cell),
            chosen,
            lambda done: on_progress(done, len(chosen), "Drawing"),
        )
    )
    return _arrange(cells, columns)


def draw_sheet(
    images: ImageSet,
    lines: Mapping[int, Sequence[str]],
    *,
    columns: int = 4,
    cell: int = 200,
    on_progress: OnProgress = no_progress,
) -> Tensor:
    """Draw images with lines of text below each: {position in the set: lines}, in that order.

    Returns (1, H, W, 3) float32 in 0..1. `on_progress` may raise to cancel.
    """

    def draw(position: int) -> Image.Image:
        drawn = Image.new("RGB", (cell + 2 * _MARGIN, cell + 3 * _MARGIN + _LINE * _LINES), _PAPER)
        sample = images.samples[position]
        shown = list(lines[position])
        try:
            [upright, *_], _ = _drawable(images.source(sample), sample)
            scale = cell / max(upright.size)
            size = (max(1, round(upright.size[0] * scale)), max(1, round(upright.size[1] * scale)))
            pixels = upright.crop((0, 0, *upright.size), size)
            place = (_MARGIN + (cell - size[0]) // 2, _MARGIN + (cell - size[1]) // 2)
            drawn.paste(Image.fromarray((pixels * 255).astype(np.uint8)), place)
        except UserError as error:  # the file changed meanwhile
            shown.append(f"cannot be shown: {error}")
        _write(drawn, shown, cell)
        return drawn

    def report(done: int) -> None:
        on_progress(done, len(lines), "Drawing")

    return _arrange(list(load_ahead(draw, list(lines), report)), columns)


def _arrange(cells: Sequence[Image.Image], columns: int) -> Tensor:
    """Return images of equal size as one, (1, H, W, 3) float32 in 0..1."""
    columns = min(columns, len(cells))
    rows = -(-len(cells) // columns)
    width, height = cells[0].size
    grid = Image.new("RGB", (columns * width, rows * height), _PAPER)
    for place, drawn in enumerate(cells):
        grid.paste(drawn, (place % columns * width, place // columns * height))
    return torch.from_numpy(np.asarray(grid).astype(np.float32) / 255)[None]


def _cell(images: ImageSet, sample: Sample, step: int, cell: int) -> Image.Image:
    """Return one image with its crop above its text."""
    source = images.source(sample)
    length = f"{source.config.seconds:g} seconds of sound from {sample.start / 1000:g}"
    drawn = Image.new("RGB", (cell + 2 * _MARGIN, cell + 3 * _MARGIN + _LINE * _LINES), _PAPER)
    text = variations(sample.captions, source.config)[0] or "(empty caption)"
    if sample.is_sound:
        _write(drawn, [sample.name, length, text], cell)
        return drawn
    try:
        content, _ = content_of(source, sample, file_digest)
        whole = (sample.width, sample.height)
        buckets = views_for(*whole, content[:8].hex(), source.config, step=step, encoded=sample.encoded)
        frames, mask = _drawable(source, sample)
        references = [
            Image.fromarray((image[0].numpy() * 255).astype(np.uint8))
            for image in open_references(source, sample, step)
        ]
    except UserError as error:  # BadImage, or no bucket for this size
        _write(drawn, [sample.name, f"cannot be used: {error}"], cell)
        return drawn
    views = [bucket[0] for bucket in buckets]
    share = cell // (1 + len(references))
    for place, reference in enumerate(references):
        reference = ImageOps.contain(reference, (share - _MARGIN, share - _MARGIN))
        drawn.paste(reference, (_MARGIN + place * share, _MARGIN + (cell - reference.height) // 2))
    across = 1 if len(frames) == 1 else 2
    tile = share // across
    scale = tile / max(sample.width, sample.height)
    size = (max(1, round(sample.width * scale)), max(1, round(sample.height * scale)))
    for place, frame in enumerate(frames):
        image = _with_crop(_masked(frame, mask, size), views[-1], scale)
        left = cell - share + place % across * tile + (tile - size[0]) // 2
        top = (cell - across * tile) // 2 + place // across * tile + (tile - size[1]) // 2
        drawn.paste(image, (_MARGIN + left, _MARGIN + top))
    name = " + ".join([*(ref.name for ref in sample.references if source.references), _title(sample)])
    _write(drawn, [name, *(_fit(view, sample) for view in views[-2:]), text], cell)
    return drawn


def _title(sample: Sample) -> str:
    """Return a sample's name and what it is, if it is not an image."""
    clip = f" ({sample.frames} frames from {sample.start})" if sample.frames else ""
    return sample.name + (" (latents, no image)" if sample.encoded else clip)


def _masked(frame: UprightImage, mask: Image.Image | None, size: Size) -> Image.Image:
    """Return an image of `size`, darker where its mask is black."""
    pixels = frame.crop((0, 0, *frame.size), size)
    if mask is not None:
        weights = np.asarray(mask.resize(size), np.float32)[:, :, None] / np.float32(255)
        pixels = pixels * (np.float32(0.35) + np.float32(0.65) * weights)
    return Image.fromarray((pixels * 255).astype(np.uint8))


def _drawable(source: Source, sample: Sample) -> tuple[list[UprightImage], Image.Image | None]:
    """Return an image's pixels and mask; some frames of a clip; a single gray pixel for a latent file or
    latents from the graph.
    """
    if source.is_encoded:
        return [image_from_array(np.full((1, 1, 3), 0.5, np.float32))], None
    if sample.frames:
        shown = {round(place * (sample.frames - 1) / (FRAMES - 1)) for place in range(FRAMES)}
        frames = enumerate(open_clip(source, sample, sample.frames))
        mask = mask_file(source, sample) if source.root else None
        return [frame for index, frame in frames if index in shown], mask
    if not sample.encoded:
        image, mask = open_sample(source, sample)
        return [image], mask
    return [image_from_array(np.full((1, 1, 3), 0.5, np.float32))], mask_file(source, sample)


def _with_crop(image: Image.Image, view: View, scale: float) -> Image.Image:
    """Return the image with everything outside the crop darkened and a frame around the crop."""
    left, top, right, bottom = (round(side * scale) for side in view.crop.box)
    box = (left, top, max(right, left + 1), max(bottom, top + 1))
    shown = image.point(lambda value: value // 3)
    shown.paste(image.crop(box), box[:2])
    ImageDraw.Draw(shown).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), outline=_FRAME, width=2)
    return shown


def _fit(view: View, sample: Sample) -> str:
    width, height = view.crop.bucket
    cut = view.crop.cut_off(sample.width, sample.height)
    enlarged = f", enlarged {view.crop.scale:.2f} x" if view.crop.scale > 1 else ""
    return f"{sample.width} x {sample.height} -> {width} x {height}, {cut:.0%} cut off{enlarged}"


def _write(drawn: Image.Image, lines: Sequence[str], cell: int) -> None:
    pen, font = ImageDraw.Draw(drawn), ImageFont.load_default()
    wrapped = [part for line in lines for part in textwrap.wrap(line, cell // 6) or [""]]
    if len(wrapped) > _LINES:
        wrapped = [*wrapped[: _LINES - 1], wrapped[_LINES - 1][: cell // 6 - 3] + "..."]
    for index, line in enumerate(wrapped):
        place = (_MARGIN, cell + 2 * _MARGIN + index * _LINE)
        try:
            pen.text(place, line, fill=_INK, font=font)
        except UnicodeEncodeError:  # Pillow without FreeType draws Latin letters only
            pen.text(place, line.encode("latin-1", "replace").decode("latin-1"), fill=_INK, font=font)
