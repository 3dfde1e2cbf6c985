"""`graft train job.yaml`: the job's graph on a ComfyUI without an editor.

Ctrl-C saves the run; the same command goes on from there, and a finished job costs nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..training.data.roots import resolve_dataset
from ..training.job.read import DATASETS, Job, model_paths, read_job
from ..training.user_error import UserError
from .headless.gpu import choose_gpu
from .headless.server import (
    GRAFT,
    ComfyUIError,
    OnEvent,
    PromptError,
    Server,
    comfyui_version,
    find_comfyui,
    server,
)
from .headless.terminal import Bar, say

SECONDS_TO_SAVE = 600.0
"""A step of a large model on a slow machine, and a checkpoint."""

MODEL_FOLDERS = {
    "checkpoints": ("checkpoints",),
    "diffusion_models": ("diffusion_models", "unet"),
    "text_encoders": ("text_encoders", "clip"),
    "vae": ("vae",),
    "embeddings": ("embeddings",),
    "loras": ("loras",),
}
"""Kind of file -> where it lies in ComfyUI's models folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("job", type=Path, metavar="JOB.yaml", help="see example_workflows/jobs")
    parser.add_argument("--cpu", action="store_true", help="leave the graphics card alone")


def run(args: argparse.Namespace) -> int:
    """Train the job and return the exit code. Raises UserError or OSError for what the user can mend."""
    job = read_job(args.job, has_dataset=has_dataset)
    comfyui = find_comfyui()
    _, _, index = job.device.partition(":")
    if index:
        choose_gpu(int(index))
    with tempfile.TemporaryDirectory(prefix="graft-train-", ignore_cleanup_errors=True) as scratch:
        base = Path(scratch).resolve()
        say(f"Starting ComfyUI {comfyui_version(comfyui)} from {comfyui}")
        try:
            with (
                server(
                    comfyui,
                    base,
                    options=options(job, comfyui, base),
                    cpu=args.cpu or job.device == "cpu" or None,
                ) as comfy,
                reporting(job) as on_event,
            ):
                train(comfy, job, on_event)
        except (PromptError, ComfyUIError) as error:
            log = job.output / f"{job.name}.comfyui.log"
            shutil.copyfile(base / "comfyui.log", log)
            raise UserError(f"{error}\nComfyUI's own words are in {log}.") from error
    saved = [job.output / folder / f"{job.name}.safetensors" for folder in ("loras", "diffusers")]
    say(f"Done: {max(saved, key=lambda path: path.stat().st_mtime if path.exists() else 0.0)}")
    return 0


def has_dataset(name: str) -> bool:
    """Return whether the ComfyUI that would be started has a dataset of this name, or may have: what its own
    extra_model_paths.yaml registers, it knows best."""
    comfyui = find_comfyui()
    registered = comfyui / "extra_model_paths.yaml"
    if registered.is_file() and DATASETS in registered.read_text(encoding="utf-8", errors="replace"):
        return True
    try:
        resolve_dataset(name, [comfyui / "input", GRAFT / "starter"])
    except UserError:
        return False
    return True


def train(comfy: Server, job: Job, on_event: OnEvent) -> None:
    """Queue the job's graph and wait for it; on Ctrl-C, or when asked to end, until the run is saved."""
    queued = comfy.post(job.prompt, extra_data(job))
    try:
        comfy.wait(queued, on_event)
    except (KeyboardInterrupt, SystemExit):
        say("\nSaving the run; the same command goes on from there.")
        comfy.interrupt()
        with suppress(PromptError):
            comfy.wait(queued, timeout=SECONDS_TO_SAVE)
        raise


def options(job: Job, comfyui: Path, base: Path) -> list[str]:
    """Return ComfyUI's options for a job: where its files are, where results go."""
    job.output.mkdir(parents=True, exist_ok=True)
    return ["--output-directory", str(job.output), *files(job, comfyui, base)]


def files(job: Job, comfyui: Path, base: Path) -> list[str]:
    """Return the options that tell ComfyUI of the job's folders, and of those of the ComfyUI that is used."""
    own = {
        kind: "\n".join(str(comfyui / "models" / name) for name in names)
        for kind, names in MODEL_FOLDERS.items()
    }
    if (comfyui / "input").is_dir():
        taken = {folder.name for folder in job.folders.get(DATASETS, ())}
        others = sorted(folder for folder in (comfyui / "input").iterdir() if folder.name not in taken)
        own[DATASETS] = "\n".join(str(folder) for folder in others if folder.is_dir())
    paths = base / "model_paths.yaml"  # JSON is YAML, whatever is in a path
    paths.write_text(json.dumps({**model_paths(job), "comfyui": own}), encoding="utf-8")
    return ["--extra-model-paths-config", str(paths)]


def extra_data(job: Job) -> dict[str, Any]:
    """Return what goes with the prompt: the job itself, which Save LoRA writes into the file."""
    return {"extra_pnginfo": {"graft_job": dict(job.document)}}


@contextmanager
def reporting(job: Job) -> Iterator[OnEvent]:
    """Yield an `on_event` that shows how far the job is, with a line every `performance_log_every` steps."""
    train, shown = job.node("GraftTrainSteps"), 0
    with Bar(job.prompt) as bar:

        def on_event(kind: str, data: dict[str, Any]) -> None:
            nonlocal shown
            bar(kind, data)
            if kind == "progress" and data.get("node") == train and job.log_every:
                if data["value"] // job.log_every > shown:
                    shown = data["value"] // job.log_every
                    say(f"\n{bar.text}" if bar.live else bar.text)

        yield on_event
