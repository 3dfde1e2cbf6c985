"""One process of a run that several train: `python ranks.py FOLDER CASE`, with torchrun's variables set.

It writes its state to FOLDER/<case>-<rank>, and the run itself lies in FOLDER/<case>.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


if __name__ == "__main__":
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()

from graft.tests.support.tiny import TinyDataset, TinyDenoiser, TinySamples  # noqa: E402
from graft.training import distributed  # noqa: E402
from graft.training.config import (  # noqa: E402
    AdapterConfig,
    CheckpointConfig,
    EmaConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)
from graft.training.run.execute import execute  # noqa: E402
from graft.training.run.folder import Run  # noqa: E402
from graft.training.run.saved_state import save_state  # noqa: E402

STEPS = 6
PLAIN = TrainConfig(
    batch_size=2,
    gradient_accumulation=2,
    seed=7,
    adapter=AdapterConfig(rank=4, alpha=2.0, targets="all"),
    optimizer=OptimizerConfig(lr=1e-3),
    schedule=ScheduleConfig(name="cosine", warmup_steps=2, total_steps=20),
)
CASES = {
    "plain": PLAIN,
    "dropout": replace(PLAIN, adapter=replace(PLAIN.adapter, dropout=0.3, module_dropout=0.3)),
    "average": replace(PLAIN, ema=EmaConfig(decay=0.99)),
    "validated": replace(PLAIN, validation=ValidationConfig(every=2, patience=1)),
    "more": replace(PLAIN, gradient_accumulation=4),
    "idle": replace(PLAIN, gradient_accumulation=1),
}


def go(folder: Path, case: str, *, steps: int = STEPS, on_step=lambda progress, handles: None):
    """Train a case, alone or with others."""
    config = CASES[case]
    validation = TinySamples() if config.validation.every else None
    run = Run(
        folder / case if not distributed.rank() else folder / f"{case}-copy-{distributed.rank()}",
        CheckpointConfig(minutes=1e9),
    )
    return execute(
        run, TinyDenoiser(), TinyDataset(), config, None, steps=steps, on_step=on_step, validation=validation
    )


def main(folder: Path, cases: list[str], doomed: int) -> None:
    """Train the cases; rank 1 is killed after step `doomed`, once."""

    def die(progress, handles):
        marker = folder / "killed"
        if doomed and progress.step == doomed and distributed.rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    together = (
        distributed.join_processes(torch.device("cpu")) if "WORLD_SIZE" in os.environ else nullcontext()
    )
    with together:
        for case in cases:
            state = go(folder, case, on_step=die).load()
            save_state(state, folder / f"{case}-{distributed.rank()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]))
