"""Every setting of a dataset. The defaults suit images with .txt captions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from ..config import inputs_of, require, setting
from ..ineffective_settings import Ineffective, ineffective_notes

FROM_FOLDER, FROM_GRAPH = "from a folder", "from the graph"

MOST_ADDED = 2000
"""Letters of a prefix, a suffix or a trigger word."""

MOST_REFERENCES = 3
"""As many as ComfyUI's nodes for edits take."""
BESIDE = "beside"
"""In `DatasetConfig.references`: references lie beside their image."""

JITTER = "Random {} change: 0.1 multiplies it by 0.9 to 1.1."


@dataclass(frozen=True, kw_only=True)
class CaptionConfig:
    """Where captions come from, and what changes in them before they are encoded."""

    source: Literal["auto", "txt", "caption", "json", "jsonl", "file name", "folder name"] = setting(
        "auto",
        "Source of captions; for cat.png, auto is the first of cat.txt, cat.caption, cat.json and "
        "metadata.jsonl.",
        input="captions_from",
    )
    # An empty caption file counts as missing. With a trigger word, "empty" is that word alone too.
    missing: Literal["error", "empty", "trigger"] = setting(
        "error",
        "Images without a caption: an error, an empty caption, or the trigger word alone. A trigger goes "
        "before an empty caption too.",
        input="missing_captions",
        main=True,
    )
    trigger: str = setting(
        "",
        "Trigger word, which calls up what is learned: it replaces [trigger] in captions, or goes before "
        "captions that have neither.",
        main=True,
    )
    prefix: str = setting("", "Text before every caption.")
    suffix: str = setting("", "Text after every caption.")
    class_word: str = setting(
        "",
        "What the trigger word is an instance of, such as dog: it replaces the trigger in captions for "
        "preservation (Objective Settings), which takes an empty caption without it.",
        added=True,
    )
    separator: str = ","
    """The separator of a caption's tags."""
    remove: tuple[str, ...] = setting(
        (),
        "Patterns of tags to remove from every caption, one per line, e.g. *background",
        input="remove_tags",
    )
    shuffle: bool = setting(False, "Shuffle comma-separated tags.", input="shuffle_tags")
    keep_tokens: int = setting(
        0, "Number of first tags that are never shuffled or dropped.", input="keep_tags", high=100
    )
    tag_dropout: float = setting(0.0, "Chance of dropping each tag.", high=0.99)
    variations: int = 8
    """How many versions of a caption are cached, where shuffle or tag dropout is on."""
    dropout: float = setting(
        0.0,
        "Chance of training an image without its caption, drawn anew each time; 0.05 to 0.1 keeps guidance "
        "working.",
        input="caption_dropout",
        high=1,
        main=True,
    )

    def __post_init__(self) -> None:
        require(
            0 <= self.tag_dropout < 1, f"tag dropout must be at least 0 and below 1, got {self.tag_dropout}."
        )
        require(0 <= self.dropout <= 1, f"caption dropout must be between 0 and 1, got {self.dropout}.")
        require(self.keep_tokens >= 0, f"keep_tags must not be negative, got {self.keep_tokens}.")
        require(1 <= self.variations <= 1000, f"caption variations must be 1 to 1000, got {self.variations}.")
        for name in ("trigger", "prefix", "suffix", "class_word"):
            length = len(getattr(self, name))
            require(length <= MOST_ADDED, f"the {name} has {length} letters; the limit is {MOST_ADDED}.")
        require(bool(self.separator), "the tag separator must not be empty; most captions use a comma.")
        require(
            self.missing != "trigger" or bool(self.trigger.strip()),
            "missing captions are set to 'trigger', but there is no trigger word; fill in 'trigger', for "
            "instance with ohwx dog.",
        )


