"""Damaged, false or hostile LoRAs and checkpoints.

One of MALFORMED must be refused by whatever reads it. One of UNUSABLE is a sound file, but must not be
merged into a model. Of ODD something can be made.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LAYER = "lora_unet_joint_blocks_0_x_block_attn_qkv"
"""A layer of the demo's base, whose weight is 1152 x 384."""
BROKEN_NAME = os.fsdecode(b"caf\xe9")
"""As an archive from another system leaves it: no UTF-8."""
ALIASES = 40
"""Levels of a bomb of aliases: two to the power of it is what it stands for."""


Maker = bytes | str | Callable[[Path], Any]
"""What a file holds, or what makes it at a path."""


def put(maker: Maker, path: Path) -> None:
    """Make a file."""
    if callable(maker):
        maker(path)
    else:
        path.write_bytes(maker.encode() if isinstance(maker, str) else maker)


def file_name(name: str) -> str:
    """Return what the bad file `name` is called, without its extension."""
    return NAMES.get(name, "bad")


class Runs:
    """Pickled, it creates a folder when it is loaded: the witness that code of a file was run."""

    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.witness,)


def witness(path: Path) -> Path:
    """Return the folder that a pickle at `path` creates if anything runs it."""
    return path.with_name(path.name + ".was-run")


def safetensors(header: Any, body: bytes = b"") -> bytes:
    """Return a file with this header, whatever it says: bytes as they are, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def tensors(values: Mapping[str, tuple[str, tuple[int, ...], bytes]], metadata: Any = None) -> bytes:
    """Return a sound file: name -> (format, shape, bytes)."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (kind, shape, data) in values.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return safetensors(header, b"".join(data for _, _, data in values.values()))


def floats(value: float, *shape: int) -> tuple[str, tuple[int, ...], bytes]:
    """Return a tensor of one number."""
    return "F32", shape, struct.pack("<f", value) * math.prod(shape)


def lora(
    down: Any = None, up: Any = None, alpha: Any = None, *, layer: str = LAYER, metadata: Any = None
) -> bytes:
    """Return a LoRA of one layer; it is sound with nothing given. False leaves a tensor out."""
    chosen = {
        "lora_down.weight": floats(0.01, 4, 384) if down is None else down,
        "lora_up.weight": floats(0.01, 1152, 4) if up is None else up,
        "alpha": floats(4.0) if alpha is None else alpha,
    }
    return tensors({f"{layer}.{name}": value for name, value in chosen.items() if value}, metadata)


def entry(**changes: Any) -> dict[str, Any]:
    """Return the header of a tensor of four bytes, with changes."""
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes


def aliases(levels: int = ALIASES) -> str:
    """Return YAML in which each line names the one before twice."""
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, levels))]
    return "\n".join(lines)


def bind(path: Path) -> None:
    """Make a socket; its path may be longer than a socket's address."""
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def save_torch(path: Path) -> None:
    """Write what torch.save does."""
    import torch

    torch.save({"state_dict": {f"{LAYER}.alpha": torch.ones(1)}}, path)


def one_tensor(**changes: Any) -> bytes:
    """Return a file whose header lies about its one tensor."""
    return safetensors({f"{LAYER}.alpha": entry(**changes)}, bytes(4))


NAN, INFINITE = math.nan, math.inf
HALF_A_LETTER = b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'

