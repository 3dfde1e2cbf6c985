"""The folder of a run, and the places of its files.

It holds `config.json`, `objective.json`, `queued.json`, `graph.json`, `log.jsonl`, `log.csv`, `lock`,
`checkpoints/step-<n>/`, LoRAs in `loras/`, sample images in `samples/` and, if the settings ask for them,
`log.sqlite` and `tensorboard/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..config import CheckpointConfig
from .saved_state import StateHandle


@dataclass(frozen=True)
class Run:
    """Where a run keeps its files, and how often it saves."""

    folder: Path
    """<output>/graft/<name>-<key>"""
    saving: CheckpointConfig = field(default_factory=CheckpointConfig)
    tensorboard: bool = False

    @classmethod
    def of(cls, handle: StateHandle) -> Run | None:
        """Return the run that a state is a checkpoint of; None for a state that was saved elsewhere."""
        folder = handle.path.parent
        return cls(folder.parent) if folder.name == "checkpoints" else None

    @property
    def name(self) -> str:
        """The folder's name without the key."""
        return self.folder.name.rpartition("-")[0]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def lora(self, step: int) -> Path:
        return self.folder / "loras" / f"{self.name}-{step:06d}.safetensors"

    def is_regular(self, step: int) -> bool:
        """Return whether the settings ask for a checkpoint at this step."""
        return bool(self.saving.steps) and step % self.saving.steps == 0
