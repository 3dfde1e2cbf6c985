"""Latents cached by kohya's sd-scripts, used in place of a missing image: name.npz, or, in newer versions,
name_1024x0768_sdxl.npz with the size of the image.

The one rule: if a file's numbers cannot be converted to the VAE's own latents, it is a BadImage with a
reason.

The crop in such a file is unreliable: `crop_ltrb` follows from the two aspect ratios alone, and is on the
side that was not cut. But sd-scripts always caches the center of an image resized to cover its bucket, which
is our center crop (`bucket.crop_box`). With bucket_no_upscale, up to one more bucket step is cut off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from ..family import latent_scales
from ..files.input_file import require_ordinary
from .bucket import Size
from .image import mask_from_array
from .image_file import BadImage, Header, require_size

CELL = 8
"""Pixels per latent cell, along one side, for every VAE whose latents sd-scripts caches."""
_EXTENSION = ".npz"
_TEXT_ENDINGS = ("_te", "_te_outputs")
"""Endings of the names of cached text encodings."""
_NAME = re.compile(r"(.+)_\d{4,}x\d{4,}_([a-z0-9]+)")
_REMEDY = "put the image itself beside it, to be encoded again, or remove the file"


def is_latent_file(file: str) -> bool:
    """Return whether a file's name is that of latents and not of text encodings."""
    path = PurePosixPath(file)
    return path.suffix.lower() == _EXTENSION and not path.stem.endswith(_TEXT_ENDINGS)


def stem_of(file: str) -> str:
    """Return the name of an image or latent file without extension and size, as its caption has it."""
    match = _match(file)
    return match[1] if match else PurePosixPath(file).stem


def architecture_of(file: str) -> str:
    """Return the model that the latents are for; "" if the file's name does not say."""
    match = _match(file)
    return match[2] if match else ""


def read_latent_header(path: Path) -> Header:
    """Return the header of a latent file, without reading the latents. Raises BadImage if it is unusable."""
    if (architecture := architecture_of(path.name)) not in latent_scales():
        raise BadImage(f"the scale of latents for {architecture!r} is unknown; {_REMEDY}")
    with _open_archive(path) as archive:
        sizes = _sizes(archive)
        if not sizes:
            raise BadImage(f"has no 'latents', but {', '.join(_keys(archive)) or 'nothing'}; {_REMEDY}")
        for size in sizes:
            require_size(*size)
        width, height = _original_size(archive, next(iter(sizes.values())))
        require_size(width, height)
        has_alpha = all(f"alpha_mask{suffix}" in _keys(archive) for suffix in sizes.values())
    return Header(width, height, has_alpha, tuple(sizes))


def read_latents(path: Path, size: Size, shape: tuple[int, ...]) -> Tensor:
    """Return the latents of an image of `size` pixels as the VAE makes them, `shape` float32.

    Raises BadImage if they are missing, not finite or of another shape.
    """
    scale, shift = latent_scales()[architecture_of(path.name)]
    with _open_archive(path) as archive:
        key = f"latents{_sizes(archive)[size]}"
        stored, _ = _kind(archive, key)
        if stored != shape:
            raise BadImage(f"its latents are {stored}, but this VAE makes {shape} at that size; {_REMEDY}")
        return torch.from_numpy(_read(archive, key)) / scale + shift


def read_opacity(path: Path, size: Size) -> Image:
    """Return the opacity mask for the latents of `size` pixels, mode L, opaque is white.

    Raises BadImage if it is unusable.
    """
    with _open_archive(path) as archive:
        key = f"alpha_mask{_sizes(archive)[size]}"
        shape, dtype = _kind(archive, key)
        if len(shape) != 2 or dtype.kind != "f":
            raise BadImage(f"its {key} is {shape} of {dtype}, not (height, width) floats; {_REMEDY}")
        require_size(shape[1], shape[0])
        return mask_from_array(_read(archive, key))


def _match(file: str) -> re.Match[str] | None:
    return _NAME.fullmatch(PurePosixPath(file).stem) if is_latent_file(file) else None


@contextmanager
def _open_archive(path: Path) -> Iterator[ZipFile]:
    """Yield the opened file, and turn every error while it is read into BadImage."""
    try:
        require_ordinary(path)
        with ZipFile(path) as archive:
            yield archive
    except BadImage:
        raise
    except OSError as error:
        raise BadImage(f"disappeared or cannot be read ({error.strerror or error})") from error
    except Exception as error:  # zipfile, zlib and numpy raise nearly anything on damaged files
        raise BadImage(f"damaged, or no .npz file ({error}); {_REMEDY}") from error


def _keys(archive: ZipFile) -> list[str]:
    return sorted(name.removesuffix(".npy") for name in archive.namelist())


def _sizes(archive: ZipFile) -> dict[Size, str]:
    """Return image size in pixels -> the ending of its keys.

    Newer files may have an image in several sizes, under keys such as latents_96x128 (height, width).
    """
    sizes = {}
    for match in (re.fullmatch(r"latents((?:_\d+x\d+)?)", key) for key in _keys(archive)):
        if match:
            shape, dtype = _kind(archive, match[0])
            if len(shape) not in (3, 4) or dtype.kind != "f":
                raise BadImage(f"its {match[0]} are {shape} of {dtype}, not (C, h, w) floats; {_REMEDY}")
            sizes[shape[-1] * CELL, shape[-2] * CELL] = match[1]
    return sizes


def _original_size(archive: ZipFile, suffix: str) -> Size:
    key = f"original_size{suffix}"
    if key not in _keys(archive):
        raise BadImage(f"does not say the size of its image ('{key}' is missing); {_REMEDY}")
    shape, dtype = _kind(archive, key)
    if shape != (2,) or dtype.kind not in "iuf":
        raise BadImage(f"its {key} are {shape} of {dtype}, not width and height; {_REMEDY}")
    width, height = _read(archive, key).tolist()
    return int(width), int(height)


def _kind(archive: ZipFile, key: str) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Return an array's shape and type from its header."""
    with archive.open(f"{key}.npy") as file:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
        return shape, dtype


def _read(archive: ZipFile, key: str) -> NDArray[np.float32]:
    """Return an array of numbers as float32. Raises BadImage if they are not finite."""
    with archive.open(f"{key}.npy") as file:
        values: NDArray[np.float32] = npy.read_array(file, allow_pickle=False).astype(np.float32)
    if not np.isfinite(values).all():
        raise BadImage(f"NaN or infinite values in its {key}; {_REMEDY}")
    return values
