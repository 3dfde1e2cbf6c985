"""Safetensors files: the header is checked before use, and tensors are read and written one at a time.

A file is the length of the header in 8 bytes, the header (JSON: name -> dtype, shape, data_offsets), and the
tensors' bytes without gaps (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import require
from ..user_error import FileError, UserError
from .input_file import parse_json, require_ordinary
from .text import readable
from .whole_file import remove_leftovers, whole_file

LARGEST_HEADER = 100_000_000
"""Bytes: the format's own limit."""


@dataclass(frozen=True)
class Entry:
    """One tensor in the header."""

    format: str
    """Key of FORMATS."""
    shape: tuple[int, ...]
    start: int = 0
    """Byte of the file where the tensor begins."""

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * FORMATS[self.format][0] // 8


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a .safetensors file; each access reads one from disk."""

    def __init__(self, path: Path, *, largest_header: int = LARGEST_HEADER) -> None:
        """Read and check the header.

        Raises UserError naming the file if it cannot be read, is a pickle, or is truncated or damaged.
        """
        self.path = path
        header, body, end = _header(path, largest_header)
        try:
            metadata = header.pop("__metadata__", {})
            is_text = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
            require(is_text, "its metadata is not a mapping of text to text")
            self.metadata: dict[str, str] = metadata
            unprintable = [ascii(name) for name in header if not name.isprintable()]
            require(not unprintable, f"names that cannot be printed, as {', '.join(unprintable[:1])}")
            self.entries = {name: _entry(name, values, body) for name, values in header.items()}
            at = body
            for entry in sorted(self.entries.values(), key=lambda entry: (entry.start, entry.size)):
                require(entry.start == at, "its tensors overlap or leave gaps")
                at += entry.size
            require(at <= end, f"it should be {at} bytes long and has {end}: the file is cut off")
            require(at == end, f"{end - at} bytes belong to no tensor")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{path.name}: the file is damaged ({error}); download it again.") from error

    def __getitem__(self, name: str) -> Tensor:
        return self.read_into(name, bytearray(self.entries[name].size))

    def read_into(self, name: str, buffer: bytearray) -> Tensor:
        """Read a tensor into the beginning of `buffer`, which it shares."""
        entry = self.entries[name]
        dtype = getattr(torch, FORMATS[entry.format][1], None)
        if dtype is None:
            raise UserError(
                f"{self.path.name}: {name}: this PyTorch has no dtype {entry.format}; update it, or use a "
                "file in another dtype."
            )
        data = self._read(entry, buffer)
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, name: str) -> bytearray:
        """Return the bytes of one tensor. Raises UserError if they cannot be read."""
        entry = self.entries[name]
        buffer = bytearray(entry.size)
        self._read(entry, buffer)
        return buffer

    def _read(self, entry: Entry, buffer: bytearray) -> memoryview:
        data = memoryview(buffer)[: entry.size]
        try:
            with self.path.open("rb") as file:
                file.seek(entry.start)
                read = file.readinto(data)
        except OSError as error:
            raise UserError(
                f"{self.path.name}: the file cannot be read ({error.strerror}); close other programs that "
                "use it, or copy it again."
            ) from error
        if read != entry.size:
            raise UserError(f"{self.path.name}: the file was changed while it was read; run this again.")
        return data


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors in memory; see `write_streaming`."""
    entries = {name: Entry(_FORMAT_OF[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_streaming(path, entries, lambda name: as_bytes(tensors[name]), metadata)


def write_streaming(
    path: Path,
    entries: Mapping[str, Entry],
    content: Callable[[str], bytes | bytearray | memoryview],
    metadata: Mapping[str, str],
) -> None:
    """Write a file completely or not at all, with one tensor in memory at a time.

    `content(name)` returns a tensor's bytes and is called once for each of `entries`. The file is written
    under a temporary name beside `path`, flushed and renamed. Raises FileError naming `path` if the folder
    cannot be written to or the disk is full; an existing file is then untouched.
    """
    # The widest dtypes first, which keeps all tensors aligned.
    order = sorted(entries, key=lambda name: (-FORMATS[entries[name].format][0], name))
    notes = {readable(name): readable(value) for name, value in metadata.items()}
    header: dict[str, object] = {"__metadata__": notes} if notes else {}
    at = 0
    for name in order:
        entry = entries[name]
        span = [at, at := at + entry.size]
        header[name] = {"dtype": entry.format, "shape": list(entry.shape), "data_offsets": span}
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, hours=24)
        with whole_file(path) as temporary, temporary.open("xb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in order:
                data = content(name)
                assert len(data) == entries[name].size, (
                    f"{name}: {len(data)} bytes instead of {entries[name]}"
                )
                file.write(data)
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({error.strerror or error}).") from error


def as_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes as in the file."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _header(path: Path, largest: int) -> tuple[dict[str, Any], int, int]:
    """Return the header, the byte where the tensors begin, and the file's size."""
    try:
        require_ordinary(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(9)
            length = int.from_bytes(head[:8], "little")
            if largest < length <= size - 8:
                raise UserError(
                    f"{path.name}: its header takes {length >> 20} MB and should take less than "
                    f"{largest >> 20}; the file is damaged."
                )
            if length > size - 8 or head[8:] != b"{":
                if head.startswith((b"PK", b"\x80")):
                    raise UserError(
                        f"{path.name}: a pickle, which may run code when opened; use a .safetensors file."
                    )
                raise UserError(
                    f"{path.name}: not a safetensors file, or a truncated one; download it again."
                )
            text = head[8:] + file.read(length - 1)
    except OSError as error:
        raise UserError(f"{path.name}: the file cannot be read ({error.strerror or error}).") from error
    try:
        header = parse_json(text)
    except UserError as error:
        raise UserError(f"{path.name}: the file is damaged ({error}); download it again.") from error
    return header, 8 + length, size


def _entry(name: str, values: Mapping[str, Any], body: int) -> Entry:
    shape, span = values["shape"], values["data_offsets"]
    require(values["dtype"] in FORMATS, f"{name}: unknown dtype {values['dtype']!r}")
    require(
        isinstance(shape, list) and all(type(side) is int and side >= 0 for side in shape), f"{name}: shape"
    )
    require(
        isinstance(span, list) and len(span) == 2 and all(type(end) is int and end >= 0 for end in span),
        f"{name}: offsets",
    )
    entry = Entry(str(values["dtype"]), tuple(shape), body + span[0])
    require(entry.size == span[1] - span[0], f"{name}: {span[1] - span[0]} bytes for shape {shape}")
    return entry


FORMATS: Mapping[str, tuple[int, str]] = {
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
    "C64": (64, "complex64"),
    "F32": (32, "float32"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "I8": (8, "int8"),
    "U8": (8, "uint8"),
    "BOOL": (8, "bool"),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "F4": (4, ""),
}
"""Dtype in the format -> (bits, PyTorch's name for it)."""

_FORMAT_OF = {
    getattr(torch, name): key for key, (_, name) in FORMATS.items() if name and hasattr(torch, name)
}