MALFORMED: Mapping[str, Maker] = {
    "nothing there": lambda path: None,
    "no bytes": b"",
    "seven bytes": bytes(7),
    "a folder": lambda path: path.mkdir(),
    "the null device": lambda path: path.symlink_to("/dev/null"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": bind,
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "a web page": b"<!DOCTYPE html>\n<html><body>404</body></html>\n",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "text of UTF-16": "config: {}".encode("utf-16"),
    "noise": bytes(range(256)) * 4096,
    "a file of torch": save_torch,
    "a pickle that runs code": lambda path: path.write_bytes(pickle.dumps(Runs(str(witness(path))))),
    "deep YAML": b"[" * 100_000,
    "a bomb of aliases": aliases().encode(),
    "a name that is not UTF-8": b"no weights",
    "a name with a line break": b"no weights",
    "a header of 2^62 bytes": struct.pack("<Q", 1 << 62) + b"{}",
    "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
    "a header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "a header of no bytes": bytes(8) + b"{}",
    "a header that is no JSON": safetensors(b"{'a': 1}"),
    "a header cut off": safetensors(b'{"a": {"dtype": "F3'),
    "a header that is a list": safetensors([1, 2]),
    "a header of deep JSON": safetensors(b"[" * 100_000),
    "a header of deep objects": safetensors(b'{"a":' * 50_000),
    "a header that is not UTF-8": safetensors(b'{"\xe9": 1}'),
    "a number of 9,999 digits": safetensors(b'{"a": ' + b"9" * 9999 + b"}"),
    "a type that does not exist": one_tensor(dtype="F33"),
    "a type that is a list": one_tensor(dtype=["F32"]),
    "no shape": one_tensor(shape=None),
    "a shape below 0": one_tensor(shape=[-1]),
    "a shape of 2^80": one_tensor(shape=[1 << 40, 1 << 40]),
    "a shape that is text": one_tensor(shape="1"),
    "a shape of NaN": one_tensor(shape=[NAN]),
    "tensors that overlap": safetensors({"a": entry(), "b": entry(data_offsets=[2, 6])}, bytes(6)),
    "a gap": safetensors({"a": entry(data_offsets=[4, 8])}, bytes(8)),
    "offsets below 0": one_tensor(data_offsets=[-4, 0]),
    "offsets the wrong way round": one_tensor(data_offsets=[4, 0]),
    "offsets of 2^63": one_tensor(data_offsets=[1 << 63, (1 << 63) + 4]),
    "a file cut off": lora()[:-100],
    "bytes that belong to no tensor": lora() + bytes(100),
    "metadata that is a list": lora(metadata=[1]),
    "metadata of numbers": lora(metadata={"a": 1}),
}
UNUSABLE: Mapping[str, Maker] = {
    "no tensors": safetensors({}),
    "half of a letter in a key": safetensors(HALF_A_LETTER, bytes(4)),
    "a key of control characters": lora(layer="\x1b[2J\r\n\0"),
    "a key of 1 MB": lora(layer="k" * (1 << 20)),
    "a layer that the base has not": lora(layer="lora_unet_nothing"),
    "weights of NaN": lora(floats(NAN, 4, 384)),
    "weights of infinity": lora(up=floats(INFINITE, 1152, 4)),
    "alpha of NaN": lora(alpha=floats(NAN)),
    "alpha of infinity": lora(alpha=floats(INFINITE)),
    "alpha of three numbers": lora(alpha=floats(1.0, 3)),
    "rank 0": lora(floats(0, 0, 384), floats(0, 1152, 0)),
    "five dimensions": lora(floats(1, 4, 384, 1, 1, 2), floats(1, 1152, 4, 1, 1, 1)),
    "shapes that fit no layer": lora(floats(1, 1, 2), floats(1, 2, 1)),
    "ranks that disagree": lora(floats(1, 3, 384)),
    "up without down": lora(down=False),
    "alpha alone": lora(False, False),
}
ODD: Mapping[str, Maker] = {
    "weights whose product is infinite": lora(floats(3e38, 4, 384), floats(3e38, 1152, 4)),
    "whole numbers": lora(("I8", (4, 384), bytes(1024))),
    "metadata of 30 MB": lora(metadata={"ss_tag_frequency": "[" * 30_000_000}),
    "metadata of deep JSON": lora(metadata={"ss_tag_frequency": "[" * 100_000}),
    "half of a letter in metadata": lora(metadata={"ss_tag_frequency": "\ud800"}),
}
BAD: Mapping[str, Maker] = {**MALFORMED, **UNUSABLE, **ODD}

NAMES = {"a name that is not UTF-8": BROKEN_NAME, "a name with a line break": "bad\nname"}
"""Of files that are not just called "bad"."""
