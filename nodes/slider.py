"""Slider From Words, Slider From Pairs: a LoRA with two directions. Tooltips are in training/data/."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training import data
from ..training.data.slider import pair_images, slide_words
from ..training.data.slider_words import SliderWords
from .node import Node
from .sockets import Dataset, require_images, schema
from .widgets import widgets

ALIASES = ["graft", "concept slider", "leco", "strength"]


class SliderFromWords(Node):
    """A slider between two texts: any images of the neutral text serve."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftSliderFromWords",
            display_name="Slider From Words",
            description="Train a LoRA that goes from one text at strength -1 to another at 1. Any images of "
            "the neutral text serve, also those that the model itself draws.",
            search_aliases=ALIASES,
            inputs=[
                Dataset.Input("dataset", tooltip="Images of the neutral text, before Encode Dataset."),
                *widgets(SliderWords),
            ],
            outputs=[Dataset.Output("slider", display_name="dataset")],
        )

    @classmethod
    def execute(cls, dataset: Any, **values: Any) -> io.NodeOutput:
        words = SliderWords(**values)
        text = f"slider: {words.negative.strip()!r} at -1, {words.positive.strip()!r} at 1"
        return io.NodeOutput(slide_words(require_images(dataset), words), ui={"text": [text]})


class SliderFromPairs(Node):
    """A slider between two sets of images that differ in one property."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftSliderFromPairs",
            display_name="Slider From Pairs",
            description="Train a LoRA that goes from one image of each pair, at strength -1, to the other, "
            "at strength 1.",
            search_aliases=ALIASES,
            inputs=[
                Dataset.Input("positive", tooltip="Images with the property, before Encode Dataset."),
                Dataset.Input(
                    "negative",
                    tooltip="The same images without it: equal file names, sizes and captions.",
                ),
            ],
            outputs=[Dataset.Output("slider", display_name="dataset")],
        )

    @classmethod
    def execute(cls, positive: Any, negative: Any) -> io.NodeOutput:
        ends = require_images(positive, "positive"), require_images(negative, "negative")
        images = pair_images(*ends)
        text = f"slider: {images.pairs} pairs\n{data.summary(images)}"
        return io.NodeOutput(images, ui={"text": [text]})
