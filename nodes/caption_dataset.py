"""Caption Dataset, and Dataset Images for the captioners of other packs. Tooltips are in training/data/."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.comfy import paths
from ..training.comfy.dataset.folders import require_writable
from ..training.comfy.model.captioner import Captioner
from ..training.comfy.progress import progress_bar
from ..training.data.captioning import (
    CaptioningConfig,
    Maker,
    caption_images,
    described,
    files_of,
    given_captions,
    pixels_of,
)
from ..training.user_error import UserError
from .node import Node
from .sockets import Dataset, require_images, schema
from .widgets import widgets


class CaptionDataset(Node):
    """Captions for the images that have none, by a text encoder or by another node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftCaptionDataset",
            display_name="Caption Dataset",
            description="Caption the images that have no caption, by a text encoder that sees images or by "
            "another node's texts. What you wrote or edited stays.",
            search_aliases=["graft", "auto caption", "describe", "tag", "vlm", "qwen", "gemma", "florence"],
            is_input_list=True,  # a captioner's list is one for the whole dataset
            inputs=[
                Dataset.Input("dataset", tooltip="From Load Dataset, with missing_captions at empty."),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="A text encoder that sees images: Qwen3-VL, Qwen3.5 or Gemma 4, by Load CLIP.",
                ),
                io.String.Input(
                    "captions",
                    optional=True,
                    force_input=True,
                    tooltip="Instead of clip: one text per image, in the order of Dataset Images.",
                ),
                *widgets(CaptioningConfig),
            ],
            outputs=[Dataset.Output("captioned", display_name="dataset")],
        )

    @classmethod
    def execute(
        cls,
        dataset: list[Any],
        clip: list[Any] | None = None,
        captions: list[str] | None = None,
        **widgets: list[Any],
    ) -> io.NodeOutput:
        images = require_images(dataset[0])
        config = CaptioningConfig(**{name: values[0] for name, values in widgets.items()})
        cache = paths.cache_folder()
        with progress_bar() as on_progress:
            captioned, text = caption_images(
                images,
                _maker(images, clip, captions, config),
                config,
                cache,
                require_writable=require_writable,
                on_progress=on_progress,
            )
        return io.NodeOutput(captioned, ui={"text": [text]})


def _maker(images: Any, clip: list[Any] | None, captions: list[str] | None, config: Any) -> Maker:
    if bool(clip) == bool(captions):
        raise UserError(
            "connect either clip, a text encoder that sees images, or captions, a list of STRING of another "
            f"node; {'both are' if clip else 'neither is'} connected."
        )
    if clip:
        captioner = Captioner(clip[0], config)
        return described(captioner.describe, captioner.fingerprint, paths.cache_folder())
    assert captions is not None
    if len(captions) != (count := len(files_of(images))):
        raise UserError(
            f"captions: {len(captions)} for {count} images; give one for each. Dataset Images gives the "
            "images in their order."
        )
    return given_captions(captions)


class DatasetImages(Node):
    """The images of a dataset as a list, for nodes of ComfyUI and of other packs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftDatasetImages",
            display_name="Dataset Images",
            description="The images of a dataset as a list, for instance for another pack's captioner.",
            search_aliases=["graft", "list", "export", "caption"],
            inputs=[
                Dataset.Input("dataset", tooltip="From Load Dataset."),
                io.Int.Input(
                    "side",
                    default=1024,
                    min=64,
                    max=8192,
                    tooltip="Larger images are made smaller, to about side x side pixels.",
                ),
            ],
            outputs=[
                io.Image.Output("images", is_output_list=True),
                io.String.Output("captions", is_output_list=True),
                io.String.Output("names", is_output_list=True),
            ],
        )

    @classmethod
    def execute(cls, dataset: Any, side: int) -> io.NodeOutput:
        found = require_images(dataset)
        samples = [found.samples[positions[0]] for positions in files_of(found)]
        images = []
        with progress_bar() as on_progress:
            for done, sample in enumerate(samples):
                on_progress(done, len(samples), "Reading")
                images.append(pixels_of(found.source(sample), sample, side * side))
        captions = [sample.captions[0] for sample in samples]
        return io.NodeOutput(images, captions, [sample.name for sample in samples])
