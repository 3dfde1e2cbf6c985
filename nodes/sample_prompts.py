"""Sample Prompts: images to draw during training. Tooltips are in training/config.py."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.comfy.run.notes import model_file
from ..training.comfy.run.samples import SAMPLERS, SCHEDULERS, SamplePrompts
from ..training.config import SampleConfig
from .node import Node
from .sockets import Samples, schema
from .widgets import in_order, lines, seed_input, widgets

ORDER = (
    "negative", "every", "before_training", "width", "height", "steps", "cfg", "sampler", "scheduler", "seed",
    "walk_seed", "guidance",
)  # fmt: skip
REFERENCE = "Reference images for a model that edits: one per prompt, or one for all."
FIRST_IMAGE = (
    "Reference images for a model that edits, or first frames for image to video: one per prompt, or one for "
    "all."
)


class SamplePromptsNode(Node):
    """Sample images to draw during training, or to compare checkpoints with."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        seed = seed_input("The same seed gives every set the same noise.")
        return schema(
            node_id="GraftSamplePrompts",
            display_name="Sample Prompts",
            description="Draw sample images during training, with ComfyUI's own sampler. They appear on "
            "Train Steps and in the run's folder, and do not affect the training.",
            search_aliases=["graft", "preview", "sample", "validation prompt"],
            inputs=[
                io.Clip.Input("clip", tooltip="The text encoders."),
                io.Vae.Input("vae", tooltip="The VAE."),
                io.String.Input(
                    "prompts",
                    multiline=True,
                    default="",
                    tooltip="Prompts, one per line. [trigger] stands for the dataset's trigger word.",
                ),
                *in_order([*widgets(SampleConfig, sampler=SAMPLERS, scheduler=SCHEDULERS), seed], ORDER),
                *(
                    io.Image.Input(
                        f"image{number}",
                        optional=True,
                        tooltip=tooltip,
                    )
                    for number, tooltip in enumerate((FIRST_IMAGE, REFERENCE, REFERENCE), 1)
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Draw with this model and the LoRA, not with the one that is trained: its Turbo "
                    "version, the model without an assistant LoRA, the other expert of Wan 2.2.",
                ),
            ],
            outputs=[Samples.Output("sample_prompts")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(
        cls,
        clip: Any,
        vae: Any,
        prompts: str,
        image1: Any = None,
        image2: Any = None,
        image3: Any = None,
        model: Any = None,
        **values: Any,
    ) -> io.NodeOutput:
        images = tuple(image for image in (image1, image2, image3) if image is not None)
        file = model_file(cls.hidden.prompt, cls.hidden.unique_id)
        drawing = {"images": images, "model": model, "model_file": file}
        return io.NodeOutput(SamplePrompts(clip, vae, lines(prompts), **drawing, **values))
