"""Model families as data: everything that differs between SDXL, SD3 and Flux and is not in ComfyUI's own classes.

A family is a row of FAMILIES, never a subclass; the loop has no branch on the model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """Defaults and names for one architecture."""

    name: str
    """As shown to people and written to metadata."""
    architecture: str
    """modelspec.architecture of the LoRA file."""
    base_model: str
    """ss_base_model_version of the LoRA file."""
    targets: Mapping[str, tuple[str, ...]]
    """Preset name -> globs over module paths of the diffusion model. Only layers of a known kind are taken."""
    blocks: tuple[str, ...]
    """Globs of the repeated blocks: the units of checkpointing, offloading and per-block settings."""
    lr: float = 1e-4
    sigmas: str = "schedule"
    """Default of ObjectiveConfig.sigmas."""
    shift: float = 1.0
    """Default of ObjectiveConfig.shift."""
    weighting: str = "output"
    """The space in which the squared error is measured by default; see WEIGHTINGS in objective.py."""
    bucket_step: int = 16
    """Image sides are multiples of this many pixels: the VAE's reduction times what the network halves or patches."""
    key_prefix: str = "lora_unet_"
    """Prefix of kohya keys; an empty prefix writes native "diffusion_model.<path>" keys."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    """Warnings shown when this family is trained."""


_MMDIT_ATTENTION = ("joint_blocks.*.*_block.attn*.qkv", "joint_blocks.*.*_block.attn*.proj")
_MMDIT_MLP = ("joint_blocks.*.*_block.mlp.fc*",)

GENERIC = Family(
    name="generic",
    architecture="unknown",
    base_model="unknown",
    targets={"attn": ("*attn*", "*attention*"), "attn-mlp": ("*block*", "*layer*"), "linear": ("*",), "all": ("*",)},
    blocks=("*blocks.*", "*layers.*"),
    key_prefix="",
)

FAMILIES: Mapping[str, Family] = {
    "SD3": Family(
        name="SD3",
        architecture="stable-diffusion-3",
        base_model="sd3",
        targets={
            "attn": _MMDIT_ATTENTION,
            "attn-mlp": _MMDIT_ATTENTION + _MMDIT_MLP,
            "linear": ("*",),
            "all": ("*",),
        },
        blocks=("joint_blocks.*",),
        sigmas="logit-normal",
        shift=3.0,
    ),
}
"""By the class name of ComfyUI's model config (`comfy.supported_models`)."""


def family_named(name: str) -> Family:
    """Return the family whose `name` this is, the generic one where there is none."""
    return next((family for family in FAMILIES.values() if family.name == name), GENERIC)


def family_of(config_class: str) -> Family:
    """Return the family of a ComfyUI model config's class name, the generic one where there is none."""
    return FAMILIES.get(config_class, GENERIC)
