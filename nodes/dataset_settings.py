"""Dataset Settings: what Load Dataset leaves at its default. Tooltips are in training/data/config.py."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.data.config import DatasetConfig
from .node import Node
from .sockets import DatasetSettings, schema
from .widgets import in_order, read, widgets

ORDER = (
    "captions_from", "prefix", "suffix", "shuffle_tags", "keep_tags", "tag_dropout", "remove_tags", "crop",
    "square", "upscale", "min_side", "max_side", "brightness", "contrast", "saturation", "hue", "masks",
    "outside_mask", "weight", "regularisation", "background", "fps", "clips", "first_frame",
    "class_word", "reference_dropout",
)  # fmt: skip


class DatasetSettingsNode(Node):
    """Captions, buckets, crops, colors, masks and clips, beyond what Load Dataset shows."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftDatasetSettings",
            display_name="Dataset Settings",
            description="Captions, image sizes, crops, colors, masks, clips and regularization.",
            search_aliases=["graft", "tags", "shuffle", "bucket", "mask", "regularization", "regularisation"],
            inputs=in_order(widgets(DatasetConfig), ORDER),
            outputs=[DatasetSettings.Output("dataset_settings")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(read(DatasetConfig(), values))
