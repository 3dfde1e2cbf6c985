"""What a run looks like: Sample Prompts, Loss Plot, Checkpoint Grid."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.comfy.files import trained_lora as output
from ..training.comfy.run import checkpoint_grid as grid
from ..training.comfy.run.notes import family_in, model_file
from ..training.comfy.run.samples import SAMPLERS, SCHEDULERS, SamplePrompts
from ..training.comfy.run.session import progress_bar
from ..training.run.saved_state import StateHandle
from .node import Node
from .sockets import Samples, State, schema
from .widgets import lines, seed_input, widget


class SamplePromptsNode(Node):
    """What to draw while a LoRA is trained, or to compare its checkpoints by."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftSamplePrompts",
            display_name="Sample Prompts",
            description="Draw pictures during training, with ComfyUI's own sampler. They appear on Train "
            "Steps and in the run's folder, and change nothing in what is trained.",
            search_aliases=["graft", "preview", "sample", "validation prompt"],
            inputs=[
                io.Clip.Input("clip"),
                io.Vae.Input("vae"),
                io.String.Input(
                    "prompts",
                    multiline=True,
                    default="",
                    tooltip="One a line. [trigger] stands for the dataset's trigger word.",
                ),
                io.String.Input(
                    "negative", default="", multiline=True, tooltip="What the pictures should not show."
                ),
                widget(SamplePrompts, "every", "Optimizer steps between two sets of pictures; 0 draws none."),
                widget(
                    SamplePrompts,
                    "before_training",
                    "Draw a first set before the first step, to compare with.",
                ),
                io.Int.Input(
                    "width", default=1024, min=16, max=16384, step=16, tooltip="Of a picture, in pixels."
                ),
                io.Int.Input(
                    "height", default=1024, min=16, max=16384, step=16, tooltip="Of a picture, in pixels."
                ),
                widget(SamplePrompts, "steps", "Of the sampler.", low=1, high=10000),
                widget(
                    SamplePrompts,
                    "cfg",
                    "Guidance. 0 takes what suits the model: 1 for those distilled for it, such as Flux and "
                    "Turbo models, 4 for others.",
                    high=100,
                    step=0.1,
                ),
                io.Combo.Input(
                    "sampler", options=SAMPLERS, default="euler", tooltip="As in KSampler; euler suits most."
                ),
                io.Combo.Input(
                    "scheduler",
                    options=SCHEDULERS,
                    default="simple",
                    tooltip="As in KSampler: how the steps are spread over the noise.",
                ),
                seed_input("The same seed gives every set the same noise."),
                widget(
                    SamplePrompts,
                    "walk_seed",
                    "Another seed for every set. Otherwise sets differ by the training alone.",
                ),
                widget(
                    SamplePrompts,
                    "guidance",
                    "Guidance input of guidance-distilled models (Flux Dev), as Flux Guidance sets it; "
                    "-1 leaves the model's, 3.5 for Flux Dev.",
                    low=-1,
                    high=100,
                    step=0.1,
                ),
            ],
            outputs=[Samples.Output("sample_prompts")],
        )

    @classmethod
    def execute(cls, clip: Any, vae: Any, prompts: str, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(SamplePrompts(clip, vae, lines(prompts), **values))


class LossPlot(Node):
    """The course of a run as a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftLossPlot",
            display_name="Loss Plot",
            description="Draw the loss of every step, its mean, and the loss on held-out images.",
            search_aliases=["graft", "graph", "chart", "curve"],
            inputs=[State.Input("state")],
            outputs=[io.Image.Output("IMAGE")],
        )

    @classmethod
    def execute(cls, state: StateHandle) -> io.NodeOutput:
        return io.NodeOutput(output.images([grid.plot(state)]))


class CheckpointGrid(Node):
    """A run's checkpoints beside one another, to choose by eye."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftCheckpointGrid",
            display_name="Checkpoint Grid",
            description="Draw the prompts with checkpoints of a run, evenly spread, at one or several "
            "strengths. Checkpoint Settings say how many are kept.",
            search_aliases=["graft", "compare", "xy plot", "best"],
            inputs=[
                io.Model.Input("model", tooltip="The base, without the LoRA."),
                State.Input("state", tooltip="Its run's checkpoints up to it are drawn."),
                Samples.Input("sample_prompts"),
                io.String.Input(
                    "strengths", default="1.0", tooltip="Strengths of the LoRA, with commas: 0.5, 1.0"
                ),
                io.Int.Input(
                    "checkpoints",
                    default=6,
                    min=1,
                    max=100,
                    tooltip="At most so many, evenly spread; the last one is among them.",
                ),
                io.String.Input("trigger", default="", tooltip="Takes the place of [trigger] in prompts."),
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
