"""A caption with reference images, and a masked image, as the stock nodes make their CONDITIONING.

The one rule: the nodes' own code makes it, so that what is trained is what a graph with these nodes samples.
Which one a model has is a field of its family's row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy_extras.nodes_edit_model
import comfy_extras.nodes_flux
import comfy_extras.nodes_qwen
from torch import Tensor

import nodes

from ...family import Family
from ...user_error import UserError


def encode_edit(clip: Any, vae: Any, caption: str, images: Sequence[Tensor], family: Family) -> Any:
    """Return the CONDITIONING of a caption and its reference images (1, H, W, 3).

    Without images it is that of CLIP Text Encode.
    """
    if not images:
        return clip.encode_from_tokens_scheduled(clip.tokenize(caption))
    conditioning = ENCODERS[family.references](clip, vae, caption, images)
    if not family.reference_method:
        return conditioning
    method = comfy_extras.nodes_flux.FluxKontextMultiReferenceLatentMethod
    return method.execute(conditioning, family.reference_method).result[0]


def mask_image(vae: Any, pixels: Tensor, mask: Tensor) -> dict[str, Any]:
    """Return what InpaintModelConditioning adds to a conditioning for pixels and a mask, 1 where it draws."""
    empty: list[Any] = [[None, {}]]
    node = nodes.InpaintModelConditioning()
    return node.encode(empty, empty, pixels, vae, mask, noise_mask=False)[0][0][1]  # type: ignore[no-any-return]


def _reference_latent(clip: Any, vae: Any, caption: str, images: Sequence[Tensor]) -> Any:
    """Return the text's conditioning with every image, through VAE Encode and Reference Latent."""
    conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(caption))
    for image in images:
        latent = {"samples": vae.encode(image)}
        node = comfy_extras.nodes_edit_model.ReferenceLatent
        conditioning = node.execute(conditioning, latent).result[0]
    return conditioning


def _qwen_edit_plus(clip: Any, vae: Any, caption: str, images: Sequence[Tensor]) -> Any:
    node = comfy_extras.nodes_qwen.TextEncodeQwenImageEditPlus
    return node.execute(clip, caption, vae, *images).result[0]


def _qwen_edit(clip: Any, vae: Any, caption: str, images: Sequence[Tensor]) -> Any:
    if len(images) > 1:
        raise UserError(
            f"references: the first Qwen-Image-Edit, as the model's file is named, takes one image, got "
            f"{len(images)}; leave one, or load Qwen-Image-Edit-2509 or later."
        )
    return comfy_extras.nodes_qwen.TextEncodeQwenImageEdit.execute(clip, caption, vae, images[0]).result[0]


def _z_image_omni(clip: Any, vae: Any, caption: str, images: Sequence[Tensor]) -> Any:
    try:
        from comfy_extras.nodes_zimage import TextEncodeZImageOmni
    except ImportError:
        raise UserError("this ComfyUI is too old for Z-Image with references; update ComfyUI.") from None
    pictures = {f"image{index}": image for index, image in enumerate(images, 1)}
    return TextEncodeZImageOmni.execute(clip, caption, vae=vae, **pictures).result[0]


ENCODERS: Mapping[str, Callable[[Any, Any, str, Sequence[Tensor]], Any]] = {
    "ReferenceLatent": _reference_latent,
    "TextEncodeQwenImageEdit": _qwen_edit,
    "TextEncodeQwenImageEditPlus": _qwen_edit_plus,
    "TextEncodeZImageOmni": _z_image_omni,
}
"""`Family.references` -> the stock node's code."""
