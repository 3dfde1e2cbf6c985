"""The protocols and values between data, objective and loop: Denoiser, Encoder, Dataset, Batch.

ComfyUI's models are Denoisers and Encoders in `training/comfy/`, encoded images a Dataset in
`training/data/`; the tests have theirs in `tests/support/tiny.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .family import Family
from .frozen_base.frozen_layer import FrozenLayer, LayerSpec

Condition = Tensor | bool | int | float | str | Sequence["Condition"] | Mapping[str, "Condition"] | None
"""One value of a conditioning: a tensor, a number, a short text, or a list or mapping of these."""
Conditioning = Mapping[str, Condition]
"""What the model is conditioned on for one sample, batch size 1, under ComfyUI's names: "cross_attn"
(1, tokens, width), "pooled_output" (1, width), "reference_latents" (a list of latents), "frame_rate" (a
number) and whatever else its nodes have put in."""


def tensors_in(value: Condition | Conditioning) -> list[Tensor]:
    """Return all tensors of a conditioning or of a part of it."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in tensors_in(part)]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def count_positions(shapes: Iterable[Sequence[int]]) -> int:
    """Return a conditioning's length from its tensors' shapes: tokens of text and cells of images."""
    known = list(shapes)
    text = max((shape[1] for shape in known if len(shape) == 3), default=0)
    return text + sum(math.prod(shape[2:]) for shape in known if len(shape) > 3)


@dataclass(frozen=True)
class Captions:
    """One caption a sample."""

    conditioning: Sequence[Conditioning]
    texts: Sequence[str] = ()
    """As the text encoder is given them: for runs that train the text encoder."""


@dataclass(frozen=True)
class SliderTexts:
    """The two ends of a slider from words, what it changes, and how far it goes."""

    positive: Captions
    negative: Captions
    neutral: Captions
    guidance: float


@dataclass(frozen=True)
class Batch:
    """Samples of one bucket, as they enter a training step."""

    latents: Tensor
    """(B, C, H, W) float32 as the VAE made them (not yet scaled for the model); video: (B, C, T, H, W)."""
    conditioning: Sequence[Conditioning]
    """One entry a sample."""
    names: Sequence[str] = ()
    """One a sample, for messages: the image's path relative to its folder."""
    masks: Tensor | None = None
    """(B, 1, H, W) float32 loss weights at latent resolution; None means 1 everywhere."""
    weights: Tensor | None = None
    """(B,) float32 loss weight of each sample (regularisation images); None means 1."""
    extras: Sequence[Mapping[str, float]] = field(default_factory=tuple)
    """One a sample: original and target size and crop offset in pixels ("width", "height", "crop_w",
    "crop_h", "target_width", "target_height"), which SDXL is conditioned on; a clip's "frame_rate", which LTX
    is."""
    captions: Sequence[str] = ()
    """One a sample, as the text encoder is given it: for runs that train the text encoder."""
    given: Sequence[Conditioning] = ()
    """The part of each sample's conditioning that is its own and not its caption's: a clip's first frame."""
    preserved: Captions | None = None
    """Where preservation is due: the captions at which the LoRA is held to the base."""
    slider: SliderTexts | None = None
    """For a slider from words: what it is between."""
    opposite: Batch | None = None
    """For a slider from pairs: the other end, which the LoRA learns at strength -1."""

    def with_captions(self, captions: Captions) -> Batch:
        """Return the batch with other captions in place of its own, and what else it is given."""
        given = self.given or ({},) * len(captions.conditioning)
        conditioning = [{**text, **own} for text, own in zip(captions.conditioning, given, strict=True)]
        return replace(self, conditioning=conditioning, captions=captions.texts)


class Dataset(Protocol):
    """Encoded samples in an order that is a pure function of (seed, index)."""

    @property
    def fingerprint(self) -> str: ...

    def batch(self, size: int, *, seed: int, index: int) -> Batch:
        """Return micro-batch number `index` (counted from the first step of the run, over all ranks)."""
        ...


class Captioned(Protocol):
    """A Dataset for runs with preservation."""

    def preserved_captions(self, size: int, *, seed: int, index: int) -> Captions:
        """Return the captions of micro-batch `index` without what is learned: the class word in place of the
        trigger, or empty."""
        ...


class Samples(Protocol):
    """Encoded samples visited one by one, each the same at every visit: what a model is measured on."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Batch:
        """Return sample `index` as a batch of one: first caption, nothing dropped, shuffled or flipped."""
        ...


class CaptionedSamples(Samples, Protocol):
    """Samples that can be measured without their captions too."""

    def sample_without_caption(self, index: int) -> Batch:
        """Return sample `index` with the empty caption."""
        ...


class Sampling(Protocol):
    """The part of ComfyUI's `model_sampling` that training needs. Sigma is the only noise coordinate."""

    @property
    def sigma_min(self) -> Tensor: ...

    @property
    def sigma_max(self) -> Tensor: ...

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent_image: Tensor) -> Tensor: ...

    def calculate_denoised(self, sigma: Tensor, model_output: Tensor, model_input: Tensor) -> Tensor: ...

    def percent_to_sigma(self, percent: float) -> float: ...


@dataclass(frozen=True)
class HeldBase:
    """A base model whose weights the engine owns."""

    module: nn.Module
    """The network, for finding its repeated blocks."""
    layers: Mapping[str, FrozenLayer]
    """By module path; every one computes through its accessor."""


