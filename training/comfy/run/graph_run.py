"""A run as a Train Steps of a queued graph asks for it: where it is kept, its notes, how it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ... import distributed
from ...config import CheckpointConfig, TrainConfig
from ...family import Family
from ...files.lora.metadata import run_metadata
from ...loop import STOP, Handles, Progress
from ...model import Samples
from ...run.checkpoints import Checkpoints, States
from ...run.execute import execute, run_key
from ...run.folder import Run
from ...run.queued import note_queued, run_settings
from ...run.restarts import restart_notes
from ...run.saved_state import StateHandle
from .. import paths
from ..model.denoiser import ComfyDenoiser
from . import workers
from .notes import family_in, model_file, run_notes
from .samples import SamplePrompts, SampleWriter
from .session import Show, show_run
from .shown_run import added_inputs


@dataclass(frozen=True)
class QueuedNode:
    """The node that asks, and the graph that it stands in."""

    id: str | None
    prompt: Mapping[str, Any] | None
    """The graph in API form."""
    extra: Mapping[str, Any]
    """What a client sent along; the editor sends "workflow"."""

    @classmethod
    def of(cls, hidden: Any) -> QueuedNode:
        """Return what the hidden inputs of a node say, whatever a client sent as `extra_pnginfo`."""
        extra = hidden.extra_pnginfo
        return cls(hidden.unique_id, hidden.prompt, extra if isinstance(extra, dict) else {})

    @property
    def workflow(self) -> str | None:
        """The id of the workflow that came with the prompt, whatever a client sent as one."""
        workflow = self.extra.get("workflow")
        found = workflow.get("id") if isinstance(workflow, dict) else None
        return found if isinstance(found, str) else None

    @cached_property
    def settings(self) -> str:
        """What the editor knows the run of this node by."""
        return run_settings(self.prompt or {}, self.id, added_inputs)


@dataclass(frozen=True)
class GraphRun:
    """What is to be trained, and for whom."""

    node: QueuedNode
    name: str
    denoiser: ComfyDenoiser
    dataset: Any
    config: TrainConfig
    start: StateHandle | None
    steps: int
    """To add to `start`."""
    validation: Samples | None = None
    prompts: SamplePrompts | None = None
    saving: CheckpointConfig = CheckpointConfig()
    tensorboard: bool = False
    gpus: int = 1

    @property
    def first(self) -> int:
        return self.start.step if self.start else 0

    @property
    def last(self) -> int:
        return self.first + self.steps

    @cached_property
    def folder(self) -> Path:
        """Where the run is kept. Raises UserError for a name that cannot be one."""
        key = run_key(self.denoiser, self.dataset, self.config, self.start, self.validation)
        return paths.run_folder(self.name, key)

    @cached_property
    def family(self) -> Family:
        """The base model's, as its file's name tells it."""
        return family_in(model_file(self.node.prompt, self.node.id), self.denoiser.patcher)

    def notes(self, total: int) -> list[str]:
        """Return a sentence for all that is unusual, of a run that is to be `total` steps long in the end."""
        sizes = self.dataset.index.buckets
        found = run_notes(self.denoiser, self.config, self.family, max(total, self.last), sizes)
        found += self.prompts.notes(self.family) if self.prompts else []
        return found + restart_notes(Run(self.folder), self.config, self.start, self.last)

    def train(self) -> StateHandle:
        """Return the state that the run hands on, training what of it is not there yet.

        Raises what `run.execute` and `workers.train` raise.
        """
        workers.require_same_run(self.node.id, self.folder.name)
        if workers.trained_before(self.node.id):
            return Checkpoints(Run(self.folder)).find_result(self.start, self.last, self.config)
        with show_run(
            paths.run_name(self.folder),
            first=self.first,
            last=self.last,
            node_id=self.node.id,
            workflow=self.node.workflow,
            settings=self.node.settings,
        ) as show:
            steps = self._steps_done_elsewhere(show) if self._takes_several else self.steps
            samples = self._samples()

            def on_start(states: States) -> None:
                note_queued(self.folder, self.node.settings, self.last)
                if samples:
                    samples.on_start(states)

            def on_step(progress: Progress, handles: Handles) -> str | None:
                outcome = show(progress)
                if samples and outcome != STOP:
                    samples.draw_if_due(progress.step, handles)
                return outcome

            return execute(
                Run(paths.own_folder(self.folder), self.saving, self.tensorboard),
                self.denoiser,
                self.dataset,
                self.config,
                self.start,
                steps=steps,
                on_start=on_start,
                on_step=on_step,
                notes=run_metadata(
                    self.config, self.dataset, self.denoiser.family, self.denoiser.sampling, name=self.name
                ),
                validation=self.validation,
            )

    @property
    def _takes_several(self) -> bool:
        """Whether this process has others train on several cards, being none of them itself."""
        return self.gpus > 1 and distributed.world() == 1

    def _steps_done_elsewhere(self, show: Show) -> int:
        run, node = Run(self.folder), self.node
        return workers.train(run, node.prompt or {}, node.id, self.gpus, self.first, self.last, show)

    def _samples(self) -> SampleWriter | None:
        if self.prompts is None:
            return None
        return SampleWriter(
            self.prompts,
            self.denoiser.patcher,
            self.family,
            self.folder / "samples",
            first=self.first,
            last=self.last,
            trigger=self.dataset.trigger,
            node_id=self.node.id,
            metadata={"prompt": self.node.prompt, **self.node.extra},
        )
