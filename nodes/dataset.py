"""The dataset nodes, from Load Dataset to Split Dataset: images and captions to latents and conditioning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from ..starter.in_comfyui import STARTER
from ..training import data
from ..training.comfy import paths
from ..training.comfy.dataset.in_memory import remember_set
from ..training.comfy.model.denoiser import ComfyDenoiser
from ..training.comfy.model.encoder import ComfyEncoder
from ..training.comfy.progress import progress_bar, raise_if_cancelled
from ..training.comfy.run.notes import family_in, model_file
from ..training.data.config import BESIDE, DatasetConfig, SplitConfig
from ..training.user_error import UserError
from .node import Files, Node
from .sockets import Dataset, DatasetSettings, require_encoded, require_images, schema
from .widgets import lines, read, widget

SETTINGS = "From Dataset Settings; without it, its defaults."


def common_inputs() -> list[Any]:
    """Return the widgets that the nodes which make a dataset share."""
    return [
        io.String.Input(
            "resolution",
            default="1024",
            tooltip="Image size in pixels: each image is resized to about resolution x resolution, at its "
            "own aspect ratio. Several sizes, such as 512, 1024, train every image at each.",
        ),
        *(
            widget(DatasetConfig, name)
            for name in ("trigger", "missing_captions", "repeats", "caption_dropout", "flip")
        ),
    ]


class LoadDataset(Node):
    """A folder of images and clips with captions beside them. Hardly a pixel is read yet."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftLoadDataset",
            display_name="Load Dataset",
            description="Load a folder of images, video clips or sounds from ComfyUI's input directory, each "
            "with its caption in a .txt file of the same name.",
            search_aliases=["graft", "images", "captions", "folder", "video", "clips", "sound"],
            inputs=[
                Files(
                    "folder",
                    options=data.list_datasets([root for root in paths.dataset_roots() if root != STARTER]),
                    tooltip="Folder in ComfyUI's input directory, or one registered as graft_datasets in "
                    "extra_model_paths.yaml. A folder named 10_cat counts ten times.",
                ),
                *common_inputs(),
                widget(DatasetConfig, "recursive"),
                widget(DatasetConfig, "skip_bad_images"),
                widget(DatasetConfig, "frames"),
                widget(DatasetConfig, "leave_out"),
                widget(DatasetConfig, "seconds"),
                DatasetSettings.Input("dataset_settings", optional=True, tooltip=SETTINGS),
                widget(DatasetConfig, "references"),
            ],
            outputs=[
                Dataset.Output("dataset"),
                io.String.Output("trigger_word", tooltip="The trigger word, for prompts."),
            ],
        )

    @classmethod
    def validate_inputs(cls, folder: str) -> bool:
        """Accept names that are not listed: nested folders, and those made since the page was loaded."""
        return True

    @classmethod
    def fingerprint_inputs(
        cls,
        folder: str,
        recursive: bool = False,
        frames: int = 0,
        seconds: float = 0.0,
        references: str = "",
        **others: Any,
    ) -> str:
        folders = [folder, *_reference_folders(lines(references))]
        found = [data.resolve_dataset(name, paths.dataset_roots()) for name in folders]
        config = DatasetConfig(recursive=recursive, frames=frames, seconds=seconds)
        return " ".join(data.fingerprint(path, config, raise_if_cancelled) for path in found)

    @classmethod
    def config_of(cls, values: dict[str, Any], settings: dict[str, Any]) -> DatasetConfig:
        """Return the config for the values of this node's widgets and of a connected Dataset Settings."""
        widgets = {name: value for name, value in values.items() if name != "folder"}
        return make_config(read(DatasetConfig(), settings), **{"resolution": "1024", **widgets})

    @classmethod
    def reference_folders(cls, config: DatasetConfig) -> Sequence[str]:
        """Return the names of the folders with references."""
        return _reference_folders(config.references)

    @classmethod
    def execute(
        cls, folder: str, dataset_settings: DatasetConfig | None = None, **widgets: Any
    ) -> io.NodeOutput:
        config = make_config(dataset_settings, **widgets)
        with progress_bar() as on_progress:
            folders = [folder, *cls.reference_folders(config)]
            root, *references = (data.resolve_dataset(name, paths.dataset_roots()) for name in folders)
            images = data.scan(root, config, references=references, on_progress=on_progress)
        return io.NodeOutput(images, config.caption.trigger, ui={"text": [data.summary(images)]})


