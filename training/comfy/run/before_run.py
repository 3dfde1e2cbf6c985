"""What a Train Steps says before Run: epochs, time, memory and disk, and what is likely to be regretted.

Memory is estimated as `graft plan` does, from the outline of the base's file; nothing is loaded or trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from glob import escape
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

import comfy.model_management

import nodes

from ...adapters.select import select
from ...config import AdapterConfig, CheckpointConfig, MemoryConfig, TrainConfig
from ...memory.plan import (
    GIB,
    adapter_bytes,
    candidates,
    count_trained,
    estimate_fastest,
    gib,
    make_estimator,
)
from ...memory.plan_table import BANDWIDTH
from ...memory.precision import DTYPES
from ...optimizer.build import row_of
from ...run.run_log import clock, read_entries
from ...run.saved_state import read_object
from ...user_error import UserError
from .. import paths
from ..dataset.in_graph import count_showings
from ..model.device import supported_dtypes, usable_bytes
from ..model.outline import outline, outlined_batch
from ..model.product_speed import operations_a_second
from .chart_run import TRAIN_STEPS, chart_runs
from .notes import model_file

SAVE_LORA = "GraftSaveLora"
MEASURED = 50
"""Steps of the last run that tell how long a step takes."""
DIFFERENCES = ("full",)
"""Methods that take a tenth of the usual learning rate: they train the weights themselves."""

_lock = Lock()
"""Two requests do not estimate on one outline at once."""


def look_ahead_all(graph: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return {node id: {lines, warnings}} for every Train Steps of a graph in API form."""
    shown = chart_runs(graph, "")
    with _lock:
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
    lines, warnings = [], _rate_warnings(config, float(inputs["learning_rate"]))
    batch = config.batch_size * config.gradient_accumulation
    resolution, device = 1024, comfy.model_management.get_torch_device()
    with suppress(UserError, LookupError, ZeroDivisionError):
        showings, resolution = count_showings(graph, inputs.get("dataset"))
        lines.append(f"{steps * batch / showings:.3g} epochs of {showings:.0f} images")
    seconds = _seconds_a_step(name, batch)
    if seconds:
        lines.append(f"about {clock(steps * seconds)}, at the {seconds:.2g} s a step of the last run")
    with suppress(UserError, RuntimeError, NotImplementedError, OSError):
        path = paths.listed_file(("checkpoints", "diffusion_models"), model_file(graph, node_id))
        denoiser, config, adapted, estimate = _outlined(path, path.stat().st_mtime, config, resolution)
        budget = round(config.memory.budget_gb * GIB) or usable_bytes(device)
        found = estimate_fastest(denoiser, config, candidates(config.memory), budget, estimate)
        if not seconds:
            flops = operations_a_second(DTYPES[config.memory.dtype], device)
            seconds = found.seconds(flops, BANDWIDTH, budget) * config.gradient_accumulation
            lines.append(f"about {clock(steps * seconds)}, at an estimated {seconds:.2g} s a step")
        if found.fits(budget):
            lines.append(f"{gib(found.peak)} of {gib(budget)} memory ({found.plan})")
        else:
            warnings.append(f"needs {gib(found.peak)} of memory or more; {gib(budget)} are there")
        files = steps // saving.steps + 1 if saving.steps else 1
        disk = (saving.keep + 4) * adapter_bytes(adapted, config) + files * 2 * count_trained(adapted, config)
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


@lru_cache(maxsize=8)
def _outlined(path: Path, changed: float, config: TrainConfig, resolution: int) -> tuple[Any, ...]:
    """Return the outline of the base in a file, the settings with its precision, the layers with adapters
    and an estimator of plans.
    """
    denoiser = outline(path)
    if config.memory.dtype == "auto":  # the outline lies on the CPU
        best, *_ = supported_dtypes(denoiser.model.model_config, comfy.model_management.get_torch_device())
        dtype: Any = next(name for name, each in DTYPES.items() if each == best)
        config = replace(config, memory=replace(config.memory, dtype=dtype))
    adapted = select(denoiser.specs, denoiser.family, config.adapter)
    batch = outlined_batch(denoiser, config.batch_size, resolution, resolution)
    return denoiser, config, adapted, make_estimator(denoiser, adapted, config, batch)


def _rate_warnings(config: TrainConfig, rate: float) -> list[str]:
    optimizer = config.optimizer
    most = row_of(optimizer).most_lr / (10 if config.adapter.algorithm in DIFFERENCES else 1)
    if not 0 < most < rate:
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
