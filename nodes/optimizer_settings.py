"""Optimizer Settings: optimizer, schedule and moving average. Tooltips are in training/config.py."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.config import EmaConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from ..training.optimizer.rows import OPTIMIZERS
from ..training.optimizer.schedule import SCHEDULES
from .node import Node
from .sockets import Optimizer, OptimizerSettings, schema
from .widgets import in_order, read, widget, widgets

ORDER = (
    "optimizer", "schedule", "warmup_steps", "weight_decay", "max_grad_norm", "gradient_accumulation",
    "floor", "cycles", "power", "ema_decay", "weights", "d_coef", "beta1", "beta2", "eps", "ema_power",
    "package_class", "arguments",
)  # fmt: skip


class OptimizerSettingsNode(Node):
    """How the weights are updated."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            *widgets(OptimizerConfig, optimizer=OPTIMIZERS),
            *widgets(ScheduleConfig, schedule=SCHEDULES),
            *widgets(EmaConfig),
            widget(TrainConfig, "gradient_accumulation"),
        ]
        return schema(
            node_id="GraftOptimizerSettings",
            display_name="Optimizer Settings",
            description="Optimizer, learning-rate schedule, gradient clipping and accumulation, EMA.",
            search_aliases=["graft", "adamw", "prodigy", "schedule", "warmup", "ema"],
            inputs=in_order(inputs, ORDER),
            outputs=[Optimizer.Output("optimizer_settings")],
        )

    @classmethod
    def execute(
        cls, gradient_accumulation: int = TrainConfig.gradient_accumulation, **values: Any
    ) -> io.NodeOutput:
        return io.NodeOutput(
            OptimizerSettings(
                optimizer=read(OptimizerConfig(), values),
                schedule=read(ScheduleConfig(), values),
                ema=read(EmaConfig(), values),
                gradient_accumulation=gradient_accumulation,
            )
        )
