"""ComfyUI's dynamic VRAM: the real one on a card, or on the pretended device of `tests/support/card.py`.

Newer versions switch it on for NVIDIA cards. Files are then mapped read-only, small weights are loaded in
place, and large ones are copied into a buffer that the driver may take back at any time. On the pretended
device that buffer is host memory, and what is taken back is filled with bytes that make every number NaN.
Native parts of comfy-aimdo are replaced there; ComfyUI's own code for it runs.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from . import card


def install() -> None:
    """Switch it on, as ComfyUI's main.py does; after `card.install()` and `import comfy`."""
    import comfy.cli_args
    import comfy_aimdo.host_buffer
    import comfy_aimdo.model_mmap
    import comfy_aimdo.model_vbar
    import comfy_aimdo.torch

    comfy_aimdo.model_mmap.ModelMMAP = Mapped
    comfy_aimdo.host_buffer.HostBuffer = NothingPinned
    vbar: Any = comfy_aimdo.model_vbar
    vbar.ModelVBAR = Buffer
    vbar.vbar_fault = lambda place: place[0].signature()
    vbar.vbar_unpin = lambda place: None
    vbar.vbars_reset_watermark_limits = lambda: None
    vbar.vbars_analyze = lambda *device: 0
    comfy_aimdo.torch.aimdo_to_tensor = lambda place, device: place[0].tensor(*place[1:])
    comfy.cli_args.args.disable_pinned_memory = True
    _switch_on()


def install_on_card() -> None:
    """Switch the real one on, as ComfyUI's main.py does: after `import comfy.cli_args`, before the rest."""
    import comfy_aimdo.control

    assert comfy_aimdo.control.init(), "comfy-aimdo finds no driver"
    import comfy.model_management

    device = comfy.model_management.get_torch_device()
    assert comfy_aimdo.control.init_devices([device.index]), f"comfy-aimdo does not work on {device}"
    _switch_on()


def _switch_on() -> None:
    import comfy.memory_management
    import comfy.model_patcher

    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True


@contextmanager
def off() -> Iterator[None]:
    """Switch it off for the duration of the context, in versions that have it."""
    try:
        import comfy.memory_management as state
    except ImportError:  # of an older version
        yield
        return
    before, state.aimdo_enabled = state.aimdo_enabled, False
    try:
        yield
    finally:
        state.aimdo_enabled = before


def is_off(why: str) -> pytest.MarkDecorator:
    """Mark tests that cannot run under dynamic VRAM."""
    return pytest.mark.skipif(card.DYNAMIC, reason=why)


class Mapped:
    """A file in read-only memory."""

    def __init__(self, path: str) -> None:
        with Path(path).open("rb") as file:
            self.bytes = numpy.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "u1")

    def get(self) -> int:
        return self.bytes.ctypes.data

    def get_file_handle(self) -> None:
        """None: ComfyUI then copies from the memory."""

    def bounce(self) -> bool:
        return True


class NothingPinned:
    """Pinned host memory, of which there is none."""

    size = 0

    def __init__(self, *size: int) -> None: ...

    def truncate(self, *size: int, **options: bool) -> None: ...


class Buffer:
    """A model's weights on the device."""

    def __init__(self, size: int, device: int) -> None:
        self.size, self.used, self.taken_back = int(size), 0, 0
        self.memory: Any = None

    def alloc(self, size: int) -> tuple[Buffer, int, int]:
        """Return a place: (buffer, offset, size)."""
        offset = (self.used + 511) & ~511
        self.used = offset + size
        return self, offset, size

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        if self.memory is None:
            self.memory = (ctypes.c_uint8 * self.size)()
        return card.on_card(torch.frombuffer(self.memory, dtype=torch.uint8, offset=offset, count=size))

    def signature(self) -> Any:
        """Return what changes when the contents are lost."""
        return (ctypes.c_uint32 * 1)(self.taken_back)

    def free_memory(self, size: int) -> int:
        self.taken_back += 1
        if self.memory is not None:
            ctypes.memset(self.memory, 0xFF, self.size)
        return 0

    def loaded_size(self) -> int:
        return 0

    def prioritize(self) -> None: ...

    def deprioritize(self) -> None: ...
