"""Job files that a graph may name: only those in folders that may hold datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ...data.roots import is_inside, yaml_lines
from ...job.read import DATASETS, Job, read_job
from ...user_error import UserError
from ..paths import dataset_roots

SUFFIXES = (".yaml", ".yml")


def job_files() -> list[str]:
    """Return the job files to choose from: those in ComfyUI's input folder and in registered folders."""
    return sorted({name for root in dataset_roots() for name in _files(root)})


def load_job(name: str) -> Job:
    """Read the job file called `name`; its datasets are named as Load Dataset names them.

    Raises UserError for a file that is missing or outside these folders, and for a dataset outside them.
    """
    job = read_job(job_file(name))
    names = {folder.name: _dataset_name(folder) for folder in job.folders.get(DATASETS, ())}
    prompt = {
        key: node | {"inputs": node["inputs"] | _renamed(node["inputs"], names)}
        if node["class_type"] == "GraftLoadDataset"
        else node
        for key, node in job.prompt.items()
    }
    return replace(job, prompt=prompt)


def _renamed(inputs: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """Return the inputs of Load Dataset that name folders, as it names them."""
    return {
        key: "\n".join(names.get(name, name) for name in inputs[key].splitlines())
        for key in ("folder", "references")
        if key in inputs
    }


def job_file(name: str) -> Path:
    """Return the path of a job file. Raises UserError unless it is in a folder that may be read."""
    parts = PurePosixPath(name.strip().replace("\\", "/")).parts
    if parts and ".." not in parts and "\0" not in name and name.endswith(SUFFIXES):
        for root in dataset_roots():
            path = root.joinpath(*parts)
            if path.is_file() and is_inside(path, root):
                return path
    roots = " or ".join(str(root) for root in dataset_roots()[:1])
    raise UserError(f"job file {name!r} not found; put a .yaml file into {roots} and choose it.")


def _files(root: Path) -> Iterator[str]:
    for path in root.glob("*"):
        if path.suffix in SUFFIXES and path.is_file():
            yield path.name


def _dataset_name(folder: Path) -> str:
    for index, root in enumerate(dataset_roots()):
        if is_inside(folder, root):
            inside = folder.resolve().relative_to(root.resolve()).as_posix()
            return inside if index == 0 else f"{root.name}/{inside}".removesuffix("/.")
    raise UserError(
        f"datasets: {folder} is outside the folders that may be read. Register it with these lines in "
        f"extra_model_paths.yaml (in ComfyUI's folder; then restart ComfyUI):\n{yaml_lines(folder)}"
    )
