"""The run that a Train Steps of a queued graph asks for: its folder, its notes and its training."""

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
from ...run.new_run_notes import new_run_notes
from ...run.queued import note_queued, run_settings
from ...run.saved_state import StateHandle
from ...run.watch import SAVE
from .. import paths
from ..model.denoiser import ComfyDenoiser
from . import workers
from .chart_run import added_inputs
from .loader_faults import require_applied
from .notes import family_in, model_file, run_notes, unseen_notes
from .run_graph import note_graph
from .sample_model import require_same_layers
from .samples import SamplePrompts, SampleWriter
from .session import Show, show_run, take_request


@dataclass(frozen=True)
class QueuedNode:
    """A node and the graph it was queued in."""

    id: str | None
    prompt: Mapping[str, Any] | None
    """The graph in API form."""
    extra: Mapping[str, Any]
    """Extra data from the client; the editor sends "workflow"."""

    @classmethod
    def of(cls, hidden: Any) -> QueuedNode:
        """Return the node that its hidden inputs describe, whatever a client sent as `extra_pnginfo`."""
        extra = hidden.extra_pnginfo
        return cls(hidden.unique_id, hidden.prompt, extra if isinstance(extra, dict) else {})

    @property
    def workflow(self) -> str | None:
        """The id of the workflow that came with the prompt; None if a client sent something else."""
        workflow = self.extra.get("workflow")
        workflow_id = workflow.get("id") if isinstance(workflow, dict) else None
        return workflow_id if isinstance(workflow_id, str) else None

    @cached_property
    def settings(self) -> str:
        """The digest by which the editor knows the run of this node."""
        return run_settings(self.prompt or {}, self.id, added_inputs)


@dataclass(frozen=True)
class GraphRun:
    """What to train, and for which node."""

    node: QueuedNode
    name: str
    denoiser: ComfyDenoiser
    dataset: Any
    config: TrainConfig
    start: StateHandle | None
    steps: int
    """Steps to add to `start`."""
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
        """The folder of the run. Raises UserError for a name that cannot be a folder's."""
        key = run_key(self.denoiser, self.dataset, self.config, self.start, self.validation)
        return paths.run_folder(self.name, key)

    @cached_property
    def family(self) -> Family:
        """The family of the base, as the name of its file tells it."""
        return family_in(model_file(self.node.prompt, self.node.id), self.denoiser.patcher)

    def notes(self, total: int) -> list[str]:
        """Return a sentence for everything unusual about this run; it will have `total` steps in the end."""
        buckets = self.dataset.index.buckets if self.dataset.has_pixels else ()
        sizes = [bucket[:2] for bucket in buckets if len(bucket) > 1]  # sounds have a length alone
        notes = run_notes(self.denoiser, self.config, self.family, max(total, self.last), sizes)
        notes += self.prompts.notes(self.family) if self.prompts else []
        if not self.dataset.has_pixels:
            notes += unseen_notes(self.denoiser, self.dataset.sample(0))
        return notes + new_run_notes(Run(self.folder), self.config, self.start, self.last)

    def train(self) -> StateHandle:
        """Return the state that the run hands on, training only what is missing.

        Raises as `run.execute` and `workers.train` do.
        """
        require_applied(self.config.adapter)
        if self.prompts and self.prompts.model is not None:
            require_same_layers(self.prompts.model, self.denoiser, self.config.adapter)
        workers.require_same_run(self.node.id, self.folder.name)
        if workers.trained_before(self.node.id):
            return Checkpoints(Run(self.folder)).find_result(self.start, self.last, self.config)
        name = paths.run_name(self.folder)
        with show_run(
            name,
            first=self.first,
            last=self.last,
            node_id=self.node.id,
            workflow=self.node.workflow,
            settings=self.node.settings,
            can=self._can,
        ) as show:
            steps = self._train_in_workers(show) if self._needs_workers else self.steps
            samples = self._sample_writer()

            def on_start(states: States) -> None:
                note_queued(self.folder, self.node.settings, self.last)
                note_graph(self.folder, self.node.id, self.node.prompt, self.node.extra.get("workflow"))
                if samples:
                    samples.on_start(states)

            def on_step(progress: Progress, handles: Handles) -> str | None:
                if show(progress) == STOP:
                    return STOP
                if samples:
                    samples.draw_if_due(progress.step, handles, now=take_request(name, "draw"))
                return SAVE if take_request(name, "save") else None

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
    def _can(self) -> tuple[str, ...]:
        """What this run does on request: nothing where other processes train it."""
        if self._needs_workers:
            return ()
        return ("draw", "save") if self.prompts else ("save",)

    @property
    def _needs_workers(self) -> bool:
        """Whether this process starts others to train on several GPUs, and is not one of them."""
        return self.gpus > 1 and distributed.world() == 1

    def _train_in_workers(self, show: Show) -> int:
        """Return how many steps they did."""
        run, node = Run(self.folder), self.node
        return workers.train(run, node.prompt or {}, node.id, self.gpus, self.first, self.last, show)

    def _sample_writer(self) -> SampleWriter | None:
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
