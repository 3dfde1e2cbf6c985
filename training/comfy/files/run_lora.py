"""The LoRA of a run as a file that ComfyUI's Load LoRA lists."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...family import family_named
from ...files.lora.metadata import WEIGHTS
from ...files.tensor_file import TensorFile
from ...files.whole_file import whole_file
from ...run.checkpoints import Checkpoints
from ...run.folder import Run
from ...run.watch import save_lora
from ...user_error import UserError
from .. import paths


def copy_lora(run: Run) -> str:
    """Copy the LoRA of a run's newest checkpoint to output/loras, and return its name in Load LoRA.

    A file of another LoRA is never replaced. Raises UserError if the run has no sound checkpoint.
    """
    state = Checkpoints(run).latest()
    if state is None:
        raise UserError(f"{run.folder.name}: no checkpoint here yet; train a little longer, or save now.")
    source = run.lora(state.step)
    if not source.is_file():
        trained = state.load()
        save_lora(run, trained, family_named(trained.family))
    weights = _weights_in(source)
    if weights is None:
        raise UserError(f"{source}: the LoRA could not be written; free some space there.")
    run_name = paths.run_name(run.folder)
    for name in (run_name.rpartition("-")[0], run_name):
        path = paths.lora_path(f"{name}-{state.step:06d}")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as temporary:
                shutil.copyfile(source, temporary)
        if _weights_in(path) == weights:
            return f"{name}-{state.step:06d}.safetensors"
    raise UserError(f"{path}: another LoRA has this name; move it away.")


def _weights_in(path: Path) -> str | None:
    """Return the digest of a LoRA file's weights; None if there is no such file or it has none."""
    try:
        return TensorFile(path).metadata.get(WEIGHTS)
    except (OSError, ValueError):
        return None