@dataclass(frozen=True)
class OffloadOptions:
    """How much of an offloaded base stays on the device, and how much host memory stays free."""

    host_reserve: int = 0
    """Bytes of host memory to leave free, on top of the system's reserve."""
    blocks_on_device: frozenset[str] = frozenset()
    """Paths of the repeated blocks that stay on the device."""
    pinned: Any = field(default=None, compare=False)
    """Pinned memory for the base that outlives this hold; None for memory of this hold alone."""


OFFLOAD_ALL = OffloadOptions()
"""Every block is in host memory, of which only the system's reserve stays free."""


class Denoiser(Protocol):
    """A frozen base model, ready to be trained on."""

    @property
    def family(self) -> Family: ...

    @property
    def fingerprint(self) -> str:
        """Digest of the names, shapes and numbers of all weights; the same for the same file."""
        ...

    def is_base(self, known_as: str) -> bool:
        """Return whether a state whose `base` is `known_as` was trained on this one; earlier versions
        had other fingerprints."""
        ...

    @property
    def structure(self) -> str:
        """Digest of all that decides which tensors a step over a batch makes: the same for every base of one
        architecture."""
        ...

    @property
    def cache_folder(self) -> Path | None:
        """The folder for what later runs need not compute again; None keeps nothing."""
        ...

    @property
    def is_mapped(self) -> bool:
        """Whether the weights stay in their file instead of host memory."""
        ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        """The formats that the network can be computed in, first the one to choose for `device`."""
        ...

    def free_bytes(self) -> int | None:
        """Return how many bytes of `device` a run may take, its base included, once everything else was
        unloaded; None if unknown.
        """
        ...

    @property
    def specs(self) -> Mapping[str, LayerSpec]:
        """Every layer an adapter could sit on, by module path. Readable without holding the weights."""
        ...

    def is_faster(self, format: str) -> bool:
        """Return whether `device` multiplies by weights of an 8-bit `format` faster as they are stored than
        made whole.
        """
        ...

    def hold(
        self,
        dtype: torch.dtype,
        store: str = "resident",
        offload: OffloadOptions = OFFLOAD_ALL,
        compute: str = "full",
    ) -> AbstractContextManager[HeldBase]:
        """Own the weights during the context: computing in `dtype`, restored exactly on every exit.

        `store` is one of `memory.weight_store.STORES`, `compute` of its COMPUTES; `offload` counts if blocks
        are copied at each use.
        """
        ...

    def scale_latents(self, latents: Tensor) -> Tensor:
        """Bring the VAE's latents to the statistics that the model was trained on."""
        ...

    def denoise(self, x_t: Tensor, sigma: Tensor, batch: Batch) -> Tensor:
        """Return the denoised latents (B, C, H, W) float32 predicted at `sigma` (B,)."""
        ...


class Encoder(Protocol):
    """VAE and text encoders, each with a digest that changes when what it computes would change."""

    @property
    def image_fingerprint(self) -> str: ...

    @property
    def text_fingerprint(self) -> str: ...

    @property
    def bucket_step(self) -> int:
        """Image sides must be multiples of this many pixels (VAE reduction times patch size)."""
        ...

    @property
    def reduction(self) -> int:
        """Pixels per latent cell, along one side."""
        ...

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """Return an image's latent shape, without batch; its pixels are multiples of `bucket_step`."""
        ...

    def encode_image(self, pixels: Tensor) -> Tensor:
        """(B, H, W, 3) float32 in 0..1 -> (B, C, H/r, W/r) float32 latents, not yet scaled for the model."""
        ...

    def clip_frames(self, frames: int) -> int:
        """Return the largest number of frames, up to `frames`, that the VAE takes at once.

        Raises UserError for a VAE of images.
        """
        ...

    def encode_clip(self, pixels: Tensor) -> Tensor:
        """(frames, H, W, 3) float32 in 0..1 -> (1, C, T, H/r, W/r) float32 latents of one clip."""
        ...

    def encode_sound(self, samples: Tensor, rate: int) -> Tensor:
        """(2, samples) float32 at `rate` per second -> (1, C, ...) float32 latents."""
        ...

    @property
    def first_frame(self) -> str:
        """What conditions the model on a clip's first frame, part of the cache's keys; "" for nothing."""
        ...

    @property
    def needs_first_frame(self) -> bool:
        """Whether the model is always conditioned on it."""
        ...

    def encode_first_frame(self, pixels: Tensor) -> Conditioning:
        """Return what the model is given for a clip (frames, H, W, 3) whose first frame is known.

        A "denoise_mask" (1, 1, T, H or 1, W or 1) is 0 where latents are given and 1 where they are noised.
        """
        ...

    def encode_text(self, caption: str) -> Conditioning: ...

    @property
    def edit_node(self) -> str:
        """What `encode_edit` encodes with, beside VAE and text encoders."""
        ...

    def encode_edit(self, caption: str, references: Sequence[Tensor]) -> Conditioning:
        """Return the conditioning of a caption and the images that it edits, each (1, H, W, 3) in 0..1.

        Raises UserError if the model takes no references.
        """
        ...

    @property
    def inpaints(self) -> bool:
        """Whether the model is given the masked image and its mask."""
        ...

    def encode_masked(self, pixels: Tensor, mask: Tensor) -> Conditioning:
        """Return what an inpainting model is given of pixels (1, H, W, 3) and a mask (1, H, W) in 0..1, which
        is 1 where it draws."""
        ...


OnProgress = Callable[[int, int, str], None]
"""Called as on_progress(done, total, message); may raise to cancel."""


def no_progress(done: int, total: int, message: str) -> None:
    """Report nothing."""