@dataclass(frozen=True, kw_only=True)
class BucketConfig:
    """Sizes to resize images to: about the same area, each image at its nearest aspect ratio."""

    resolutions: tuple[int, ...] = (1024,)
    """Each stands for an area of resolution x resolution pixels."""
    each: bool = True
    """With several resolutions, train every image at each; if not, only at the largest that it fills."""
    step: int = 0
    """Sides are multiples of this many pixels; 0 is the model's own. Larger: fewer, fuller buckets."""
    square: bool = setting(False, "Crop every image to a square: no aspect-ratio buckets.")
    min_side: int = setting(0, "Shortest side of a bucket in pixels; 0 is half the resolution.", high=16384)
    max_side: int = setting(0, "Longest side of a bucket in pixels; 0 is twice the resolution.", high=16384)
    # Those that are not enlarged get a bucket of about their own size.
    upscale: bool = setting(True, "Enlarge images that are smaller than their bucket.")

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
    """Cropping, mirroring and color jitter. None of them turns off the latent cache.

    What is random is drawn `variations` times an image, keyed by the image's content, and every drawing is
    cached; mirroring doubles that. Training then draws among the cached ones.
    """

    crop: Literal["center", "random", "corners"] = setting("center", "Part of an image that a crop takes.")
    flip: bool = setting(
        False, "Train mirrored images too. Not for text, logos or faces with a parting.", main=True
    )
    brightness: float = setting(0.0, JITTER.format("brightness"), high=1)
    contrast: float = setting(0.0, JITTER.format("contrast"), high=1)
    saturation: float = setting(0.0, JITTER.format("saturation"), high=1)
    hue: float = setting(0.0, "Random hue change: 0.1 turns the color circle by up to a tenth.", high=0.5)
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
    """Which part of an image is trained.

    White (or opaque) counts fully, black (or transparent) by `outside`.
    """

    source: Literal["file", "off", "alpha", "auto"] = setting(
        "file",
        "Mask of each image: name-mask.png beside it (file), its transparency (alpha), or the file, else "
        "transparency (auto). White is trained.",
        input="masks",
    )
    outside: float = setting(0.0, "Loss weight where the mask is black.", input="outside_mask", high=1)

    def __post_init__(self) -> None:
        require(
            0 <= self.outside <= 1,
            f"the weight outside the mask must be between 0 and 1, got {self.outside}.",
        )


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One folder of images, or one batch of images from the graph."""

    recursive: bool = setting(
        False, "Read subfolders too. Subfolders with names like 10_cat are always read.", main=True
    )
    repeats: int = setting(
        1,
        "Repeats of each image in an epoch, multiplied by the 10 of a folder named 10_cat.",
        low=1,
        high=1000,
        main=True,
    )
    weight: float = setting(1.0, "Loss weight of these images.", low=0.001, high=1000)
    regularisation: bool = setting(
        False,
        "Regularization images: the class in general, so that the model doesn't forget it; they never get "
        "the trigger word.",
    )
    # They are listed in the report.
    skip_bad: bool = setting(
        False, "Skip unreadable images instead of stopping at them.", input="skip_bad_images", main=True
    )
    leave_out: tuple[str, ...] = setting(
        (),
        "Images to leave out, one name or pattern per line, e.g. blurry/*",
        main=True,
        advanced=True,
        added=True,
    )
    background: str = setting("#ffffff", "Color behind transparent images.")
    caption: CaptionConfig = field(default_factory=CaptionConfig)
    bucket: BucketConfig = field(default_factory=BucketConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    mask: MaskConfig = field(default_factory=MaskConfig)
    frames: int = setting(
        0,
        "Frames of each video clip to train, such as 33, rounded down to what the VAE takes (4k + 1 for "
        "Wan). 0 trains images alone.",
        high=10_000,
        main=True,
        added=True,
    )
    fps: float = setting(
        0.0,
        "Frames per second at which clips are trained: the model's own, such as 16 for Wan, else motion gets "
        "too fast or too slow. 0 takes every frame.",
        high=240,
        added=True,
    )
    clips: Literal["head", "uniform", "chunks"] = setting(
        "head",
        "Frames that a longer clip gives: the first ones (head), some at equal distances over all of it "
        "(uniform), or all of them, as one sample after another (chunks). Sound too has head and chunks.",
        added=True,
    )
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of the cached latents and conditioning.

    Training always reads the cache, so it sees this rounding.
    """

    seconds: float = setting(
        0.0,
        "Seconds of each sound to train (.wav, .flac, .mp3), for models that make sound. 0 leaves sound out.",
        high=3600,
        main=True,
        added=True,
    )
    first_frame: float = setting(
        0.0,
        "Share of clips whose first frame the model is given, to learn image to video. Models that always "
        "take one (Wan I2V) get it anyway.",
        high=1,
        added=True,
    )
    references: tuple[str, ...] = setting(
        (),
        "Reference images, to train an edit: up to 3 folders, one per line, with the same file names; or "
        "beside, for cat_ref1.png next to cat.png.",
        main=True,
        added=True,
    )
    reference_dropout: float = setting(
        0.0, "Chance of training an image without its references, drawn anew each time.", high=1, added=True
    )

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
        require(0 <= self.frames <= 10_000, f"frames must be 0 to 10000, got {self.frames}.")
        require(
            math.isfinite(self.fps) and 0 <= self.fps <= 240,
            f"fps must be 0 (every frame) to 240, got {self.fps}.",
        )
        require(
            math.isfinite(self.seconds) and 0 <= self.seconds <= 3600,
            f"seconds must be 0 (no sound) to 3600, got {self.seconds}.",
        )
        require(0 <= self.first_frame <= 1, f"first_frame must be between 0 and 1, got {self.first_frame}.")
        require(
            len(self.references) <= MOST_REFERENCES,
            f"references: {len(self.references)} folders; at most {MOST_REFERENCES}.",
        )
        require(
            0 <= self.reference_dropout <= 1,
            f"reference dropout must be between 0 and 1, got {self.reference_dropout}.",
        )
        if self.references:
            require_pairs_stay(self.augment)


