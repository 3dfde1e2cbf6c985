"""An opened sample, from a file or from memory: its pixels and mask, and digests of their content.

The one rule: pixels never count as those of another file. As the digest is the key of the result, size and
date are compared with the scan's before a digest is made and after pixels are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL.Image import Image
from torch import Tensor

from .bucket import Size
from .clip import frame_files, frames_of, read_clip_header, read_frames, read_video, stamp
from .image import UprightImage, image_from_array, mask_from_array, read_image, read_mask
from .image_file import BadImage
from .latent_file import read_latents, read_opacity
from .samples import IN_MEMORY, VIDEO, Sample, Source
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
        _require_unchanged(source, sample)
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
    _require_unchanged(source, sample)
    yield from read_frames(path, frames_of(read_clip_header(path), config, sample.start, count))
    _require_unchanged(source, sample)


def open_sound(source: Source, sample: Sample) -> tuple[Tensor, int]:
    """Return the piece of a sound that is a sample, (2, samples) float32, and its rate. Raises as
    `open_clip` does."""
    _require_unchanged(source, sample)
    piece = read_piece(source.path(sample.name), sample.start, source.config.seconds)
    _require_unchanged(source, sample)
    return piece


def open_latents(
    source: Source, sample: Sample, size: Size, shape: tuple[int, ...]
) -> tuple[Tensor, Image | None]:
    """Return a latent file's latents for `size` pixels, `shape` float32, and its mask (mode L), if any.

    That mask covers the crop; a mask of `mask_file` covers the whole image.
    Raises BadImage if they are unusable, or the file has changed since the scan.
    """
    path = source.path(sample.name)
    _require_unchanged(source, sample)
    latents = read_latents(path, size, shape)
    has_mask = sample.has_alpha and source.config.mask.source in _ALPHA
    mask = read_opacity(path, size) if has_mask else None
    _require_unchanged(source, sample)
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
        _require_unchanged(source, sample)
        path = source.path(sample.name)
        image = _folder_content(path, digest) if path.is_dir() else _file_content(path, digest)
        with _naming_mask(sample):
            mask = _file_content(source.path(sample.mask), digest) if sample.mask else b""
    if not mask and sample.has_alpha and source.config.mask.source in _ALPHA:
        mask = image
    return image, mask


def mask_file(source: Source, sample: Sample) -> Image | None:
    """Return the mask file beside an image, in mode L. Raises BadImage if it is unusable."""
    with _naming_mask(sample):
        return read_mask(source.path(sample.mask)) if sample.mask else None


@contextmanager
def _naming_mask(sample: Sample) -> Iterator[None]:
    try:
        yield
    except BadImage as error:
        raise BadImage(f"its mask {sample.mask}: {error}") from error


def _folder_content(folder: Path, digest: Callable[[Path], bytes]) -> bytes:
    """Return the digest of a folder of frames: of their contents in order, not of their names."""
    parts = b"".join(_file_content(file, digest) for file in frame_files(folder))
    return hashlib.blake2b(b"frames" + parts, digest_size=16).digest()


def _file_content(path: Path, digest: Callable[[Path], bytes]) -> bytes:
    try:
        return digest(path)
    except OSError as error:
        raise BadImage(f"disappeared or cannot be read ({error.strerror or error})") from error


def _require_unchanged(source: Source, sample: Sample) -> None:
    try:
        unchanged = stamp(source.path(sample.name)) == (sample.bytes, sample.mtime_ns)
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
