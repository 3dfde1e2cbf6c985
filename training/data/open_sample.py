"""An opened sample, from a file or from memory: its pixels and mask, and digests of their content.

The one rule: pixels never count as those of another file. As the digest is the key of the result, size and
date are compared with the scan's before a digest is made and after pixels are read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor

from .bucket import Crop, Size, buckets_for, crop_box
from .clip import frame_files, frames_of, read_clip_header, read_frames, read_video, stamp
from .config import BucketConfig, DatasetConfig
from .image import UprightImage, image_from_array, mask_from_array, read_image, read_mask
from .image_file import BadImage
from .latent_file import read_latents, read_opacity
from .samples import IN_MEMORY, VIDEO, Reference, Sample, Source
from .sound import read_piece

_ALPHA = ("alpha", "auto")


def open_sample(source: Source, sample: Sample) -> tuple[UprightImage, Image | None]:
    """Return an image's pixels and its mask (mode L), if it has one.

    Raises BadImage if either is unusable, or the file has changed since the scan.
    """
    background, mask = source.config.background, None
    if source.root is None:
        index = _index_of(sample)
        image = image_from_array(source.pixels[index].numpy(), background=background)
        mask = mask_from_array(source.masks[index].numpy()) if source.masks else None
    else:
        image = read_image(source.path(sample.name), background=background)
        mask = mask_file(source, sample)
        require_unchanged(source.path(sample.name), sample)
    if mask is None and source.config.mask.source in _ALPHA:
        mask = image.alpha
    return image, mask


def open_clip(source: Source, sample: Sample, count: int) -> Iterator[UprightImage]:
    """Yield `count` frames of a clip, upright.

    Raises BadImage if they are unusable, or the file has changed since the scan.
    """
    config = source.config
    if source.root is None:
        header, images = read_video(source.videos[_index_of(sample)])
        for index in frames_of(header, config, sample.start, count):
            yield image_from_array(images[index].numpy())
        return
    path = source.path(sample.name)
    require_unchanged(source.path(sample.name), sample)
    yield from read_frames(path, frames_of(read_clip_header(path), config, sample.start, count))
    require_unchanged(source.path(sample.name), sample)


def open_sound(source: Source, sample: Sample) -> tuple[Tensor, int]:
    """Return the piece of a sound that is a sample, (2, samples) float32, and its rate. Raises as
    `open_clip` does."""
    require_unchanged(source.path(sample.name), sample)
    piece = read_piece(source.path(sample.name), sample.start, source.config.seconds)
    require_unchanged(source.path(sample.name), sample)
    return piece


def open_latents(
    source: Source, sample: Sample, size: Size, shape: tuple[int, ...]
) -> tuple[Tensor, Image | None]:
    """Return a latent file's latents for `size` pixels, `shape` float32, and its mask (mode L), if any.

    That mask covers the crop; a mask of `mask_file` covers the whole image.
    Raises BadImage if they are unusable, or the file has changed since the scan.
    """
    path = source.path(sample.name)
    require_unchanged(source.path(sample.name), sample)
    latents = read_latents(path, size, shape)
    has_mask = sample.has_alpha and source.config.mask.source in _ALPHA
    mask = read_opacity(path, size) if has_mask else None
    require_unchanged(source.path(sample.name), sample)
    return latents, mask


def content_of(source: Source, sample: Sample, digest: Callable[[Path], bytes]) -> tuple[bytes, bytes]:
    """Return 16-byte digests of the content of an image and of its mask; the latter is empty without a mask.

    `digest` is for files. Raises BadImage if a file is gone, unreadable or changed since the scan.
    """
    if source.root is None and sample.frames:
        image, mask = _digest(read_video(source.videos[_index_of(sample)])[1]), b""
    elif source.root is None:
        index = _index_of(sample)
        image = _digest(source.pixels[index])
        mask = _digest(source.masks[index]) if source.masks else b""
    else:
        require_unchanged(source.path(sample.name), sample)
        path = source.path(sample.name)
        image = _folder_content(path, digest) if path.is_dir() else _file_content(path, digest)
        with _naming(f"mask {sample.mask}"):
            mask = _file_content(source.path(sample.mask), digest) if sample.mask else b""
    if not mask and sample.has_alpha and source.config.mask.source in _ALPHA:
        mask = image
    return image, mask


def open_references(source: Source, sample: Sample, step: int) -> list[Tensor]:
    """Return the references of a sample as they are trained, each (1, H, W, 3) float32 in 0..1.

    Raises UserError naming one that is unusable, or has changed since the scan.
    """
    images = []
    for index, reference in enumerate(sample.references):
        with _naming(f"reference {reference.name}"):
            if source.reference_pixels:
                pixels = source.reference_pixels[int(reference.name)]
                image = image_from_array(pixels.numpy(), background=source.config.background)
            else:
                path = source.references[index] / reference.name
                image = read_image(path, background=source.config.background)
                require_unchanged(path, reference)
        crop = reference_crop(reference, source.config, step)
        images.append(torch.from_numpy(image.crop(crop.box, crop.bucket))[None])
    return images


def reference_contents(
    source: Source, sample: Sample, digest: Callable[[Path], bytes], step: int
) -> list[tuple[object, ...]]:
    """Return for each reference what decides its pixels: content, crop and background. Raises as above."""
    parts: list[tuple[object, ...]] = []
    for index, reference in enumerate(sample.references):
        if source.reference_pixels:
            content = _digest(source.reference_pixels[int(reference.name)])
        else:
            with _naming(f"reference {reference.name}"):
                path = source.references[index] / reference.name
                require_unchanged(path, reference)
                content = _file_content(path, digest)
        crop = reference_crop(reference, source.config, step)
        box = tuple(round(side, 3) for side in crop.box)
        paper = source.config.background.lower() if reference.has_alpha else ""
        parts.append((content.hex(), crop.bucket, box, paper))
    return parts


def reference_crop(reference: Reference, config: DatasetConfig, step: int) -> Crop:
    """Return the crop of a reference: the whole image, at the largest resolution of its dataset.

    So a reference of the size of its image has the pixels of its image.
    """
    size = (reference.width, reference.height)
    bucket = buckets_for(*size, config.bucket, step=step)[-1]
    return Crop(bucket, crop_box(*size, bucket))


def fit_image(image: Tensor, size: Size, step: int) -> Tensor:
    """Return an image (1, H, W, 3 or 4) at its own aspect ratio with about as many pixels as `size`, sides
    multiples of `step`: as a reference is trained at that resolution."""
    pixels = image[0].to("cpu", torch.float32)
    height, width = pixels.shape[:2]
    config = BucketConfig(resolutions=(max(8, round(math.sqrt(size[0] * size[1]))),))
    (bucket,) = buckets_for(width, height, config, step=step)
    upright = image_from_array(pixels.numpy())
    return torch.from_numpy(upright.crop(crop_box(width, height, bucket), bucket))[None]


def mask_file(source: Source, sample: Sample) -> Image | None:
    """Return the mask file beside an image, in mode L. Raises BadImage if it is unusable."""
    with _naming(f"mask {sample.mask}"):
        return read_mask(source.path(sample.mask)) if sample.mask else None


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except BadImage as error:
        raise BadImage(f"its {what}: {error}") from error


def _folder_content(folder: Path, digest: Callable[[Path], bytes]) -> bytes:
    """Return the digest of a folder of frames: of their contents in order, not of their names."""
    parts = b"".join(_file_content(file, digest) for file in frame_files(folder))
    return hashlib.blake2b(b"frames" + parts, digest_size=16).digest()


def _file_content(path: Path, digest: Callable[[Path], bytes]) -> bytes:
    try:
        return digest(path)
    except OSError as error:
        raise BadImage(f"disappeared or cannot be read ({error.strerror or error})") from error


def require_unchanged(path: Path, known: Sample | Reference) -> None:
    """Raise BadImage if a file is gone or is another one than at the scan."""
    try:
        unchanged = stamp(path) == (known.bytes, known.mtime_ns)
    except OSError as error:
        raise BadImage(f"disappeared or cannot be read ({error.strerror or error})") from error
    if not unchanged:
        raise BadImage("changed after the folder was read; queue again")


def _index_of(sample: Sample) -> int:
    return int(sample.name.removeprefix(IN_MEMORY).removeprefix(VIDEO))


def _digest(tensor: Tensor) -> bytes:
    state = hashlib.blake2b(repr((tuple(tensor.shape), str(tensor.dtype))).encode(), digest_size=16)
    state.update(tensor.contiguous().numpy().data)
    return state.digest()
