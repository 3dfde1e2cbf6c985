"""ComfyUI's VAE and CLIP as the engine's Encoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...family import Family
from ...model import Conditioning
from ...user_error import UserError
from .conditioning import read_conditioning
from .denoiser import ComfyDenoiser, require_plain
from .edits import encode_edit, mask_image
from .fingerprint import fingerprint
from .first_frame import give_first_frame
from .sound import Sound, encode_song, encode_sound, is_of_sound
from .unseen import find_unseen


class ComfyEncoder:
    """Encodes like the stock VAE Encode and CLIP Text Encode nodes, so training sees what sampling sees."""

    def __init__(self, vae: Any, clip: Any, family: Family, denoiser: ComfyDenoiser | None = None) -> None:
        """Take VAE and CLIP, and the model, without which no references and masks are encoded."""
        if clip is None:
            raise UserError(
                "no text encoder: this checkpoint has none; choose text encoder files in Load Base Model, "
                "or connect a CLIP loader."
            )
        if vae is None or vae.first_stage_model is None:
            raise UserError("no VAE: choose a VAE file in Load Base Model, or connect a VAE loader.")
        require_plain(clip.patcher, "CLIP")
        self.vae, self.clip = vae, clip
        self.bucket_step, self.family, self.denoiser = family.bucket_step, family, denoiser
        self.edit_node = f"{family.references} {family.reference_method}"
        self.inpaints = denoiser is not None and denoiser.inpaints

    @cached_property
    def image_fingerprint(self) -> str:
        return fingerprint(self.vae.first_stage_model, patchers=(self.vae.patcher,))

    @cached_property
    def text_fingerprint(self) -> str:
        return text_fingerprint(self.clip)

    @property
    def reduction(self) -> int:
        return int(self.vae.spacial_compression_encode())

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        frames = (1,) * (self.vae.latent_dim - 2)  # of a video VAE
        return (self.vae.latent_channels, *frames, height // self.reduction, width // self.reduction)

    def encode_image(self, pixels: Tensor) -> Tensor:
        comfy.model_management.throw_exception_if_processing_interrupted()
        with torch.inference_mode():
            return self.vae.encode(pixels).to("cpu", torch.float32).clone()  # type: ignore[no-any-return]

    @property
    def first_frame(self) -> str:
        return self.family.first_frame

    @property
    def needs_first_frame(self) -> bool:
        return self.family.needs_first_frame

    def encode_first_frame(self, pixels: Tensor) -> Conditioning:
        comfy.model_management.throw_exception_if_processing_interrupted()
        frames, height, width = pixels.shape[:3]
        size = (width, height, frames)
        empty: list[Any] = [[None, {}]]
        with torch.inference_mode():
            positive, _, latent = give_first_frame(self.first_frame, self.vae, pixels[:1], size, empty, empty)
            given, mask = read_conditioning(positive), latent.get("noise_mask")
        return given if mask is None else {**given, "denoise_mask": mask.cpu().clone()}

    def clip_frames(self, frames: int) -> int:
        if self.vae.latent_dim != 3 or getattr(self.vae, "not_video", False):
            raise UserError(
                "frames: this VAE is for images and takes no clips; set frames to 0 in Load Dataset, or "
                "choose a video model and its VAE."
            )
        counted, uncounted = self.vae.downscale_ratio[0], self.vae.upscale_ratio[0]
        return max(1, int(uncounted(counted(frames))))

    def encode_clip(self, pixels: Tensor) -> Tensor:
        return self.encode_image(pixels)  # a video VAE takes a batch of images as one clip

    def encode_sound(self, samples: Tensor, rate: int) -> Tensor:
        comfy.model_management.throw_exception_if_processing_interrupted()
        if not is_of_sound(self.vae):
            raise UserError(
                "seconds: this VAE is for images and takes no sound; set seconds to 0 in Load Dataset, or "
                "choose a model of sound and its VAE."
            )
        return encode_sound(self.vae, Sound(samples, rate))

    def encode_text(self, caption: str) -> Conditioning:
        comfy.model_management.throw_exception_if_processing_interrupted()
        with torch.inference_mode():
            return read_conditioning(encode_song(self.clip, caption))

    def encode_edit(self, caption: str, references: Sequence[Tensor]) -> Conditioning:
        comfy.model_management.throw_exception_if_processing_interrupted()
        with torch.inference_mode():
            edit = read_conditioning(encode_edit(self.clip, self.vae, caption, references, self.family))
        if self.denoiser is not None and "reference_latents" in find_unseen(self.denoiser, edit):
            raise UserError(
                f"references: {self.family.name} takes no reference images, so it would not learn from them; "
                "leave references empty, or load a model for edits."
            )
        return edit

    def encode_masked(self, pixels: Tensor, mask: Tensor) -> Conditioning:
        with torch.inference_mode():
            return read_conditioning([[None, mask_image(self.vae, pixels, mask)]])


def text_fingerprint(clip: Any) -> str:
    """Return what stands for a CLIP's weights, patches, layer and tokenizer."""
    parts = (clip.cond_stage_model, clip.patcher.patches, {"layer": clip.layer_idx or 0})
    return fingerprint(*parts, patchers=(clip.patcher,)) + type(clip.tokenizer).__name__
