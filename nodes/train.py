"""Train Steps: state in, new state out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from ..training import distributed
from ..training.comfy.files import trained_lora as output
from ..training.comfy.files.initial_lora import save_initial_state
from ..training.comfy.model.denoiser import ComfyDenoiser
from ..training.comfy.run import workers
from ..training.comfy.run.graph_run import GraphRun, QueuedNode
from ..training.comfy.run.samples import SamplePrompts
from ..training.config import (
    AdapterConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)
from ..training.family import Family
from ..training.log import log
from ..training.run.saved_state import StateHandle
from .node import Node
from .sockets import (
    Checkpoints,
    Dataset,
    HeldOut,
    Memory,
    Objective,
    Optimizer,
    OptimizerSettings,
    Samples,
    Saving,
    State,
    Validation,
    require_encoded,
    schema,
    start_input,
    trained_clip,
)
from .widgets import seed_input, widget

SETTINGS = {
    "optimizer": (Optimizer, "From Optimizer Settings; without it, AdamW at a constant learning rate."),
    "objective": (Objective, "From Objective Settings; without it, the model's own noise levels and loss."),
    "memory": (Memory, "From Memory Settings; without it, the fastest plan that fits this device."),
    "validation": (Validation, "From Validation Settings; without it, nothing is measured."),
    "checkpoint": (
        Checkpoints,
        "From Checkpoint Settings; without it, a checkpoint every 250 steps and every five minutes.",
    ),
}
"""Sockets for settings, with their tooltips."""


class TrainSteps(Node):
    """Add optimizer steps to a run. Equal inputs give equal states; a finished run is not trained again."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftTrainSteps",
            display_name="Train Steps",
            description="Train the LoRA for some steps. Cancel saves the progress: queue again to continue.",
            search_aliases=["graft", "train", "lora", "finetune"],
            inputs=[
                io.Model.Input("model", tooltip="Base model; it is not changed."),
                Dataset.Input("dataset", tooltip="From Encode Dataset."),
                start_input(),
                io.Int.Input("steps", default=1000, min=1, max=1000000, tooltip="Training steps to add."),
                widget(ScheduleConfig, "total_steps"),
                widget(OptimizerConfig, "learning_rate"),
                widget(TrainConfig, "batch_size"),
                seed_input("The same seed and settings give the same LoRA; on a GPU, up to rounding."),
                io.String.Input(
                    "name", default="my_lora", tooltip="Name of the run's folder under output/graft."
                ),
                *(
                    socket.Input(f"{name}_settings", optional=True, tooltip=tooltip)
                    for name, (socket, tooltip) in SETTINGS.items()
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="CLIP to output with the LoRA's text encoder part, if it has one.",
                ),
                Samples.Input(
                    "sample_prompts", optional=True, tooltip="Sample images to draw during training."
                ),
                io.Int.Input(
                    "gpus",
                    default=1,
                    min=1,
                    max=64,
                    optional=True,
                    tooltip="Number of GPUs to train on. Each takes batches of its own, so a step sees that "
                    "many times more images. Not on Windows.",
                ),
            ],
            outputs=[
                io.Model.Output("MODEL", tooltip="The base with the trained LoRA, ready for KSampler."),
                io.Clip.Output("CLIP"),
                State.Output("state", tooltip="To continue training, or to save."),
                io.LoraModel.Output("LORA_MODEL", display_name="LoRA weights"),
                io.LossMap.Output("LOSS_MAP", display_name="losses"),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo, io.Hidden.prompt],
            not_idempotent=False,
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        dataset: Any,
        start: AdapterConfig | StateHandle,
        steps: int,
        total_steps: int,
        learning_rate: float,
        batch_size: int,
        seed: int,
        name: str,
        optimizer_settings: OptimizerSettings | None = None,
        objective_settings: ObjectiveConfig | None = None,
        memory_settings: MemoryConfig | None = None,
        validation_settings: HeldOut | None = None,
        checkpoint_settings: Saving | None = None,
        clip: Any = None,
        sample_prompts: SamplePrompts | None = None,
        gpus: int = 1,
    ) -> io.NodeOutput:
        adapter = start.adapter if isinstance(start, StateHandle) else start
        dataset = require_encoded(dataset)
        denoiser = ComfyDenoiser(model, trained_clip(adapter, clip, dataset))
        resumed, left_out = (
            (start, []) if isinstance(start, StateHandle) else save_initial_state(denoiser, adapter, seed)
        )
        chosen = optimizer_settings or OptimizerSettings()
        held_out = validation_settings or HeldOut(ValidationConfig(), None)
        saving = checkpoint_settings or Saving()
        node = QueuedNode.of(cls.hidden)
        processes = gpus if workers.trained_before(node.id) else max(gpus, distributed.world())
        last = steps + (resumed.step if resumed else 0)
        config = TrainConfig(
            batch_size=batch_size,
            gradient_accumulation=chosen.gradient_accumulation * processes,
            seed=seed,
            adapter=resumed.adapter if resumed else adapter,
            optimizer=replace(chosen.optimizer, lr=learning_rate),
            schedule=_over(chosen.schedule, total_steps or last),
            objective=objective_settings or ObjectiveConfig(),
            memory=memory_settings or MemoryConfig(),
            ema=chosen.ema,
            validation=held_out.config,
        )
        run = GraphRun(
            node,
            name,
            denoiser,
            dataset,
            config,
            resumed,
            steps,
            validation=held_out.samples,
            prompts=sample_prompts,
            saving=saving.config,
            tensorboard=saving.tensorboard,
            gpus=gpus,
        )
        notes = run.notes(total_steps)
        for note in notes:
            log.warning("%s", note)
        return _outputs(model, clip, denoiser.family, run.train(), [run.folder.name, *notes, *left_out])


def _outputs(
    model: Any, clip: Any, family: Family, handle: StateHandle, lines: Sequence[str]
) -> io.NodeOutput:
    """Return the outputs for a trained state; the node shows the step reached, the loss and `lines`."""
    state = handle.load()
    patched, patched_clip = output.with_lora(model, clip, state, family)
    lora, losses = output.lora_model(state, family), output.loss_map(state)
    recent = state.losses[-20:]
    reached = f"step {state.step}, loss {sum(recent) / len(recent):.4f}"
    return io.NodeOutput(
        patched, patched_clip, handle, lora, losses, ui={"text": ["\n".join([reached, *lines])]}
    )


def _over(schedule: ScheduleConfig, total: int) -> ScheduleConfig:
    """Return the schedule over `total` steps; a constant one has no length, so a longer run can go on."""
    return schedule if schedule.name == "constant" else replace(schedule, total_steps=total)
