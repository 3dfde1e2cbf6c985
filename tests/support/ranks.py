"""One process of a run that several train: `python ranks.py FOLDER CASE`, with torchrun's variables set.

It writes its state to FOLDER/<case>-<rank>, and the run itself lies in FOLDER/<case>.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

ROOT = Path(__file__).resolve().parents[2]


if __name__ == "__main__":
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()

from graft.tests.support.tiny import TinyDataset, TinyDenoiser, TinySamples  # noqa: E402
from graft.training import distributed  # noqa: E402
from graft.training.config import (  # noqa: E402
    AdapterConfig,
    CheckpointConfig,
    EmaConfig,
    MemoryConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)
from graft.training.frozen_base.frozen_layer import LayerSpec  # noqa: E402
from graft.training.memory.quantize import plain  # noqa: E402
from graft.training.memory.tensor_counter import LiveTensors  # noqa: E402
from graft.training.memory.weight_store import Store  # noqa: E402
from graft.training.run.execute import execute  # noqa: E402
from graft.training.run.folder import Run  # noqa: E402
from graft.training.run.saved_state import save_state  # noqa: E402

STEPS = 6


class Halved(TinyDataset):
    """Of four micro-batches two count, so that the sum of their gradients does not depend on the order."""

    fingerprint = "halved"

    def batch(self, size, *, seed, index):
        batch = super().batch(size, seed=seed, index=index)
        return replace(batch, weights=torch.full((size,), float(index % 4 < 2)))


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
    "halved": replace(PLAIN, gradient_accumulation=4),
}
SHARDED = {
    "sharded": ("validated", MemoryConfig(base="sharded", checkpointing="none")),
    "sharded-block": ("dropout", MemoryConfig(base="sharded", checkpointing="block")),
    "sharded-halved": ("halved", MemoryConfig(base="sharded", checkpointing="selective")),
}
"""Case -> the one that trains the same with the base in each process, and its memory settings."""
CASES |= {case: replace(CASES[same], memory=memory) for case, (same, memory) in SHARDED.items()}


def go(folder: Path, case: str, *, steps: int = STEPS, on_step=lambda progress, handles: None):
    """Train a case, alone or with others."""
    config = CASES[case]
    validation = TinySamples() if config.validation.every else None
    run = Run(
        folder / case if not distributed.rank() else folder / f"{case}-copy-{distributed.rank()}",
        CheckpointConfig(minutes=1e9),
    )
    data = Halved() if "halved" in case else TinyDataset()
    return execute(
        run, TinyDenoiser(), data, config, None, steps=steps, on_step=on_step, validation=validation
    )


def config_shards(case: str) -> bool:
    return CASES[case].memory.base == "sharded"


class Counted(LiveTensors):
    """Counts a tensor that is still being gathered by its memory, not again by torch's wrapper around it."""

    def _know(self, tensor, size):
        if not isinstance(tensor, AsyncCollectiveTensor):
            super()._know(tensor, size)


def measure_shards(folder: Path) -> None:
    """Fetch every layer of a sharded base, forward and backward; write what it took in bytes."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"blocks.{i}.{name}": torch.randn(96, 64, generator=generator) for i in range(8) for name in "abc"
    }
    order = [*weights, *reversed(weights)]
    for ahead in (False, True):
        with Counted() as live:
            store = Store("sharded", ("blocks.*",), torch.float32, torch.device("cpu"))
            store.shards.ahead = ahead
            fetch = {
                path: store.make_fetch(path, LayerSpec("linear", (96, 64)), plain(weight))
                for path, weight in weights.items()
            }
            kept, live.peak = live.now, live.now
            for path in order:
                assert torch.equal(fetch[path](torch.float32, torch.device("cpu")), weights[path]), path
        store.release()
        total = sum(weight.nbytes for weight in weights.values())
        found = {"kept": kept / total, "peak": live.peak / total, "prefetched": len(store.shards._on_the_way)}
        path = folder / f"shards-{distributed.world()}-{distributed.rank()}-{ahead}.json"
        path.write_text(json.dumps(found))


def main(folder: Path, cases: list[str], doomed: int) -> None:
    """Train the cases; rank 1 is killed after step `doomed`, once."""

    def die(progress, handles):
        if config_shards(case) and not distributed.rank():
            with handles.give_base_back():  # as for samples, which rank 0 alone draws
                pass
        marker = folder / "killed"
        if doomed and progress.step == doomed and distributed.rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    together = (
        distributed.join_processes(torch.device("cpu")) if "WORLD_SIZE" in os.environ else nullcontext()
    )
    with together:
        for case in cases:
            if case == "measure":
                measure_shards(folder)
                continue
            state = go(folder, case, on_step=die).load()
            save_state(state, folder / f"{case}-{distributed.rank()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]))