class DatasetFromImages(Node):
    """Images that the graph made or loaded, as a dataset."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftDatasetFromImages",
            display_name="Dataset From Images",
            description="Train on images from the graph, with one caption per line or one for all.",
            search_aliases=["graft", "batch", "captions"],
            is_input_list=True,  # nodes that load a folder give a list, which is one dataset and not many
            inputs=[
                io.Image.Input("images", tooltip="One or more images, for instance from Load Image."),
                io.String.Input(
                    "captions",
                    default="",
                    multiline=True,
                    tooltip="Captions, one line per image, or one line for all.",
                ),
                *common_inputs(),
                io.Mask.Input("masks", optional=True, tooltip="Masks: white is trained, black is not."),
                DatasetSettings.Input("dataset_settings", optional=True, tooltip=SETTINGS),
                *(
                    io.Image.Input(
                        f"reference{number}",
                        optional=True,
                        tooltip="Reference images, to train an edit: one per image, or one for all.",
                    )
                    for number in (1, 2, 3)
                ),
            ],
            outputs=[Dataset.Output("dataset")],
        )

    @classmethod
    def execute(
        cls,
        images: list[Any],
        captions: list[str],
        masks: list[Any] | None = None,
        dataset_settings: list[DatasetConfig] | None = None,
        reference1: list[Any] | None = None,
        reference2: list[Any] | None = None,
        reference3: list[Any] | None = None,
        **widgets: list[Any],
    ) -> io.NodeOutput:
        only = {name: values[0] for name, values in widgets.items()}
        config = make_config(dataset_settings[0] if dataset_settings else None, **only)
        references = [each for each in (reference1, reference2, reference3) if each]
        dataset = data.from_images(images, split_captions(captions), masks, config, references)
        text = data.summary(dataset)
        if masks and not dataset.sources[0].masks:
            text += (
                f"\nThe connected masks have no effect with masks {config.mask.source}; set it to file or "
                "auto in Dataset Settings."
            )
        return io.NodeOutput(dataset, ui={"text": [text], "graft_set": [remember_set(dataset)]})


class JoinDatasets(Node):
    """Several folders as one, each with its own repeats, weight and trigger."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftJoinDatasets",
            display_name="Join Datasets",
            description="Train on several datasets at once, for instance a face and regularization images.",
            search_aliases=["graft", "concat", "regularization", "regularisation"],
            inputs=[
                Dataset.Input("dataset_1", tooltip="First dataset."),
                Dataset.Input("dataset_2", tooltip="Second dataset."),
                Dataset.Input("dataset_3", optional=True, tooltip="Third dataset."),
                Dataset.Input("dataset_4", optional=True, tooltip="Fourth dataset."),
                io.String.Input(
                    "shares",
                    default="",
                    optional=True,
                    tooltip="Share of an epoch for each dataset, whatever its size: 1, 1 is half and half. "
                    "Empty: by the number of images and repeats.",
                ),
            ],
            outputs=[Dataset.Output("dataset")],
        )

    @classmethod
    def shares_of(cls, values: dict[str, Any]) -> Sequence[float]:
        """Return the shares for the values of this node's widgets."""
        return _shares(str(values.get("shares", "")))

    @classmethod
    def execute(cls, shares: str = "", **datasets: Any) -> io.NodeOutput:
        connected = [require_images(d, name) for name, d in sorted(datasets.items()) if d is not None]
        joined = data.join(connected, shares=_shares(shares))
        return io.NodeOutput(joined, ui={"text": [data.summary(joined)]})


