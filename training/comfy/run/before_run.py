"""What a Train Steps says before Run: epochs, time, memory and disk, and what is likely to be regretted.

Memory is estimated as `graft plan` does, from the outline of the base's file; nothing is loaded or trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from glob import escape
from pathlib import Path
from statistics import median
from typing import Any

import comfy.model_management

import nodes

from ...adapters.select import select
from ...config import AdapterConfig, CheckpointConfig, MemoryConfig, TrainConfig
from ...data.folder import find_images
from ...data.roots import resolve_dataset
from ...memory.plan import RESERVE, adapter_bytes, candidates, count_trained, gib, make_estimator
from ...optimizer.build import row_of
from ...run.run_log import read_entries
from ...run.saved_state import read_object
from ...user_error import UserError
from .. import paths
from ..model.outline import outline, outlined_batch
from .chart_run import TRAIN_STEPS, chart_runs
from .notes import model_file

LOAD_DATASET, SAVE_LORA = "GraftLoadDataset", "GraftSaveLora"
MEASURED = 50
"""Steps of the last run that tell how long a step takes."""
DIFFERENCES = ("full",)
"""Methods that take a tenth of the usual learning rate: they train the weights themselves."""


def look_ahead_all(graph: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return {node id: {lines, warnings}} for every Train Steps of a graph in API form."""
    shown = chart_runs(graph, "")
    return {
        node_id: look_ahead(graph, node_id, is_new=not shown.get(node_id, {}).get("same"))
        for node_id, entry in graph.items()
        if entry.get("class_type") == TRAIN_STEPS
    }


