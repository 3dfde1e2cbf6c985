"""Dataset From Latents: what stock nodes encoded, as Encode Dataset gives it out."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training import data
from ..training.comfy import paths
from ..training.comfy.model.conditioning import read_conditioning
from ..training.comfy.model.stock_dataset import read_samples
from ..training.comfy.progress import progress_bar
from ..training.data.config import DatasetConfig
from .node import Node
from .sockets import Dataset, schema
from .widgets import read, widget

WIDGETS = ("repeats", "caption_dropout", "weight", "outside_mask")


class DatasetFromLatents(Node):
    """Latents and conditioning that stock nodes made, as a dataset: whatever ComfyUI can condition on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftDatasetFromLatents",
            display_name="Dataset From Latents",
            description="Train on latents and conditioning from stock nodes, such as Make Training Dataset "
            "or Reference Latent.",
            search_aliases=["graft", "latents", "conditioning", "edit", "reference", "training dataset"],
            is_input_list=True,  # lists from stock nodes are one dataset and not many
            inputs=[
                io.Latent.Input(
                    "latents", tooltip="One or more latents; their masks, if any, become loss masks."
                ),
                io.Conditioning.Input(
                    "conditioning", tooltip="One conditioning per latent, in their order, or one for all."
                ),
                *(widget(DatasetConfig, name, optional=False) for name in WIDGETS),
                io.Conditioning.Input(
                    "empty_caption",
                    optional=True,
                    tooltip="Conditioning of an empty text, which caption_dropout trains in place of the "
                    "caption.",
                ),
                io.String.Input(
                    "captions",
                    optional=True,
                    force_input=True,
                    tooltip="Captions, one per latent or one for all; only needed to train text encoders.",
                ),
                io.Mask.Input("masks", optional=True, tooltip="Masks: white is trained, black is not."),
            ],
            outputs=[Dataset.Output("dataset_encoded", display_name="dataset")],
        )

    @classmethod
    def execute(
        cls,
        latents: list[Any],
        conditioning: list[Any],
        empty_caption: list[Any] | None = None,
        captions: list[str] | None = None,
        masks: list[Any] | None = None,
        **widgets: list[Any],
    ) -> io.NodeOutput:
        config = read(DatasetConfig(), {name: values[0] for name, values in widgets.items()})
        dropped = read_conditioning(empty_caption[0], "empty_caption") if empty_caption else None
        samples = read_samples(latents, conditioning, captions or (), masks or ())
        with progress_bar() as on_progress:
            dataset = data.from_latents(
                samples, paths.cache_folder(), config, dropped=dropped, on_progress=on_progress
            )
        return io.NodeOutput(dataset, ui={"text": [data.report(dataset)]})