class PreviewDataset(Node):
    """See what the model will see, before it is trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftPreviewDataset",
            display_name="Preview Dataset",
            description="Show images with their crop, size and caption, as they are trained.",
            search_aliases=["graft", "inspect", "crop"],
            inputs=[
                Dataset.Input("dataset", tooltip="From Load Dataset."),
                io.Model.Input("model", tooltip="Decides the sizes of the buckets."),
                io.Int.Input(
                    "count",
                    default=16,
                    min=1,
                    max=64,
                    tooltip="Number of images to show, evenly spread over the dataset.",
                ),
            ],
            outputs=[io.Image.Output("image"), io.String.Output("report")],
        )

    @classmethod
    def execute(cls, dataset: Any, model: Any, count: int) -> io.NodeOutput:
        step = ComfyDenoiser(model).family.bucket_step
        with progress_bar() as on_progress:
            sheet = data.preview(require_images(dataset), step=step, count=count, on_progress=on_progress)
        return io.NodeOutput(sheet, data.summary(dataset))


class EncodeDataset(Node):
    """Run every image and caption through VAE and text encoders once, and cache the results on disk."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftEncodeDataset",
            display_name="Encode Dataset",
            description="Encode images and captions once and cache the results; a second run encodes only "
            "what changed.",
            search_aliases=["graft", "latents", "cache"],
            inputs=[
                Dataset.Input("dataset", tooltip="From Load Dataset."),
                io.Model.Input("model", tooltip="Decides the sizes of the buckets."),
                io.Clip.Input("clip", tooltip="The text encoders."),
                io.Vae.Input("vae", tooltip="The VAE."),
                io.Boolean.Input(
                    "encode_again", default=False, tooltip="Ignore the cache and encode everything again."
                ),
            ],
            outputs=[Dataset.Output("dataset_encoded", display_name="dataset")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(cls, dataset: Any, model: Any, clip: Any, vae: Any, encode_again: bool) -> io.NodeOutput:
        hidden = cls.hidden
        file = model_file(hidden.prompt, hidden.unique_id) if hidden else ""
        family = family_in(file, model)
        encoder = ComfyEncoder(vae, clip, family, ComfyDenoiser(model))
        with progress_bar() as on_progress:
            encoded = data.encode(
                require_images(dataset),
                encoder,
                paths.cache_folder(),
                recache=encode_again,
                on_progress=on_progress,
            )
        return io.NodeOutput(encoded, ui={"text": [data.report(encoded)]})


class SplitDataset(Node):
    """Hold out images, to measure how well the LoRA does on what it has not seen."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftSplitDataset",
            display_name="Split Dataset",
            description="Hold out a share of the images for validation: the same images are always held out.",
            search_aliases=["graft", "validation", "held-out"],
            inputs=[
                Dataset.Input("dataset", tooltip="From Encode Dataset."),
                widget(SplitConfig, "fraction", default=0.1),
                widget(SplitConfig, "names"),
            ],
            outputs=[Dataset.Output("training", display_name="training"), Dataset.Output("validation")],
        )

    @classmethod
    def config_of(cls, values: dict[str, Any]) -> SplitConfig:
        """Return the config for the values of this node's widgets."""
        return read(SplitConfig(), values)

    @classmethod
    def execute(cls, dataset: Any, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(*require_encoded(dataset).split(cls.config_of(values)))


def split_captions(texts: list[str]) -> list[str]:
    """Return one caption an input: those of a list, or the lines of a text."""
    return texts if len(texts) > 1 else texts[0].splitlines() or [""]


def make_config(settings: DatasetConfig | None, *, resolution: str, **values: Any) -> DatasetConfig:
    """Return the config of a dataset: what the node's widgets say, the rest from Dataset Settings."""
    chosen = read(settings or DatasetConfig(), values)
    return replace(chosen, bucket=replace(chosen.bucket, resolutions=_resolutions(resolution)))


def _reference_folders(references: Sequence[str]) -> Sequence[str]:
    """Return the names of the folders that the widget "references" names."""
    return () if tuple(references) == (BESIDE,) else references


def _resolutions(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise UserError(
            f"resolution: {text!r} is not a number of pixels; write 1024, or several, such as 512, 1024."
        ) from None


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise UserError(f"shares: {text!r} are not numbers; write one per dataset, such as 1, 1.") from None
