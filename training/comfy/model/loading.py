"""Base models from ComfyUI's folders: one checkpoint, or several files, as usual for SD3.5 and Flux."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.utils
import folder_paths

from ...family import FAMILIES
from ...files.mapped_file import MappedFile
from ...files.tensor_file import TensorFile
from ...job.graph import FROM_CHECKPOINT
from ...log import log
from ...memory.precision import DTYPES
from ...user_error import UserError
from ..paths import listed, listed_file
from .file_weights import dtype_of, is_too_large, map_weights, remember_file
from .fingerprint import FileDigests, remember


def model_files() -> list[str]:
    return sorted({*listed("checkpoints"), *listed("diffusion_models")})


def model_path(name: str) -> Path:
    """Return the path of a file in `model_files`. Raises UserError if it is missing."""
    return listed_file(("checkpoints", "diffusion_models"), name)


def text_encoder_files() -> list[str]:
    return listed("text_encoders")


def vae_files() -> list[str]:
    return listed("vae")


def load_base(
    model: str, text_encoders: Sequence[str], vae: str, dtype: str, *, stay_in_file: bool | None = None
) -> tuple[Any, Any, Any]:
    """Return (MODEL, CLIP, VAE); CLIP and VAE are None if neither the checkpoint nor a file has one.

    Names are relative to ComfyUI's model folders. With `stay_in_file`, the MODEL's weights are mapped, in the
    file's dtype if `dtype` is "auto"; None maps a file that is too large for host memory. Raises UserError
    naming the file if it is not a readable .safetensors base model.
    """
    path = model_path(model)
    options = {} if dtype == "auto" else {"dtype": DTYPES[dtype]}
    keys = require_safetensors(path)
    digests = FileDigests(path)
    mapped: MappedFile | None = None
    with ExitStack() as loading:
        if is_too_large(path) if stay_in_file is None else stay_in_file:
            log.info("%s stays in its file: it is mapped into memory, not copied.", path.name)
            options = options or {"dtype": dtype_of(keys)}
            mapped = loading.enter_context(map_weights(keys))
        else:
            loading.enter_context(read_ahead(path))
        if any(key.startswith("model.diffusion_model.") for key in keys):
            patcher, clip, own_vae = _load(
                path.name,
                "a base model",
                lambda: comfy.sd.load_checkpoint_guess_config(
                    str(path),
                    embedding_directory=folder_paths.get_folder_paths("embeddings"),
                    model_options=options,
                )[:3],
            )
        else:
            patcher = _load(
                path.name, "a base model", lambda: comfy.sd.load_diffusion_model(str(path), options)
            )
            clip = own_vae = None
    if patcher is None:
        raise UserError(
            f"{model}: not a base model that ComfyUI recognizes; choose a checkpoint or diffusion model."
        )
    if clip is not None and not hasattr(clip, "tokenizer"):
        clip = None
    remember(patcher.model.diffusion_model, digests)
    remember_file(patcher.model.diffusion_model, path, mapped)
    if text_encoders:
        clip = _load_clip(text_encoders, type(patcher.model.model_config))
    elif clip is not None:
        remember(clip.cond_stage_model, digests)
    if vae != FROM_CHECKPOINT:
        own_vae = _load_vae(vae)
    elif own_vae is not None:
        remember(own_vae.first_stage_model, digests)
    return patcher, clip, own_vae


@contextmanager
def read_ahead(path: Path) -> Iterator[None]:
    """Read the file once in the background, so that it is in the system's cache when it is read in pieces.

    ComfyUI maps files into memory, which on its own would fetch them page by page.
    """
    done = threading.Event()

    def sweep() -> None:
        buffer = bytearray(READ_AHEAD)
        with suppress(OSError), path.open("rb", buffering=0) as file:
            while not done.is_set() and file.readinto(buffer):
                pass

    thread = threading.Thread(target=sweep, name="graft read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


READ_AHEAD = 1 << 24
"""Bytes at a time."""


def require_safetensors(path: Path) -> TensorFile:
    """Return a .safetensors file with its header checked and no tensor loaded.

    Raises UserError for pickles, truncated files, oversized headers and bad offsets.
    """
    if path.suffix not in (".safetensors", ".sft"):  # ComfyUI chooses the reader by it
        raise UserError(
            f"{path.name}: only .safetensors files are loaded, as {path.suffix or 'other'} files can run "
            "code when opened. Convert it to .safetensors first."
        )
    return TensorFile(path)


def _load(names: str, what: str, load: Any) -> Any:
    try:
        return load()
    except (RuntimeError, KeyError, ValueError, AttributeError, TypeError) as error:
        message = str(error).strip()
        raise UserError(
            f"{names}: ComfyUI cannot load this as {what} ({message}); choose another in Load Base Model."
        ) from error


def clip_type(config: type) -> Any:
    """Return the CLIPType of text encoder files for a class of ComfyUI's model configs.

    A ComfyUI without that type recognizes the encoders by their weights. Raises UserError for other classes:
    a wrong type would encode differently from sampling.
    """
    rows = [FAMILIES[base.__name__] for base in config.__mro__ if base.__name__ in FAMILIES]
    types = [family.clip_type for family in rows if family.clip_type]
    if not types:
        raise UserError(
            f"{config.__name__}: Load Base Model cannot load its text encoders. Leave them at "
            f"{FROM_CHECKPOINT!r} here and load them with ComfyUI's own loader."
        )
    return getattr(comfy.sd.CLIPType, types[0], comfy.sd.CLIPType.STABLE_DIFFUSION)


def _load_clip(names: Sequence[str], config: type) -> Any:
    kind = clip_type(config)
    paths = [listed_file(("text_encoders",), name) for name in names]
    for path in paths:
        require_safetensors(path)
    digests = FileDigests(*paths)
    clip = _load(
        ", ".join(names),
        f"text encoders of {config.__name__}",
        lambda: comfy.sd.load_clip(
            [str(path) for path in paths], folder_paths.get_folder_paths("embeddings"), clip_type=kind
        ),
    )
    remember(clip.cond_stage_model, digests)
    return clip


def _load_vae(name: str) -> Any:
    path = listed_file(("vae",), name)
    require_safetensors(path)
    digests = FileDigests(path)
    vae = _load(name, "a VAE", lambda: comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path))))
    if vae.first_stage_model is None:
        raise UserError(f"{name}: not a VAE that ComfyUI recognizes.")
    remember(vae.first_stage_model, digests)
    return vae
