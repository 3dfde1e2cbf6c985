"""Summaries of a dataset for people: images, buckets, repeats, and what is cut off or left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bad_files import Skipped, grouped
from .batch import EncodedDataset
from .bucket import Bucket
from .caption import finish
from .config import FROM_FOLDER, FROM_GRAPH, dataset_notes
from .samples import ImageSet


def summary(images: ImageSet) -> str:
    """Return a text about the result of a scan.

    Images and repeats per folder, missing captions, settings without effect, other files, folders not read,
    and every file left out.
    """
    table = images.samples
    bare: Counter[int] = Counter()
    encoded: Counter[int] = Counter()
    clips: Counter[int] = Counter()
    sounds: Counter[int] = Counter()
    pairs: Counter[int] = Counter()
    for sample in table:
        bare[sample.source] += not any(sample.captions)
        encoded[sample.source] += bool(sample.encoded)
        clips[sample.source] += bool(sample.frames)
        sounds[sample.source] += sample.is_sound
        pairs[sample.source] += bool(sample.references)
    lines = []
    for place, source in enumerate(images.sources):
        repeats = table.column("repeats")[table.column("source") == place]
        kind = " for regularisation" if source.config.regularisation else ""
        lines.append(
            f"Folder {source.title}: {_counted(len(repeats), clips[place], sounds[place])}{kind}, "
            f"each {_span(repeats)} times, "
            f"loss weight {source.config.weight:g}"
        )
        if encoded[place]:
            lines.append(f"Latents (.npz) in place of the image: {encoded[place]}")
        if pairs[place]:
            lines.append(f"With reference images: {pairs[place]}")
        if bare[place]:
            text = finish("", source.config)
            shown = f'"{text}" alone' if text else "an empty one"
            lines.append(f"Without a caption: {bare[place]}, trained with {shown}")
        origin = FROM_FOLDER if source.root else FROM_GRAPH
        lines += dataset_notes(source.config, origin, has_references=bool(pairs[place]))
    if images.ignored:
        others = ", ".join(
            f"{count} {extension or 'without extension'}" for extension, count in images.ignored
        )
        lines.append(f"Not images: {others}")
    if images.unread:
        lines.append(f"Subfolders that are not read ('recursive' is off): {images.unread}")
    if images.left_out:
        names = ", ".join(images.left_out[:5]) + (", ..." if len(images.left_out) > 5 else "")
        lines.append(f"Left out by 'leave out': {len(images.left_out)} ({names})")
    return "\n".join([*lines, *_skipped(images.skipped)])


def report(dataset: EncodedDataset, *, batch_size: int = 1) -> str:
    """Return a text about the training data: images, buckets, steps per epoch, cropping, files left out."""
    index, entries = dataset.index, dataset.entries
    samples = np.unique(index.sample[entries])
    texts = int((index.text_start[samples + 1] - index.text_start[samples]).sum())
    table = dataset.images.samples
    clips = int((table.column("frames")[samples] > 0).sum())
    counted = _counted(len(samples), clips, int((table.column("height")[samples] == 0).sum()))
    lines = [
        f"{counted} with {texts} captions; an epoch has {dataset.visits} showings "
        f"in {dataset.steps_per_epoch(batch_size)} steps of {batch_size}"
    ]
    for place, source in enumerate(dataset.images.sources):
        chosen = entries[index.source[index.sample[entries]] == place]
        if dataset.images.pairs and not len(chosen):
            lines.append(f"Folder {source.title}: the other ends, at strength -1")
            continue
        share = index.repeats[chosen].sum() / max(index.repeats[entries].sum(), 1)
        kind = " (regularisation)" if source.config.regularisation else ""
        lines.append(
            f"Folder {source.title}{kind}: {len(np.unique(index.sample[chosen]))} images, "
            f"each {_span(index.repeats[chosen])} times, {share:.0%} of an epoch, "
            f"loss weight {source.config.weight:g}"
        )
    for place, size in sorted(enumerate(index.buckets), key=lambda item: item[1]):
        count = int((index.bucket[entries] == place).sum())
        if count:
            visits = int(dataset.order.visits[place])
            steps = -(-visits // batch_size)
            content = _of_bucket(size, count, not dataset.has_pixels)
            lines.append(f"Bucket {content}, {visits} showings in {steps} steps")
    has_pixels = dataset.has_pixels and all(len(size) > 1 for size in index.buckets)
    lines += [*_frame_lines(dataset), *_crop_lines(dataset)] if has_pixels else []
    return "\n".join([*lines, *_skipped(dataset.skipped)])


def _of_bucket(size: Bucket, count: int, is_encoded: bool) -> str:
    """Return for instance "832 x 480 x 33 frames: 12 clips"."""
    if is_encoded:
        return f"{' x '.join(map(str, size))} cells: {count} images"
    if len(size) == 1:
        return f"{size[0] / 1000:g} seconds: {count} sounds"
    frames, kind = (" frames", "clips") if size[2:] else ("", "images")
    return f"{' x '.join(map(str, size))}{frames}: {count} {kind}"


def _frame_lines(dataset: EncodedDataset) -> list[str]:
    """Return a line for each source whose frames the VAE does not take as they are."""
    index, lines = dataset.index, []
    for place, source in enumerate(dataset.images.sources):
        of_source = index.source[index.sample[dataset.entries]] == place
        buckets = {index.buckets[i] for i in index.bucket[dataset.entries[of_source]].tolist()}
        trained = {bucket[2] for bucket in buckets if len(bucket) > 2} - {source.config.frames}
        lines += [
            f"frames {source.config.frames}: the VAE takes {frames} of them at once, and so many are trained"
            for frames in trained
        ]
    return lines


def _crop_lines(dataset: EncodedDataset) -> list[str]:
    """Return lines on how much is cut off and how many images are enlarged."""
    index, entries = dataset.index, dataset.entries
    sizes = index.sizes[index.sample[entries]].astype(np.float64)
    buckets = np.array([bucket[:2] for bucket in index.buckets], np.float64)[index.bucket[entries]]
    scales = (buckets / sizes).max(axis=1)
    cut = 1 - (buckets / scales[:, None] / sizes).prod(axis=1)
    worst = _name(dataset, int(cut.argmax()))
    lines = [f"Cropping cuts off {cut.mean():.1%} on average, at most {cut.max():.1%} ({worst})"]
    if enlarged := int((scales > 1).sum()):
        worst = _name(dataset, int(scales.argmax()))
        lines.append(f"Enlarged: {enlarged} images, at most {scales.max():.2f} times ({worst})")
    return lines


def _name(dataset: EncodedDataset, position: int) -> str:
    return dataset.images.samples.names[int(dataset.index.sample[dataset.entries[position]])]


def _skipped(skipped: Sequence[Skipped]) -> list[str]:
    return [f"Left out: {len(skipped)}"] * bool(skipped) + grouped(skipped)


def _counted(samples: int, clips: int, sounds: int) -> str:
    """Return for instance "3 images and 2 clips"."""
    counts = {"images": samples - clips - sounds, "clips": clips, "sounds": sounds}
    parts = [f"{count} {kind}" for kind, count in counts.items() if count]
    return " and ".join(parts) or "0 images"


def _span(values: NDArray[Any]) -> str:
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    return str(low) if low == high else f"{low} to {high}"
