"""Load Dataset and Encode Dataset: from a folder of captioned images to latents and conditioning."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.comfy import paths
from ..training.comfy.denoiser import ComfyDenoiser
from ..training.comfy.encoder import ComfyEncoder
from ..training.comfy.session import progress_bar
from ..training.data import encode, fingerprint, list_datasets, resolve_dataset, scan
from ..training.data.config import AugmentConfig, BucketConfig, CaptionConfig, DatasetConfig
from .sockets import Dataset, schema


class LoadDataset(io.ComfyNode):
    """Name a folder of images with captions beside them. No pixel is read yet."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftLoadDataset",
            display_name="Load Dataset",
            description="A folder of images in ComfyUI's input directory, each with its caption in a .txt of the same name.",
            search_aliases=["graft", "images", "captions", "folder"],
            inputs=[
                io.Combo.Input(
                    "folder",
                    options=list_datasets(paths.dataset_roots()),
                    tooltip="A folder in ComfyUI's input directory, or one registered as graft_datasets in "
                    "extra_model_paths.yaml. Folders named 10_cat count ten times.",
                ),
                io.String.Input(
                    "resolution",
                    default="1024",
                    tooltip="Pixels: pictures are brought to about resolution x resolution, each at its own aspect ratio. "
                    "Several, like 512, 1024, train at each.",
                ),
                io.String.Input(
                    "trigger",
                    default="",
                    tooltip="A word of your own that will call up what is learnt: put before every caption, or where it "
                    "says [trigger].",
                ),
                io.Combo.Input(
                    "missing_captions",
                    options=["error", "empty", "trigger"],
                    default="error",
                    tooltip="What to do with an image that has no caption.",
                ),
                io.Int.Input("repeats", default=1, min=1, max=1000, tooltip="How often each image is seen in an epoch."),
                io.Float.Input(
                    "caption_dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Share of the time an image is shown without its caption; 0.05 to 0.1 keeps guidance working.",
                ),
                io.Boolean.Input(
                    "flip", default=False, tooltip="Show mirrored pictures too. Not for text or faces with a parting."
                ),
                io.Boolean.Input("recursive", default=False, tooltip="Read the folders inside the folder too."),
                io.Boolean.Input(
                    "skip_bad_images", default=False, tooltip="Train without unreadable images rather than stop at them."
                ),
            ],
            outputs=[Dataset.Output("dataset")],
        )

    @classmethod
    def validate_inputs(cls, folder: str) -> bool:
        """Accept names that are not listed: folders inside folders, and folders made since the page was loaded."""
        return True

    @classmethod
    def fingerprint_inputs(cls, folder: str, recursive: bool = False, **others: Any) -> str:
        return fingerprint(resolve_dataset(folder, paths.dataset_roots()), DatasetConfig(recursive=recursive))

    @classmethod
    def execute(
        cls,
        folder: str,
        resolution: str,
        trigger: str,
        missing_captions: str,
        repeats: int,
        caption_dropout: float,
        flip: bool,
        recursive: bool,
        skip_bad_images: bool,
    ) -> io.NodeOutput:
        config = DatasetConfig(
            recursive=recursive,
            repeats=repeats,
            skip_bad=skip_bad_images,
            caption=CaptionConfig(missing=missing_captions, trigger=trigger, dropout=caption_dropout),  # type: ignore[arg-type]
            bucket=BucketConfig(resolutions=_resolutions(resolution)),
            augment=AugmentConfig(flip=flip),
        )
        with progress_bar() as on_progress:
            images = scan(resolve_dataset(folder, paths.dataset_roots()), config, on_progress=on_progress)
        return io.NodeOutput(images, ui={"text": [f"{len(images)} images, {len(images.skipped)} skipped"]})


class EncodeDataset(io.ComfyNode):
    """Run every image and caption through VAE and text encoders, once; the results are kept on disk."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftEncodeDataset",
            display_name="Encode Dataset",
            description="Encode images and captions once and keep the results; a second run encodes only what changed.",
            search_aliases=["graft", "latents", "cache"],
            inputs=[
                Dataset.Input("dataset"),
                io.Model.Input("model", tooltip="Decides the sizes of the buckets."),
                io.Clip.Input("clip"),
                io.Vae.Input("vae"),
                io.Boolean.Input("encode_again", default=False, tooltip="Ignore what is cached and encode everything anew."),
            ],
            outputs=[Dataset.Output("dataset_encoded", display_name="dataset")],
        )

    @classmethod
    def execute(cls, dataset: Any, model: Any, clip: Any, vae: Any, encode_again: bool) -> io.NodeOutput:
        encoder = ComfyEncoder(vae, clip, ComfyDenoiser(model).family)
        with progress_bar() as on_progress:
            encoded = encode(dataset, encoder, paths.cache_folder(), recache=encode_again, on_progress=on_progress)
        return io.NodeOutput(encoded, ui={"text": [f"{len(encoded)} images, {encoded.steps_per_epoch(1)} steps per epoch"]})


def _resolutions(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise ValueError(f"resolution: {text!r} is not a number of pixels; write 1024, or several like 512, 1024.") from None
