"""Measure and compare."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.adapters.select import select
from ..training.comfy.model.denoiser import ComfyDenoiser
from ..training.comfy.progress import progress_bar
from ..training.config import AdapterConfig, MemoryConfig, ObjectiveConfig, TrainConfig
from ..training.memory.plan import every_plan
from ..training.memory.plan_table import tabulate_plans
from ..training.objective.parts import with_largest_parts
from ..training.run.saved_state import StateHandle
from ..training.validation import validation_loss
from .node import Node
from .sockets import (
    Dataset,
    Memory,
    Objective,
    Optimizer,
    OptimizerSettings,
    require_encoded,
    schema,
    start_input,
    trained_clip,
)
from .widgets import widget


class ValidationLoss(Node):
    """How well a model denoises held-out images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftValidationLoss",
            display_name="Validation Loss",
            description="Measure the loss of MODEL on held-out images at fixed noise. Compare the base with "
            "the LoRA: lower is better.",
            search_aliases=["graft", "evaluate", "held-out"],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="Base model, or a MODEL with a LoRA from Train Steps or Load LoRA."
                ),
                Dataset.Input("dataset", tooltip="Encoded held-out images, from Split Dataset."),
            ],
            outputs=[io.Float.Output("loss")],
        )

    @classmethod
    def execute(cls, model: Any, dataset: Any) -> io.NodeOutput:
        with progress_bar() as on_progress:
            loss = validation_loss(ComfyDenoiser(model), require_encoded(dataset), on_progress=on_progress)
        return io.NodeOutput(loss, ui={"text": [f"validation loss {loss:.5f}"]})


class MemoryPlan(Node):
    """Memory and time of a training step, by memory plan."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftMemoryPlan",
            display_name="Memory Plan",
            description="Estimate the peak memory and time of a training step for every memory plan, "
            "corrected by one measured step. Nothing is trained.",
            search_aliases=["graft", "vram", "out of memory", "fits"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="Base model, as for Train Steps."),
                Dataset.Input("dataset", tooltip="From Encode Dataset; its largest bucket counts."),
                start_input(),
                widget(TrainConfig, "batch_size"),
                Optimizer.Input(
                    "optimizer_settings",
                    optional=True,
                    tooltip="Optimizers differ in the size of their state.",
                ),
                Memory.Input("memory_settings", optional=True, tooltip="Precision and budget count here."),
                io.Clip.Input("clip", optional=True, tooltip="CLIP, if the LoRA trains the text encoders."),
                Objective.Input(
                    "objective_settings", optional=True, tooltip="Preservation takes passes of its own."
                ),
            ],
            outputs=[io.String.Output("plan")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        dataset: Any,
        start: AdapterConfig | StateHandle,
        batch_size: int,
        optimizer_settings: OptimizerSettings | None = None,
        memory_settings: MemoryConfig | None = None,
        clip: Any = None,
        objective_settings: ObjectiveConfig | None = None,
    ) -> io.NodeOutput:
        adapter = start.adapter if isinstance(start, StateHandle) else start
        chosen = optimizer_settings or OptimizerSettings()
        config = TrainConfig(
            batch_size=batch_size,
            gradient_accumulation=chosen.gradient_accumulation,
            adapter=adapter,
            optimizer=chosen.optimizer,
            schedule=chosen.schedule,
            objective=objective_settings or ObjectiveConfig(),
            memory=memory_settings or MemoryConfig(),
            ema=chosen.ema,
        )
        denoiser = ComfyDenoiser(model, trained_clip(adapter, clip))
        adapted = select(denoiser.specs, denoiser.family, adapter)
        batch = with_largest_parts(require_encoded(dataset).largest_batch(batch_size), config.objective)
        text = tabulate_plans(denoiser, adapted, config, batch, every_plan())
        return io.NodeOutput(text, ui={"text": [text]})