def require_pairs_stay(augment: AugmentConfig) -> None:
    """Raise UserError for changes of an image that its references do not undergo."""
    changes = {f"crop {augment.crop}": augment.crop != "center", "a random change of color": augment.jitters}
    for name, is_on in changes.items():
        require(not is_on, f"{name} changes an image and not its references; turn it off to train pairs.")


INEFFECTIVE = (
    Ineffective(("min_side", "max_side"), {"square": (True,)}),
    Ineffective(("min_side",), {"upscale": (False,)}, on="images smaller than their bucket"),
    Ineffective(("keep_tags",), {"shuffle_tags": (False,), "tag_dropout": (0.0,)}),
    Ineffective(("class_word",), {"trigger": ("",)}),
    Ineffective(("class_word",), {"regularisation": (True,)}),
    Ineffective(("outside_mask",), {"masks": ("off",)}),
    Ineffective(("captions_from",), {"images": (FROM_GRAPH,)}),
    Ineffective(("fps", "first_frame"), {"frames": (0,)}),
    Ineffective(("clips",), {"frames": (0,), "seconds": (0.0,)}),
    Ineffective(("reference_dropout",), {"references": ("none",)}),
)
"""Settings of a dataset that have no effect, by the names of their widgets."""


def dataset_notes(
    config: DatasetConfig, images: str = FROM_FOLDER, *, has_references: bool = False
) -> list[str]:
    """Return a sentence for every setting that is not at its default and has no effect on these images."""
    extra = {"images": images, "references": "given" if has_references else "none"}
    values, defaults = ({**inputs_of(part), **extra} for part in (config, DatasetConfig()))
    return ineffective_notes(values, defaults, INEFFECTIVE)


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Images to hold out of training."""

    fraction: float = setting(
        0.0,
        "Share of the images to hold out, chosen by content: new images hardly move the others.",
        high=0.9,
    )
    names: tuple[str, ...] = setting(
        (), "Patterns of file names to hold out as well, one per line, e.g. validation/*"
    )

    def __post_init__(self) -> None:
        require(
            0 <= self.fraction < 1,
            f"the validation fraction must be at least 0 and below 1, got {self.fraction}.",
        )
