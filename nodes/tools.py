"""Measure and compare."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.comfy.denoiser import ComfyDenoiser
from ..training.validation import validation_loss
from .sockets import Dataset, schema


class ValidationLoss(io.ComfyNode):
    """How well a model denoises images it was not trained on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftValidationLoss",
            display_name="Validation Loss",
            description="Mean error of MODEL on held-out images at fixed noise. Compare the base with the "
            "LoRA: lower is better.",
            search_aliases=["graft", "evaluate", "held-out"],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="A base, or a MODEL with a LoRA from Train Steps or Load LoRA."
                ),
                Dataset.Input("dataset", tooltip="Encoded images that were not trained on."),
            ],
            outputs=[io.Float.Output("loss")],
        )

    @classmethod
    def execute(cls, model: Any, dataset: Any) -> io.NodeOutput:
        loss = validation_loss(ComfyDenoiser(model), dataset)
        return io.NodeOutput(loss, ui={"text": [f"validation loss {loss:.5f}"]})
