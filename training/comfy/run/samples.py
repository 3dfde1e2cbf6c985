"""Sample images from a LoRA while it is trained, by ComfyUI's own sampler.

They are drawn between two optimizer steps, while ComfyUI has the base back, so they change nothing in the
training. Whatever goes wrong costs samples, never the run; only Cancel ends it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import node_helpers
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from ...config import SampleConfig
from ...data.bucket import Size
from ...data.caption import LONGEST, LYRICS, literal
from ...data.open_sample import fit_image
from ...family import Family, is_text
from ...files.whole_file import whole_file
from ...log import log
from ...loop import Handles
from ...memory.out_of_memory import is_out_of_memory
from ...run.checkpoints import States
from ...state import TrainState
from ...user_error import UserError
from ..files.trained_lora import with_lora
from ..model.edits import encode_edit
from ..model.first_frame import give_first_frame
from ..model.sound import Sound, decode_sound, encode_song, encode_sound, is_of_sound, with_seconds
from ..model.unload import unload
from .notes import family_in
from .sample_clips import save_clip
from .sample_inputs import save_input
from .sample_sounds import save_sound

SAMPLERS: list[str] = comfy.samplers.KSampler.SAMPLERS
SCHEDULERS: list[str] = comfy.samplers.KSampler.SCHEDULERS

SHOWN = 5
"""Steps that a warning lists at most."""

SILENCE_RATE = 44100
"""Samples in a second of the silence that gives a sound's latents their size."""
PREVIEW_SIDE = 512
"""Pixels of the longer side of an image on the node."""
IMAGE, CLIP, SOUND = KINDS = (".png", ".webp", ".flac")
"""Endings of a sample's file: of an image, of a clip as the node shows it, and of a sound."""
LYRICS_MARK, LINE_MARK = " [lyrics] ", " / "
"""In a prompt: before the lyrics of a song, and between two lines of them."""


Encoded = dict[str, Any]
"""A text -> the CONDITIONING that the text encoder gives of it."""


@dataclass(frozen=True)
class SamplePrompts(SampleConfig):
    """The settings of sample images, and how often they are drawn."""

    clip: Any
    vae: Any
    prompts: tuple[str, ...]
    """[trigger] stands for the trigger word of the dataset."""
    images: tuple[Tensor, ...] = field(default=(), repr=False)
    """Reference images, up to three IMAGEs: each a batch with one for every prompt, or one for all. A clip
    begins with the first IMAGE."""
    model: Any = None
    """The MODEL to draw with; None for the one that is trained."""
    model_file: str = ""
    """Name of its file, which may tell that it is distilled."""

    @property
    def references(self) -> list[list[Tensor]]:
        """The reference images of each prompt."""
        return [
            [image[index if len(image) > 1 else 0][None] for image in self.images]
            for index in range(len(self.prompts))
        ]

    def chosen(self, indices: Sequence[int]) -> SamplePrompts:
        """Return the settings for some of the prompts, with their references."""
        images = tuple(image[list(indices)] if len(image) > 1 else image for image in self.images)
        return replace(self, prompts=tuple(self.prompts[index] for index in indices), images=images)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UserError("Sample Prompts: there is no prompt; write one per line.")
        if (longest := max(map(len, (*self.prompts, self.negative)))) > LONGEST:
            raise UserError(f"Sample Prompts: a prompt has {longest} letters; at most {LONGEST} are allowed.")
        if self.clip is None or self.vae is None:
            raise UserError("Sample Prompts: drawing needs CLIP and VAE; connect them.")
        for number, image in enumerate(self.images, 1):
            if len(image) not in (1, len(self.prompts)):
                raise UserError(
                    f"Sample Prompts: image{number} has {len(image)} images for {len(self.prompts)} prompts; "
                    "give one for each, or one for all."
                )
        if not (self.guidance >= 0 or self.guidance == -1):
            raise UserError(f"guidance must be 0 or more, or -1 for the model's own; got {self.guidance}.")

    @property
    def draws_clips(self) -> bool:
        """Whether samples are clips: asked for, and drawn by a model whose VAE has frames."""
        return self.frames > 1 and getattr(self.vae, "latent_dim", 2) == 3

    @property
    def is_sound(self) -> bool:
        """Whether samples are sounds."""
        return is_of_sound(self.vae)

    def drawn_by(self, trained: Family) -> Family:
        """Return the family of the model that draws, `trained` where that is the one that is trained."""
        return trained if self.model is None else family_in(self.model_file, self.model)

    def of(self, trained: Family) -> SamplePrompts:
        """Return the settings with the guidance scale of the model that draws, if none is set."""
        return self if self.cfg else replace(self, cfg=self.drawn_by(trained).cfg)

    def notes(self, trained: Family) -> list[str]:
        """Return a sentence for each setting that harms samples or has no effect on them."""
        family = self.drawn_by(trained)
        cfg, notes = self.of(family).cfg, []
        if cfg != 1 and family.cfg == 1:
            notes.append(
                f"cfg {cfg:g} of Sample Prompts: this base ({family.name}) is distilled for cfg 1. Samples "
                "take twice as long and may look burnt even if the LoRA is good; 0 chooses what suits."
            )
        if self.guidance >= 0 and family.guidance is None:
            notes.append(
                f"guidance {self.guidance:g} of Sample Prompts: {family.name} has no guidance input."
            )
        if self.negative and cfg == 1:
            notes.append("the negative prompt of Sample Prompts has no effect at cfg 1.")
        if family.needs_first_frame and not (self.images and self.draws_clips):
            notes.append(
                f"{family.name} goes on from a clip's first frame: connect image1 of Sample Prompts and set "
                "its frames above 1; without them its samples say little."
            )
        if self.frames > 1 and not self.draws_clips:
            kind = "sound; sounds" if self.is_sound else "images; images"
            notes.append(f"frames {self.frames} of Sample Prompts: this VAE is for {kind} are drawn.")
        return notes