def look_ahead(graph: Mapping[str, Any], node_id: str, *, is_new: bool) -> dict[str, list[str]]:
    """Return {lines, warnings} for a Train Steps of a graph in API form; what is not known is left out.

    `is_new` is whether no run was queued with these settings. Raises LookupError, TypeError or ValueError if
    it is no such graph.
    """
    inputs = graph[node_id]["inputs"]
    steps, name = int(inputs["steps"]), str(inputs["name"])
    config, saving = _config(graph, inputs)
    lines, warnings = [], _rate_warnings(config)
    batch = config.batch_size * config.gradient_accumulation
    images, resolution = _images(graph, inputs)
    if images:
        lines.append(f"{steps * batch / images:.3g} epochs of {images} images")
    seconds = _seconds_a_step(name, batch)
    if seconds:
        lines.append(f"about {_clock(steps * seconds)}, at the {seconds:.2g} s a step of the last run")
    with suppress(UserError, RuntimeError, NotImplementedError, OSError):
        path = paths.listed_file(("checkpoints", "diffusion_models"), model_file(graph, node_id))
        plan, fits, state, lora = _sizes(path, path.stat().st_mtime, config, resolution or 1024)
        (lines if fits else warnings).append(plan)
        disk = (saving.keep + 4) * state + (steps // saving.steps + 1 if saving.steps else 1) * lora
        free = shutil.disk_usage(paths.graft_folder().parent).free
        (lines if disk < free else warnings).append(f"up to {gib(disk)} of disk, {gib(free)} are free")
    if is_new:
        warnings += _replaced(graph, node_id, name, steps)
    return {"lines": lines, "warnings": warnings}


def _config(graph: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[TrainConfig, Any]:
    """Return the settings that decide memory and time, and those of checkpoints, at defaults where they come
    from elsewhere.
    """
    chosen = _made_by(graph, inputs.get("optimizer_settings"), "GraftOptimizerSettings")
    saving = _made_by(graph, inputs.get("checkpoint_settings"), "GraftCheckpointSettings")
    config = TrainConfig(
        batch_size=int(inputs["batch_size"]),
        adapter=_made_by(graph, inputs.get("start"), "GraftBuildLora") or AdapterConfig(),
        memory=_made_by(graph, inputs.get("memory_settings"), "GraftMemorySettings") or MemoryConfig(),
    )
    if chosen is not None:
        accumulation = chosen.gradient_accumulation
        config = replace(
            config, optimizer=chosen.optimizer, ema=chosen.ema, gradient_accumulation=accumulation
        )
    config = replace(config, optimizer=replace(config.optimizer, lr=float(inputs["learning_rate"])))
    return config, saving.config if saving else CheckpointConfig()


def _made_by(graph: Mapping[str, Any], link: Any, kind: str) -> Any:
    """Return what a node of settings on a wire gives out; None if there is none, or it cannot be known."""
    entry = graph.get(str(link[0])) if isinstance(link, list) and link else None
    if entry is None or entry.get("class_type") != kind:
        return None
    with suppress(UserError):
        values = {name: value for name, value in entry["inputs"].items() if not isinstance(value, list)}
        return nodes.NODE_CLASS_MAPPINGS[kind].execute(**values).args[0]
    return None


def _images(graph: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the images of an epoch with their repeats, and the largest resolution; zeros if unknown."""
    count, largest = 0, 0
    for values in _sources(graph, inputs.get("dataset")):
        widgets = {name: value for name, value in values.items() if not isinstance(value, list)}
        config = nodes.NODE_CLASS_MAPPINGS[LOAD_DATASET].config_of(widgets, {})
        with suppress(UserError):
            found = find_images(resolve_dataset(str(values["folder"]), paths.dataset_roots()), config)
            count += sum(found.samples[i].repeats for i in range(len(found)))
        largest = max(largest, *config.bucket.resolutions)
    return count, largest


def _sources(graph: Mapping[str, Any], link: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the inputs of every Load Dataset that a wire comes from."""
    waiting, seen = [link], set()
    while waiting:
        link = waiting.pop()
        node_id = str(link[0]) if isinstance(link, list) and link else ""
        if node_id in seen or node_id not in graph:
            continue
        seen.add(node_id)
        if graph[node_id]["class_type"] == LOAD_DATASET:
            yield graph[node_id]["inputs"]
        elif graph[node_id]["class_type"].startswith("Graft"):
            given = graph[node_id]["inputs"].items()
            waiting += [value for name, value in given if name.startswith("dataset")]


def _seconds_a_step(name: str, batch: int) -> float:
    """Return the seconds of a step of `batch` images, by the newest run of this name; 0 if there is none."""
    for folder in _runs(name):
        with suppress(OSError, ValueError, LookupError, TypeError):
            before = read_object(folder / "config.json")
            size = (folder / "log.jsonl").stat().st_size
            entries = read_entries(folder / "log.jsonl", max(0, size - (1 << 15)))["entries"][-MEASURED:]
            images = before["batch_size"] * before["gradient_accumulation"]
            return float(median(e["seconds"] for e in entries if e["seconds"]) * batch / images)
    return 0.0


def _runs(name: str) -> list[Path]:
    """Return the folders of the runs of this name, the newest first."""
    with suppress(UserError):
        pattern = paths.run_folder(name, "")
        found = pattern.parent.glob(f"{escape(pattern.name)}{'[0-9a-f]' * 16}")
        return sorted(found, key=lambda folder: folder.stat().st_mtime, reverse=True)
    return []


@lru_cache(maxsize=32)
def _sizes(path: Path, changed: float, config: TrainConfig, resolution: int) -> tuple[str, bool, int, int]:
    """Return a sentence on the memory of a run, whether it fits, and the bytes of a checkpoint and a LoRA."""
    denoiser = outline(path)
    adapted = select(denoiser.specs, denoiser.family, config.adapter)
    state, lora = adapter_bytes(adapted, config), 2 * count_trained(adapted, config)
    estimate = make_estimator(
        denoiser, adapted, config, outlined_batch(denoiser, config.batch_size, resolution, resolution)
    )
    device = comfy.model_management.get_torch_device()
    total = int(comfy.model_management.get_total_memory(device))
    budget = round(config.memory.budget_gb * (1 << 30)) or total
    peaks = []
    for plan in candidates(config.memory):
        peaks.append(estimate(plan).peak)
        if peaks[-1] <= budget * (1 - RESERVE):
            return f"{gib(peaks[-1])} of {gib(budget)} memory ({plan})", True, state, lora
    return f"needs {gib(min(peaks))} of memory or more; {gib(budget)} are there", False, state, lora


def _rate_warnings(config: TrainConfig) -> list[str]:
    optimizer = config.optimizer
    most = row_of(optimizer).most_lr / (10 if config.adapter.algorithm in DIFFERENCES else 1)
    if not 0 < most < optimizer.lr:
        return []
    return [f"a learning rate above {most:g} mostly breaks a LoRA ({optimizer.name}); 0.0001 is usual"]


def _replaced(graph: Mapping[str, Any], node_id: str, name: str, steps: int) -> list[str]:
    """Return a sentence for every LoRA file that the graph will replace, and for runs of the same name."""
    found = []
    for entry in graph.values():
        inputs = entry["inputs"]
        if entry["class_type"] == SAVE_LORA and list(inputs.get("state") or ())[:1] == [node_id]:
            with suppress(UserError):
                path = paths.lora_path(str(inputs["name"]).replace("{step}", str(steps)))
                if path.is_file():
                    found.append(f"Save LoRA will replace {path.name}")
    if others := len(_runs(name)):
        found.append(f"{others} other run{'s' * (others > 1)} called {name}: this one goes beside")
    return found


def _clock(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
