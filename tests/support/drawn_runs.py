"""Runs on disk as a training leaves them, with curves and sample images, at no cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from PIL import Image

from graft.training.config import AdapterConfig, OptimizerConfig, TrainConfig, to_dict
from graft.training.run.queued import note_queued

COLORS = ("tomato", "seagreen", "royalblue", "gold")


def write_run(folder: Path, *, steps: int = 300, lr: float = 1e-4, rank: int = 8, samples: int = 3) -> Path:
    """Write a run's log, settings and samples (three sheets of `samples` images) to `folder`."""
    (folder / "samples").mkdir(parents=True)
    config = replace(TrainConfig(), adapter=AdapterConfig(rank=rank), optimizer=OptimizerConfig(lr=lr))
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    note_queued(folder, "digest", steps)
    with (folder / "log.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            mean = 0.25 + 0.4 * math.exp(-step * lr * 60)
            entry = {"step": step, "loss": mean + 0.1 * math.sin(step * step), "smoothed": mean, "lr": lr}
            file.write(json.dumps(entry) + "\n")
    for sheet in (1, 2, 3):
        for number in range(samples):
            image = Image.new("RGB", (96, 96), COLORS[(number + sheet) % len(COLORS)])
            image.save(folder / "samples" / f"step-{sheet * steps // 3:08d}-{number}.png")
    return folder
