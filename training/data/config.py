"""What to take from a folder and how to show it to the model. Defaults suit pictures with .txt captions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from ..config import require
from ..idle_settings import Idle, Values, idle_notes

FROM_FOLDER, FROM_GRAPH = "from a folder", "from the graph"

MOST_ADDED = 2000
"""Letters of a prefix, a suffix or a trigger word."""


@dataclass(frozen=True, kw_only=True)
class CaptionConfig:
    """Where captions come from and what is done to them before the text encoder sees them."""

    source: Literal["auto", "txt", "caption", "json", "jsonl", "file name", "folder name"] = "auto"
    """For cat.png, "auto" takes the first there is of cat.txt, cat.caption, cat.json and metadata.jsonl."""
    missing: Literal["error", "empty", "trigger"] = "error"
    """What an image without a caption means. An empty caption file counts as missing.

    With a trigger word, "empty" is that word alone too, since every caption gets it.
    """
    trigger: str = ""
    """Replaces [trigger] in captions; put in front of captions that contain neither it nor [trigger]."""
    prefix: str = ""
    suffix: str = ""
    separator: str = ","
    """What divides a caption into tags."""
    remove: tuple[str, ...] = ()
    """Globs over tags, whatever their case; tags that match one are taken out of every caption."""
    shuffle: bool = False
    keep_tokens: int = 0
    """The first tags of a caption, which shuffling and tag dropout leave alone."""
    tag_dropout: float = 0.0
    """Chance of each tag to be left out."""
    variations: int = 8
    """How many versions of a caption are cached, where shuffle or tag dropout is on."""
    dropout: float = 0.0
    """Chance of the whole caption to be replaced by the empty one, drawn anew each time the image is seen."""

    def __post_init__(self) -> None:
        require(
            0 <= self.tag_dropout < 1, f"tag dropout must be at least 0 and below 1, got {self.tag_dropout}."
        )
        require(0 <= self.dropout <= 1, f"caption dropout must be between 0 and 1, got {self.dropout}.")
        require(self.keep_tokens >= 0, f"kept tokens must not be negative, got {self.keep_tokens}.")
        require(1 <= self.variations <= 1000, f"caption variations must be 1 to 1000, got {self.variations}.")
        for name in ("trigger", "prefix", "suffix"):
            found = len(getattr(self, name))
            require(found <= MOST_ADDED, f"the {name} has {found} letters; {MOST_ADDED} are the most.")
        require(bool(self.separator), "the tag separator must not be empty; most captions use a comma.")
        require(
            self.missing != "trigger" or bool(self.trigger.strip()),
            "missing captions are set to 'trigger', but no trigger word is given; fill in 'trigger', for "
            "instance with ohwx dog.",
        )


@dataclass(frozen=True, kw_only=True)
class BucketConfig:
    """The sizes that images are brought to: about the same area, each image at its nearest aspect ratio."""

    resolutions: tuple[int, ...] = (1024,)
    """Each stands for an area of resolution x resolution pixels."""
    each: bool = True
    """Of several resolutions, train every image at each; if not, only at the largest that it fills."""
    step: int = 0
    """Sides are multiples of this many pixels; 0 is the model's own. Larger: fewer, fuller buckets."""
    square: bool = False
    """Crop everything to a square instead of the nearest aspect ratio."""
    min_side: int = 0
    """Shortest side of a bucket in pixels; 0 means half the resolution."""
    max_side: int = 0
    """Longest side of a bucket in pixels; 0 means twice the resolution."""
    upscale: bool = True
    """Enlarge images that are smaller than their bucket; if not, they get one of about their own size."""

    def __post_init__(self) -> None:
        require(bool(self.resolutions), "give at least one resolution, for example 1024.")
        for resolution in self.resolutions:
            require(8 <= resolution <= 16384, f"resolution must be 8 to 16384 pixels, got {resolution}.")
        require(
            len(set(self.resolutions)) == len(self.resolutions), f"resolutions repeat: {self.resolutions}."
        )
        require(0 <= self.step <= 1024, f"bucket step must be 0 to 1024 pixels, got {self.step}.")
        require(
            self.min_side >= 0 and self.max_side >= 0,
            "the bucket's shortest and longest side must not be negative.",
        )
        require(
            not (self.min_side and self.max_side) or self.min_side <= self.max_side,
            f"a bucket's shortest side ({self.min_side}) must not exceed its longest ({self.max_side}).",
        )


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Cropping, mirroring and color jitter. None of them switches the latent cache off.

    What is random is drawn `variations` times an image, keyed by the image's content, and every drawing is
    cached; mirroring doubles that. Training then draws among the cached ones.
    """

    crop: Literal["center", "random", "corners"] = "center"
    flip: bool = False
    """Cache both orientations and show either. Not for text, logos or faces with a parting."""
    brightness: float = 0.0
    """0.1 multiplies by 0.9 to 1.1."""
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    """0.1 turns the color circle by up to a tenth of it, either way."""
    variations: int = 4
    """Cached drawings an image of random or corner crops and color jitter; unused where neither is on."""

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation", "hue"):
            amount = getattr(self, name)
            limit = 0.5 if name == "hue" else 1
            require(0 <= amount <= limit, f"{name} jitter must be between 0 and {limit}, got {amount}.")
        require(1 <= self.variations <= 1000, f"image variations must be 1 to 1000, got {self.variations}.")

    @property
    def jitters(self) -> bool:
        return bool(self.brightness or self.contrast or self.saturation or self.hue)


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Which part of the picture counts.

    White (or opaque) counts fully, black (or transparent) by `outside`.
    """

    source: Literal["off", "file", "alpha", "auto"] = "file"
    """"file" takes name-mask.png where there is one.

    "alpha" the image's transparency; "auto" the file, else alpha.
    """
    outside: float = 0.0
    """Loss weight of the masked-out part, 0 to 1."""

    def __post_init__(self) -> None:
        require(
            0 <= self.outside <= 1,
            f"the weight outside the mask must be between 0 and 1, got {self.outside}.",
        )


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One folder of images, or one batch of images from the graph."""

    recursive: bool = False
    """Read subfolders too. Subfolders named like 10_cat are always read, with 10 repeats."""
    repeats: int = 1
    """How often an image is seen in an epoch; multiplied with the 10 of a folder named 10_cat."""
    weight: float = 1.0
    """Loss weight of this folder's images."""
    regularisation: bool = False
    """Images of the class in general, which hold the model where it was: never given the trigger word."""
    skip_bad: bool = False
    """Train without files that cannot be used. They are listed in the report; otherwise they stop the run."""
    background: str = "#ffffff"
    """Transparent images are laid on this color."""
    caption: CaptionConfig = field(default_factory=CaptionConfig)
    bucket: BucketConfig = field(default_factory=BucketConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    mask: MaskConfig = field(default_factory=MaskConfig)
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of the cached latents and conditioning.

    Training always reads the cache, so it sees this rounding.
    """

    def __post_init__(self) -> None:
        require(1 <= self.repeats <= 1_000_000, f"repeats must be 1 to 1000000, got {self.repeats}.")
        require(
            math.isfinite(self.weight) and self.weight > 0,
            f"a dataset's weight must be positive, got {self.weight}; 1 is neutral.",
        )
        require(
            re.fullmatch("#[0-9a-fA-F]{6}", self.background) is not None,
            f"background must look like #ffffff, got {self.background!r}.",
        )


IDLE = (
    Idle(("min_side", "max_side"), {"square": (True,)}),
    Idle(("min_side",), {"upscale": (False,)}, on="pictures smaller than their bucket"),
    Idle(("keep_tags",), {"shuffle_tags": (False,), "tag_dropout": (0.0,)}),
    Idle(("outside_mask",), {"masks": ("off",)}),
    Idle(("captions_from",), {"images": (FROM_GRAPH,)}),
)
"""What has no effect in a dataset, by the names of widgets."""


def dataset_notes(config: DatasetConfig, images: str = FROM_FOLDER) -> list[str]:
    """Return a sentence for every setting that is not at its default and has no effect on these images."""
    return idle_notes(_widgets(config, images), _widgets(DatasetConfig(), images), IDLE)


def _widgets(config: DatasetConfig, images: str) -> Values:
    return {
        "images": images, "captions_from": config.caption.source, "shuffle_tags": config.caption.shuffle,
        "keep_tags": config.caption.keep_tokens, "tag_dropout": config.caption.tag_dropout,
        "square": config.bucket.square, "upscale": config.bucket.upscale,
        "min_side": config.bucket.min_side, "max_side": config.bucket.max_side,
        "masks": config.mask.source, "outside_mask": config.mask.outside,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Which images are held out and never trained on."""

    fraction: float = 0.0
    """Share of the images, chosen by their content: adding images hardly moves the others."""
    names: tuple[str, ...] = ()
    """Globs over the images' paths inside their folder: "cat.png", "validation/*"."""

    def __post_init__(self) -> None:
        require(
            0 <= self.fraction < 1,
            f"the validation fraction must be at least 0 and below 1, got {self.fraction}.",
        )
