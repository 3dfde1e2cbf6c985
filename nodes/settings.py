"""Optional settings, one frozen value a node. Without them the model's family decides."""

from __future__ import annotations

from comfy_api.latest import io

from ..training.config import MemoryConfig, ObjectiveConfig, OptimizerConfig, ScheduleConfig
from ..training.objective import SIGMAS
from ..training.optimizer import OPTIMIZERS
from ..training.schedule import SCHEDULES
from .sockets import Memory, Objective, Optimizer, schema


class OptimizerSettings(io.ComfyNode):
    """How the weights move."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftOptimizerSettings",
            display_name="Optimizer Settings",
            description="Optimizer, learning-rate schedule, clipping and accumulation.",
            search_aliases=["graft", "adamw", "schedule", "warmup"],
            inputs=[
                io.Combo.Input("optimizer", options=list(OPTIMIZERS), default="adamw", tooltip="AdamW suits most LoRAs."),
                io.Combo.Input(
                    "schedule",
                    options=list(SCHEDULES),
                    default="constant",
                    tooltip="Course of the learning rate over the total steps of the run.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    default=0,
                    min=0,
                    max=100000,
                    tooltip="Steps over which the learning rate rises from 0 to its full value.",
                ),
                io.Float.Input(
                    "weight_decay",
                    default=0.01,
                    min=0.0,
                    max=1.0,
                    step=0.001,
                    tooltip="Pull of the weights towards 0 per step, times the learning rate.",
                ),
                io.Float.Input(
                    "max_grad_norm",
                    default=1.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    tooltip="Gradients longer than this are scaled down to it; 0 switches clipping off.",
                ),
                io.Int.Input(
                    "gradient_accumulation",
                    default=1,
                    min=1,
                    max=1024,
                    tooltip="Batches whose gradients are averaged into one step: a larger batch without its memory.",
                ),
            ],
            outputs=[Optimizer.Output("optimizer_settings")],
        )

    @classmethod
    def execute(
        cls,
        optimizer: str,
        schedule: str,
        warmup_steps: int,
        weight_decay: float,
        max_grad_norm: float,
        gradient_accumulation: int,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            (
                OptimizerConfig(optimizer, weight_decay=weight_decay, max_grad_norm=max_grad_norm),
                ScheduleConfig(schedule, warmup_steps=warmup_steps),
                gradient_accumulation,
            )
        )


class ObjectiveSettings(io.ComfyNode):
    """Which noise levels are practised."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftObjectiveSettings",
            display_name="Objective Settings",
            description="How noise levels are drawn during training.",
            search_aliases=["graft", "timestep", "sigma", "shift"],
            inputs=[
                io.Combo.Input(
                    "sigmas",
                    options=["auto", *SIGMAS],
                    default="auto",
                    tooltip="Distribution of noise levels; auto takes what suits the model's family.",
                ),
                io.Float.Input(
                    "shift",
                    default=0.0,
                    min=0.0,
                    max=20.0,
                    step=0.1,
                    tooltip="Above 1 favours high noise: composition over detail. 0 takes the family's value.",
                ),
            ],
            outputs=[Objective.Output("objective_settings")],
        )

    @classmethod
    def execute(cls, sigmas: str, shift: float) -> io.NodeOutput:
        return io.NodeOutput(ObjectiveConfig(sigmas=sigmas, shift=shift))


class MemorySettings(io.ComfyNode):
    """Precision, and what is kept or recomputed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftMemorySettings",
            display_name="Memory Settings",
            description="Number format of the forward pass, and gradient checkpointing.",
            search_aliases=["graft", "vram", "bf16", "checkpointing"],
            inputs=[
                io.Combo.Input(
                    "precision",
                    options=["auto", "bf16", "fp16", "fp32"],
                    default="auto",
                    tooltip="Number format of the forward pass. The LoRA's own weights are always kept in fp32.",
                ),
                io.Combo.Input(
                    "checkpointing",
                    options=["auto", "none", "block"],
                    default="auto",
                    tooltip="block recomputes each block in the backward pass: a third more time, far less memory. "
                    "auto does so on a GPU.",
                ),
            ],
            outputs=[Memory.Output("memory_settings")],
        )

    @classmethod
    def execute(cls, precision: str, checkpointing: str) -> io.NodeOutput:
        return io.NodeOutput(MemoryConfig(dtype=precision, checkpointing=checkpointing))  # type: ignore[arg-type]
