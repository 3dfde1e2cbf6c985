"""Images of a run: Loss Plot, Checkpoint Grid."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.comfy.files import trained_lora as output
from ..training.comfy.progress import progress_bar
from ..training.comfy.run import checkpoint_grid as grid
from ..training.comfy.run.notes import family_in, model_file
from ..training.comfy.run.samples import SamplePrompts
from ..training.run.saved_state import StateHandle
from .node import Node
from .sockets import Samples, State, schema


class LossPlot(Node):
    """The loss of a run as an image."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftLossPlot",
            display_name="Loss Plot",
            description="Plot the loss of every step, its mean, and the validation loss.",
            search_aliases=["graft", "graph", "chart", "curve"],
            inputs=[State.Input("state", tooltip="From Train Steps or Load Training State.")],
            outputs=[io.Image.Output("IMAGE")],
        )

    @classmethod
    def execute(cls, state: StateHandle) -> io.NodeOutput:
        return io.NodeOutput(output.images([grid.plot(state)]))


class CheckpointGrid(Node):
    """A run's checkpoints side by side, to choose by eye."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftCheckpointGrid",
            display_name="Checkpoint Grid",
            description="Draw the prompts with evenly spread checkpoints of a run, at one or several "
            "strengths. Checkpoint Settings decide how many checkpoints there are.",
            search_aliases=["graft", "compare", "xy plot", "best"],
            inputs=[
                io.Model.Input("model", tooltip="Base model, without the LoRA."),
                State.Input(
                    "state", tooltip="Last state to draw, with the checkpoints of its run before it."
                ),
                Samples.Input("sample_prompts", tooltip="From Sample Prompts."),
                io.String.Input(
                    "strengths", default="1.0", tooltip="Strengths of the LoRA, separated by commas: 0.5, 1.0"
                ),
                io.Int.Input(
                    "checkpoints",
                    default=6,
                    min=1,
                    max=100,
                    tooltip="Largest number of checkpoints, evenly spread; the last one is always drawn.",
                ),
                io.String.Input(
                    "trigger", default="", tooltip="Trigger word; it replaces [trigger] in prompts."
                ),
            ],
            outputs=[io.Image.Output("IMAGE")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(
        cls, model: Any, state: StateHandle, sample_prompts: SamplePrompts, strengths: str, **values: Any
    ) -> io.NodeOutput:
        with progress_bar() as on_progress:
            page = grid.checkpoint_grid(
                model,
                state,
                sample_prompts,
                grid.parse_strengths(strengths),
                family_in(model_file(cls.hidden.prompt, cls.hidden.unique_id), model),
                on_progress=on_progress,
                **values,
            )
        return io.NodeOutput(output.images([page]))