@dataclass
class SampleWriter:
    """Draws a run's samples when they are due, saves them and shows them on the node."""

    settings: SamplePrompts
    model: Any
    """The MODEL that the LoRA is trained on; it draws unless the settings have another."""
    family: Family
    folder: Path
    """Samples are saved as `folder`/step-<n>-<index of the prompt>.png, clips as .webp and .mp4, sounds as
    .flac; what they are made from as input-<index>.png."""
    first: int
    """Step at which the run starts."""
    last: int
    trigger: str = ""
    node_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Goes into the files: "workflow" and "prompt", as ComfyUI's Save Image writes them."""
    encoded: Encoded = field(default_factory=dict)
    """The texts of earlier sets, so that the text encoder is not loaded for each set anew."""

    def on_start(self, states: States) -> None:
        """Draw the first set, and whatever is missing of the sets that are due, as after a kill. Warn of sets
        that cannot be drawn because their training states are gone."""
        indices, existing, lost = range(len(self.settings.prompts)), set(self.folder.glob("step-*")), []
        for step in self.steps_due(max(states)):
            paths = [{self.path(step, index, kind) for kind in KINDS} for index in indices]
            if missing := [index for index in indices if not paths[index] & existing]:
                try:
                    state = states[step]()
                except (KeyError, ValueError):
                    lost.append(str(step))
                else:
                    self.draw(state, missing)
        if lost:
            listed = ", ".join(lost[:SHOWN]) + (f" and {len(lost) - SHOWN} more" if lost[SHOWN:] else "")
            log.warning(
                "samples of step %s are missing and cannot be drawn: their training states are gone.",
                listed,
            )

    def draw_if_due(self, step: int, handles: Handles, *, now: bool = False) -> None:
        """Draw the set of `step`, if one is due or asked for `now`."""
        due = bool(self.settings.every) and step % self.settings.every == 0
        if due or now:
            with handles.give_base_back():
                self.draw(handles.state(), range(len(self.settings.prompts)))

    def steps_due(self, reached: int) -> list[int]:
        """Return the steps up to `reached` at which a set is due."""
        every = self.settings.every
        if not every:
            return []
        begin = [self.first] if self.settings.before_training else []
        return [*begin, *range((self.first // every + 1) * every, reached + 1, every)]

    def path(self, step: int, index: int, kind: str) -> Path:
        return self.folder / f"step-{step:08d}-{index}{kind}"

    def draw(self, state: TrainState, indices: Sequence[int]) -> None:
        """Draw, save and show these prompts with the LoRA of `state`. A failure costs a warning."""
        settings = self.settings.chosen(indices)
        interrupted = (
            comfy.model_management.InterruptProcessingException
        )  # an Exception in one version of ComfyUI
        bar = comfy.utils.ProgressBar(self.last - self.first, node_id=self.node_id)
        try:
            drawn = draw_samples(settings, self.model, state, self.family, self.trigger, encoded=self.encoded)
            for index, frames in zip(indices, drawn, strict=True):
                save_input(self.settings.references[index], self.folder / f"input-{index}.png")
                texts = {**self.metadata, "graft_prompt": self.settings.prompts[index]}
                if isinstance(frames, Sound):
                    save_sound(frames, self.path(state.step, index, SOUND), texts)
                elif frames is not None:
                    if len(frames) > 1:
                        save_clip(frames, self.settings.fps, self.path(state.step, index, CLIP), texts)
                    else:
                        save_png(frames[0], self.path(state.step, index, IMAGE), texts)
                    preview = ("JPEG", frames[len(frames) // 2], PREVIEW_SIDE)
                    bar.update_absolute(state.step - self.first, self.last - self.first, preview)
        except interrupted:
            raise
        except Exception:
            log.warning("no samples of step %d; training goes on without them.", state.step, exc_info=True)


def draw_samples(
    settings: SamplePrompts,
    model: Any,
    state: TrainState,
    family: Family,
    trigger: str = "",
    *,
    strength: float = 1.0,
    encoded: Encoded | None = None,
) -> Iterator[Sequence[Image.Image] | Sound | None]:
    """Yield one image, the frames of a clip or a sound per prompt, drawn with the LoRA of `state`; None if
    memory runs out. What the text encoder gives is kept in `encoded`, unless the LoRA changes it.
    """
    settings, drawn_by = settings.of(family), settings.drawn_by(family)
    patched, clip = with_lora(
        model if settings.model is None else settings.model, settings.clip, state, family, strength
    )
    seed = settings.seed + (state.step if settings.walk_seed else 0)
    known = {} if encoded is None or any(map(is_text, state.weights)) else encoded
    for prompt, references in zip(settings.prompts, settings.references, strict=True):
        text = prompt.replace("[trigger]", literal(trigger))
        yield _draw_prompt(settings, patched, clip, Prompt(text, references, drawn_by, known), seed)


@dataclass(frozen=True)
class Prompt:
    """What one sample is drawn from."""

    text: str
    references: Sequence[Tensor]
    family: Family
    encoded: Encoded = field(default_factory=dict)

    def encode(self, settings: SamplePrompts, clip: Any, text: str, size: Size) -> Any:
        """Return the CONDITIONING of a text with the references, which get about as many pixels as `size`.
        Texts alone are encoded once.
        """
        if self.references:
            return self._encode(settings, clip, text, size)
        if text not in self.encoded:
            self.encoded[text] = self._encode(settings, clip, text, size)
        return self.encoded[text]

    def _encode(self, settings: SamplePrompts, clip: Any, text: str, size: Size) -> Any:
        if settings.is_sound:
            song = LYRICS.join(part.replace(LINE_MARK, "\n") for part in text.split(LYRICS_MARK, 1))
            return with_seconds(encode_song(clip, song), settings.seconds)
        references = () if self.family.first_frame else self.references
        images = [fit_image(image, size, self.family.bucket_step) for image in references]
        encoded = encode_edit(clip, settings.vae, text, images, self.family)
        if settings.guidance < 0:
            return encoded
        return node_helpers.conditioning_set_values(encoded, {"guidance": settings.guidance})


def _draw_prompt(
    settings: SamplePrompts, model: Any, clip: Any, prompt: Prompt, seed: int
) -> Sequence[Image.Image] | Sound | None:
    """Draw one prompt; at half the size if memory runs out, None if it runs out again."""
    step = prompt.family.bucket_step
    for divisor in (1, 2):
        width, height = (
            max(step, side // divisor // step * step) for side in (settings.width, settings.height)
        )
        try:
            with torch.inference_mode():
                return _sample(settings, model, clip, prompt, seed, width, height)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        unload()
        log.warning("memory ran out for the sample %r at %dx%d.", prompt.text, width, height)
    return None


def _sample(
    settings: SamplePrompts, model: Any, clip: Any, prompt: Prompt, seed: int, width: int, height: int
) -> Sequence[Image.Image] | Sound:
    def on_step(*_: Any) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()

    positive, negative = (
        prompt.encode(settings, clip, text, (width, height)) for text in (prompt.text, settings.negative)
    )
    frames = [settings.vae.downscale_ratio[0](settings.frames)] if settings.draws_clips else []
    given: dict[str, Any] = {"samples": _empty_latent(settings, model, width, height, frames)}
    if frames and prompt.family.first_frame and prompt.references:
        size = (width, height, int(settings.vae.upscale_ratio[0](frames[0])))
        positive, negative, given = give_first_frame(
            prompt.family.first_frame, settings.vae, prompt.references[0], size, positive, negative
        )
    samples = comfy.sample.sample(
        model,
        comfy.sample.prepare_noise(given["samples"], seed),
        settings.steps,
        settings.cfg,
        settings.sampler,
        settings.scheduler,
        positive,
        negative,
        given["samples"],
        noise_mask=given.get("noise_mask"),
        callback=on_step,
        disable_pbar=True,
        seed=seed,
    )
    if settings.is_sound:
        return decode_sound(settings.vae, samples)
    pixels = settings.vae.decode(samples)  # in tiles if the whole does not fit
    pixels = pixels.reshape(-1, *pixels.shape[-3:])[: None if settings.draws_clips else 1]
    colors = (pixels.clamp(0, 1) * 255).round().to("cpu", torch.uint8).numpy()
    return [Image.fromarray(frame) for frame in colors]


def _empty_latent(
    settings: SamplePrompts, model: Any, width: int, height: int, frames: Sequence[int]
) -> Tensor:
    if settings.is_sound:
        silence = torch.zeros(2, round(SILENCE_RATE * settings.seconds))
        return torch.zeros_like(encode_sound(settings.vae, Sound(silence, SILENCE_RATE)))
    reduction = int(settings.vae.spacial_compression_encode())
    channels = model.get_model_object("latent_format").latent_channels
    latent = torch.zeros(1, channels, *frames, height // reduction, width // reduction)
    return comfy.sample.fix_empty_latent_channels(model, latent)  # type: ignore[no-any-return]


def save_png(image: Image.Image, path: Path, texts: Mapping[str, Any]) -> None:
    """Write an image whole or not at all, with `texts` in it: strings as they are, the rest as JSON."""
    info, file = PngInfo(), io.BytesIO()
    for name, value in texts.items():
        info.add_text(name, value if isinstance(value, str) else json.dumps(value))
    image.save(file, "png", pnginfo=info)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        temporary.write_bytes(file.getvalue())
