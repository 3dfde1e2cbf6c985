"""Dataset From Videos: VIDEO of the graph to a dataset."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training import data
from ..training.comfy.progress import progress_bar
from ..training.data.config import DatasetConfig
from .dataset import SETTINGS, common_inputs, make_config, split_captions
from .node import Node
from .sockets import Dataset, DatasetSettings, schema
from .widgets import widget


class DatasetFromVideos(Node):
    """Videos that the graph loaded or cut, as a dataset."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftDatasetFromVideos",
            display_name="Dataset From Videos",
            description="Train on videos from the graph, with one caption per line or one for all.",
            search_aliases=["graft", "clips", "captions"],
            is_input_list=True,
            inputs=[
                io.Video.Input("videos", tooltip="One or more videos, for instance from Load Video."),
                io.String.Input(
                    "captions",
                    default="",
                    multiline=True,
                    tooltip="Captions, one line per video, or one line for all.",
                ),
                *common_inputs(),
                widget(DatasetConfig, "skip_bad_images"),
                widget(DatasetConfig, "frames", default=33),
                DatasetSettings.Input("dataset_settings", optional=True, tooltip=SETTINGS),
            ],
            outputs=[Dataset.Output("dataset")],
        )

    @classmethod
    def execute(
        cls,
        videos: list[Any],
        captions: list[str],
        dataset_settings: list[DatasetConfig] | None = None,
        **widgets: list[Any],
    ) -> io.NodeOutput:
        only = {name: values[0] for name, values in widgets.items()}
        config = make_config(dataset_settings[0] if dataset_settings else None, **only)
        with progress_bar() as on_progress:
            dataset = data.from_videos(videos, split_captions(captions), config, on_progress=on_progress)
        return io.NodeOutput(dataset, ui={"text": [data.summary(dataset)]})
