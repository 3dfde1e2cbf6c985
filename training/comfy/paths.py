"""ComfyUI's folders, with guards: nothing is read or written outside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import folder_paths

from .. import distributed
from ..data.roots import KIND
from ..files.text import require_letters, shown
from ..user_error import UserError


def dataset_roots() -> list[Path]:
    """Return the folders that may hold datasets: ComfyUI's input directory, then the registered ones."""
    registered = folder_paths.folder_names_and_paths.get(KIND, ([], set()))[0]
    return [Path(folder_paths.get_input_directory()), *(Path(path) for path in registered)]


def new_dataset(name: str) -> Path:
    """Return the folder of a new dataset in ComfyUI's input directory. Raises UserError for a name that no
    folder may have, or a hidden one.
    """
    return in_dataset(Path(folder_paths.get_input_directory()), name, "folder")


def in_dataset(folder: Path, name: str, what: str = "file name") -> Path:
    """Return the path of a file or folder inside `folder`. Raises UserError for a name that leaves it, is
    hidden, or that a system refuses.
    """
    if any(part.strip().startswith(".") for part in name.replace("\\", "/").split("/")):
        raise UserError(f"{what}: {shown(name)} is hidden, or leads elsewhere; give it another name.")
    return _inside(folder, name, what, "")


def graft_folder() -> Path:
    """Return output/graft, where runs and the cache live."""
    return Path(folder_paths.get_output_directory()) / "graft"


def own_folder(folder: Path) -> Path:
    """Return the folder that this process writes to for `folder` in output/graft.

    That is `folder` for rank 0. Processes that train along with it only read it, and write to ComfyUI's
    temporary folder.
    """
    if distributed.rank() == 0:
        return folder
    return Path(folder_paths.get_temp_directory()) / "graft" / folder.relative_to(graft_folder())


def cache_folder() -> Path:
    return graft_folder() / "cache"


def lora_path(name: str) -> Path:
    """Return the file output/loras/<name>.safetensors, which ComfyUI's Load LoRA lists.

    Raises UserError for a name that is empty or leaves that folder.
    """
    return _inside(Path(folder_paths.get_output_directory()) / "loras", name, "file name", ".safetensors")


def diffusers_path(name: str) -> Path:
    """Return the file output/diffusers/<name>.safetensors: a LoRA under names that Load LoRA does not read.

    Raises UserError for a name that is empty or leaves that folder.
    """
    return _inside(_diffusers_folder(), name, "file name", ".safetensors")


def _diffusers_folder() -> Path:
    return Path(folder_paths.get_output_directory()) / "diffusers"


def lora_file_names() -> list[str]:
    """Return the LoRA files that Graft's nodes read: those of Load LoRA, and those in output/diffusers."""
    loras = sorted(_diffusers_folder().rglob("*.safetensors"))
    return [
        *listed("loras"),
        *(_IN_DIFFUSERS + path.relative_to(_diffusers_folder()).as_posix() for path in loras),
    ]


def lora_file_path(name: str) -> Path:
    """Return the path of a name in `lora_file_names`, or of a LORA_MODEL's. Raises UserError when the file is
    missing.
    """
    if (
        re.fullmatch(f"{GIVEN}[0-9a-f]+", name)
        and (path := given_lora_path(name.removeprefix(GIVEN))).is_file()
    ):
        return path
    if name.startswith(_IN_DIFFUSERS) and folder_paths.get_full_path("loras", name) is None:
        path = diffusers_path(name.removeprefix(_IN_DIFFUSERS))
        if path.is_file():
            return path
    return listed_file(("loras",), name)


def given_lora_path(name: str) -> Path:
    """Return the file for a LORA_MODEL that a run starts from; `name` is the digest of its content."""
    return own_folder(graft_folder() / "starts") / f"{name}.safetensors"


GIVEN = "output/graft/starts/"
"""Prefix of the names of files for LORA_MODELs."""
_IN_DIFFUSERS = "output/diffusers/"
"""Prefix of the names of files in there."""


def checkpoint_path(name: str) -> Path:
    """Return the file output/checkpoints/<name>.safetensors, which ComfyUI's Load Checkpoint lists.

    Raises UserError for a name that is empty or leaves that folder.
    """
    root = Path(folder_paths.get_output_directory()) / "checkpoints"
    return _inside(root, name, "file name", ".safetensors")


def listed(kind: str) -> list[str]:
    """Return the .safetensors files that ComfyUI lists under models/<kind>."""
    return [name for name in folder_paths.get_filename_list(kind) if name.endswith((".safetensors", ".sft"))]


def listed_file(kinds: Sequence[str], name: str) -> Path:
    """Return the path of a name in `listed` of one of `kinds`. Raises UserError when the file is missing."""
    for kind in kinds:
        path = folder_paths.get_full_path(kind, name)
        if path is not None:
            return Path(path)
    raise UserError(
        f"{name}: no such file in models/{' or models/'.join(kinds)}; put it there and refresh the page."
    )


def run_folder(name: str, key: str) -> Path:
    """Return output/graft/<name>-<key>. Raises UserError for a name that leaves output/graft."""
    return _inside(graft_folder(), f"{name}-{key}", "run name", "")


def run_name(folder: Path) -> str:
    """Return a run's name in routes and events: its folder below output/graft, with '/' between parts."""
    return folder.relative_to(graft_folder()).as_posix()


def existing_run(run: str) -> Path:
    """Return the folder of a `run_name`. Raises UserError for a name that leaves output/graft."""
    return _inside(graft_folder(), run, "run", "")


def state_folder(name: str) -> Path:
    """Return output/graft/states/<name>. Raises UserError for a name that leaves that folder."""
    return _inside(graft_folder() / "states", name, "state name", "")


LONGEST = 240
"""Most bytes of a name: systems allow 255, and a step or an extension may follow."""
LONGEST_PATH = 1024
"""Most bytes of a name with its subfolders, without the folder that it is in."""
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}
"""Names that Windows takes for devices, whatever their extension."""


def _inside(root: Path, name: str, what: str, suffix: str) -> Path:
    clean = name.strip().replace("\\", "/").removesuffix(suffix)
    require_letters(name, f"{what}: {shown(name)}")
    forbidden = set('<>:"|?*') | {chr(code) for code in range(32)}
    parts = clean.split("/")
    for text, most in ((clean, LONGEST_PATH), *((part, LONGEST) for part in parts)):
        if len(text.encode()) > most:
            raise UserError(f"{what}: {text[:40]!r}... is too long; {most} bytes are the most.")
    for part in parts:
        if part.partition(".")[0].strip().lower() in RESERVED:
            raise UserError(f"{what}: {part!r} is not a file name on Windows; choose another name.")
    if not clean or any(part.strip(". ") == "" for part in parts) or forbidden & set(clean):
        raise UserError(
            f"{what}: {name!r} is not a usable name; use letters, digits, '-', '_' and '/' for subfolders."
        )
    path = root.joinpath(*parts[:-1], parts[-1] + suffix)
    if not path.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{what}: {name!r} is outside {root}; choose a name inside it.")
    return path
