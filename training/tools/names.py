"""What LoRA files call the weights of a checkpoint: kohya and native names for the network and its text
encoders."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..family import GENERIC
from ..layer import LayerSpec
from ..lora_file import LoraFile, LoraLayer
from ..start import Rows, match_layers

NETWORK_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
"""Before the network's own paths: in a full checkpoint, in ComfyUI, in a file of the network alone."""

TEXT_ENCODERS: Mapping[str, tuple[str, ...]] = {
    "cond_stage_model.transformer.": ("lora_te_", "lora_te1_"),
    "conditioner.embedders.0.transformer.": ("lora_te1_", "lora_te_"),
    "text_encoders.clip_l.transformer.": ("lora_te1_", "lora_te_"),
    "text_encoders.clip_g.transformer.": ("lora_te2_",),
    "text_encoders.t5xxl.transformer.": ("lora_te3_",),
}
"""Checkpoint prefix -> kohya prefixes, the one to write first."""

LEFT_OUT = ("first_stage_model.", "vae.", "model_ema.")
"""Parts of a checkpoint that a LoRA cannot hold."""


def split_key(key: str) -> tuple[str, str] | None:
    """Return a weight's (prefix, path) in a checkpoint; None for what no LoRA can hold."""
    if not key.endswith(".weight") or key.startswith(LEFT_OUT):
        return None
    path = key.removesuffix(".weight")
    for prefix in (*TEXT_ENCODERS, *NETWORK_PREFIXES):
        if path.startswith(prefix):
            return prefix, path.removeprefix(prefix)
    raise AssertionError("the empty prefix fits everything")


def kohya_name(key: str) -> str | None:
    """Return the kohya name of a checkpoint's weight."""
    if (found := split_key(key)) is None:
        return None
    prefix, path = found
    return (TEXT_ENCODERS[prefix][0] if prefix in TEXT_ENCODERS else "lora_unet_") + path.replace(".", "_")


def weight_names(weights: Mapping[str, Tensor]) -> dict[str, Rows]:
    """Return every name that files use for a checkpoint's weights -> (key, 0, number of outputs)."""
    names: dict[str, Rows] = {}
    for key, weight in weights.items():
        if weight.ndim < 2 or (found := split_key(key)) is None:
            continue
        prefix, path = found
        spellings = [
            f"{kohya}{path.replace('.', '_')}" for kohya in TEXT_ENCODERS.get(prefix, ("lora_unet_",))
        ]
        spellings += [key.removesuffix(".weight")]
        if prefix in NETWORK_PREFIXES:
            spellings += [f"diffusion_model.{path}", f"base_model.model.{path}", path]
        names.update(dict.fromkeys(spellings, (key, 0, weight.shape[0])))
    return names


def match_weights(
    file: LoraFile, weights: Mapping[str, Tensor]
) -> tuple[dict[str, LoraLayer], tuple[str, ...]]:
    """Return the file's layers by the checkpoint's keys, and the file's keys that match nothing.

    Raises ValueError when nothing matches, or a layer does not have its weight's shape.
    """
    specs = {
        key: LayerSpec("weight", tuple(weight.shape)) for key, weight in weights.items() if weight.ndim >= 2
    }
    matched = match_layers(file, specs, GENERIC, weight_names(weights))
    for key, layer in matched.layers.items():
        found, wanted = layer.product().shape, weights[key].flatten(1).shape
        if found != wanted:
            raise ValueError(
                f"{file.name}: {layer.name}: made for {found[0]} outputs of {found[1]} weights, but {key} "
                f"has {wanted[0]} of {wanted[1]}; choose the base that the file was trained on."
            )
    return dict(matched.layers), matched.unmatched
