"""Model families as rows: what differs between SDXL, SD3 and Flux and is not in ComfyUI's own classes.

A family is a row of FAMILIES, never a subclass; no other file branches on a model's name. A new model is a
row here and its test. Only what other programs call its layers is elsewhere, in `files/lora/names.py`: such
names belong to a kind of network, which several models share, so a row points to them by `export`. Without it
a model trains, saves and loads under ComfyUI's own names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Caption:
    """The shape of one encoded caption."""

    tokens: int
    """Those of a long caption."""
    width: int
    pooled: int = 0
    """Width of the pooled output; 0 where the network takes none."""


@dataclass(frozen=True)
class InPlaceBlock:
    """A block of ComfyUI's that adds to its inputs in place."""

    streams: tuple[str, ...]
    """Arguments that it adds to, in the order of its signature."""
    readers: tuple[str, ...]
    """Children that save a stream for the backward pass while the block goes on adding to it."""


@dataclass(frozen=True)
class Family:
    """Defaults and names for one architecture."""

    name: str
    """As shown to people and written to metadata; unique."""

    # Layers
    targets: Mapping[str, tuple[str, ...]]
    """Preset name -> globs over the diffusion model's module paths. Only known kinds of layers are taken."""
    blocks: tuple[str, ...]
    """Globs of the repeated blocks: the units of offloading and per-block settings."""
    units: tuple[str, ...] = ()
    """Globs of what checkpointing recomputes as a whole; empty where that is the blocks. ComfyUI's U-Nets
    call the parts of a block one by one."""
    idle: tuple[str, ...] = ()
    """Globs of layers whose output nothing reads, "-1" the last block: an adapter there learns nothing."""
    in_place: Mapping[str, InPlaceBlock] = field(default_factory=dict)
    """Classes of ComfyUI's blocks that add to their inputs in place, which a backward pass needs unchanged.
    Others that do are found in the first step, at the price of more copies (`memory/in_place.py`)."""
    text_encoders: Mapping[str, str] = field(default_factory=dict)
    """CLIP encoders that can be trained too, by ComfyUI's names -> prefix of their kohya keys."""
    pooled: tuple[str, ...] = ()
    """Those of them whose last layer the network sees, in the pooled output."""
    preset_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Classes that LyCORIS's presets name -> globs of the same modules in ComfyUI's network."""

    # Training and sampling
    sigmas: str = "schedule"
    """Default of ObjectiveConfig.sigmas."""
    shift: float = 1.0
    """Default of ObjectiveConfig.shift."""
    resolution_shift: str = "none"
    """Default of ObjectiveConfig.resolution_shift."""
    space: str = "output"
    """Default of ObjectiveConfig.space: what the error is measured in."""
    guidance: float | None = None
    """Guidance input during training; None where the network has none or ComfyUI's own default is right."""
    cfg: float = 4.0
    """Guidance scale to draw samples with; 1 for a model that was distilled to need none."""
    first_frame: str = ""
    """"module.Class" of the stock node in comfy_extras that conditions it on a clip's first frame."""
    needs_first_frame: bool = False
    """Whether it is never trained or drawn without one."""
    bucket_step: int = 16
    """Pixels that divide image sides: the VAE's reduction times what the network halves or patches."""
    resolution: int = 0
    """Pixels: the model was made for about resolution x resolution of them; 0 where it takes many sizes."""
    patch: int = 2
    """Latent cells per token along one side."""
    notes: tuple[str, ...] = ()
    """Warnings shown when this family is trained."""

    # Reference images
    references: str = "ReferenceLatent"
    """Stock node that gives the model reference images: a row of ENCODERS in comfy/model/edits.py. A model
    that does not see what the node adds takes none."""
    references_by_file: Mapping[str, str] = field(default_factory=dict)
    """Patterns in the name of the model's file, which alone tells some apart, -> the node for these."""
    reference_method: str = ""
    """Choice of FluxKontextMultiReferenceLatentMethod behind it; empty for the model's own."""

    inpaints: bool = False
    """Whether the model is given a masked image and its mask; SD's inpainting models say so themselves."""

    # LoRA files
    architecture: str = "unknown"
    """modelspec.architecture of the LoRA file, without "/lora"."""
    base_model: str = "unknown"
    """ss_base_model_version of the LoRA file, spelled as kohya's sd-scripts does where it knows the model."""
    implementation: str = "https://github.com/Comfy-Org/ComfyUI"
    """modelspec.implementation of the LoRA file."""
    prediction: str = ""
    """modelspec.prediction_type; empty where the standard has no word for it."""
    network_module: str = "networks.lora"
    """ss_network_module of a plain LoRA: the sd-scripts module that loads it."""
    is_v2: bool = False
    """ss_v2 of the LoRA file: Stable Diffusion 2."""
    key_prefix: str = "lora_unet_"
    """Prefix of the keys of "lora_down" and "lora_up"; an empty one writes "diffusion_model.<path>" keys, of
    "lora_A" and "lora_B" where `export` is set."""
    export: str = ""
    """Row of ARCHITECTURES in files/lora/names.py: what diffusers calls its layers; empty where that is not
    known."""
    layer_sign: str = ""
    """Regular expression for names of layers, in any layout, that only this family and its relatives have: it
    tells what a file without metadata is for."""

    # ComfyUI
    clip_type: str = ""
    """CLIPType of its text encoder files; empty where Load Base Model cannot load them."""
    caption: Caption | None = None
    """The network's input for one caption; None where `graft plan` cannot plan without the encoder."""

    # Files of other trainers
    latents: str = ""
    """Its name in sd-scripts' latent files; empty where sd-scripts caches none."""
    latent_scale: tuple[float, float] = (1.0, 0.0)
    """(scale, shift) of these files: they hold (latents - shift) * scale. Flux's VAE does it itself
    (black-forest-labs/flux, AutoEncoder.encode); ComfyUI's does not, so its latents are without."""
    arch: tuple[str, ...] = ()
    """Its names under `model.arch` of ai-toolkit's job files."""
    own_shift: bool = False
    """Whether Graft's shift follows another rule than ai-toolkit's, so that "shift" is refused."""
    bypasses_guidance: bool = False
    """Whether ai-toolkit can leave the guidance input out, which is refused."""

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """Globs of what checkpointing recomputes as a whole."""
        return self.units or self.blocks

    def idle_layers(self, paths: Iterable[str]) -> set[str]:
        """Return those module paths whose layers have no effect on the model's output."""
        if not self.idle:
            return set()
        numbered = [re.match(r"(.+?)\.(\d+)\.", path) for path in paths]
        last: dict[str, int] = {}
        for match in filter(None, numbered):
            last[match[1]] = max(int(match[2]), last.get(match[1], 0))
        globs = [
            re.sub(r"^(.+?)\.-1\.", lambda m: f"{m[1]}.{last.get(m[1], -1)}.", glob) for glob in self.idle
        ]
        return {path for path in paths if any(fnmatchcase(path, glob) for glob in globs)}

    def tokens(self, shape: tuple[int, ...]) -> float:
        """Return how many tokens latents of `shape`, (B, C, H, W) or (B, C, frames, H, W), have, which
        resolution shifts depend on."""
        return math.prod(shape[2:]) / self.patch**2


def family_of(
    config_class: str, unet_config: Mapping[str, Any] = MappingProxyType({}), *, file: str = ""
) -> Family:
    """Return the family for a class of ComfyUI's model configs, what it detected, and the model file's name.

    That is GENERIC under the class's name where there is no row. A file named like a distilled model gets a
    note that says what to do about it, and is sampled without guidance.
    """
    row = VARIANTS[config_class](unet_config) if config_class in VARIANTS else config_class
    family = FAMILIES.get(row) or replace(GENERIC, name=config_class)
    file_words = re.sub(r"(?<=[a-z\d])(?=[A-Z])", " ", file).lower()  # also those of "sdxlTurbo"
    for pattern, node in family.references_by_file.items():
        family = replace(family, references=node) if re.search(pattern, file_words) else family
    match = re.search(rf"(?<![a-z])({'|'.join(DISTILLED)})(?![a-z])", file_words)
    return replace(family, notes=family.notes or (_distilled(match[1]),), cfg=1.0) if match else family


TEXT = "text_encoders."
"""Before the module paths of text encoders ("text_encoders.clip_l.transformer...."), as in ComfyUI."""


def is_text(path: str) -> bool:
    """Return whether a layer's path is in a text encoder and not in the diffusion model."""
    return path.startswith(TEXT)


def target_presets() -> list[str]:
    """Return the names of every family's targets."""
    return list(dict.fromkeys(name for family in (GENERIC, *FAMILIES.values()) for name in family.targets))


def architectures() -> dict[str, Family]:
    """Return the families by ai-toolkit's names for them."""
    return {arch: family for family in FAMILIES.values() for arch in family.arch}


def latent_scales() -> dict[str, tuple[float, float]]:
    """Return every family's `latent_scale` by sd-scripts' name for it, "" for files of SD1.5 and SDXL."""
    named = {family.latents: family.latent_scale for family in FAMILIES.values() if family.latents}
    return {"": (1.0, 0.0), **named}


def preset_modules() -> dict[str, tuple[str, ...]]:
    """Return the globs of every family for the classes that LyCORIS's presets name."""
    globs_of: dict[str, dict[str, None]] = {}
    for family in (GENERIC, *FAMILIES.values()):
        for name, globs in family.preset_modules.items():
            globs_of.setdefault(name, {}).update(dict.fromkeys(globs))
    return {name: tuple(globs) for name, globs in globs_of.items()}


def block_of(path: str, blocks: Iterable[str]) -> str | None:
    """Return the path of the block that a module belongs to by `Family.blocks`, or None."""
    names = path.split(".")
    for glob in (block.split(".") for block in blocks):
        if len(names) >= len(glob) and all(map(fnmatchcase, names, glob)):
            return ".".join(names[: len(glob)])
    return None


def family_named(name: str) -> Family:
    """Return the family called `name`, or GENERIC under that name where there is none."""
    other = replace(GENERIC, name=name or GENERIC.name)
    return next((family for family in FAMILIES.values() if family.name == name), other)


DISTILLED = (
    *("schnell", "turbo", "lightning", "hyper(?! ?real)", "lcm", "dmd", "flash"),
    "klein(?!.*base)",
)
"""Words in file names of models distilled to a few steps, whose weights do not tell."""


def _distilled(name: str) -> str:
    return (
        f"this base model looks distilled to a few steps ({name}): training on it slowly undoes the "
        "distillation, and its images get worse at few steps. Train on the model it was distilled from and "
        "use the LoRA on this one, or load an assistant LoRA (a de-distillation adapter) onto the MODEL "
        "before Train Steps: patches on the incoming MODEL apply while training and are no part of the "
        "result."
    )


CONVOLUTIONS = (
    *("input_blocks.0.0", "*.in_layers.2", "*.out_layers.3", "input_blocks.*.op", "output_blocks.*.conv"),
    *("out.2", "x_embedder.proj"),
)
"""Patterns of the convolutions larger than 1x1, in U-Nets and SD3."""

_EVERYTHING = {"linear": ("*",), "all": ("*",), "everything": ("*",)}

_MMDIT_ATTENTION = ("joint_blocks.*.*_block.attn*.qkv", "joint_blocks.*.*_block.attn*.proj")
_MMDIT_MLP = ("joint_blocks.*.*_block.mlp.fc*",)
_UNET_ATTENTION = ("*.transformer_blocks.*.attn?.*",)
_UNET_MLP = ("*.transformer_blocks.*.ff.net.*", "*.proj_in", "*.proj_out")
_UNET_UNITS = (
    *("input_blocks.*.*.transformer_blocks.*", "input_blocks.*.0"),
    *("middle_block.*.transformer_blocks.*", "middle_block.0", "middle_block.2"),
    *("output_blocks.*.*.transformer_blocks.*", "output_blocks.*.0"),
)
"""Transformer blocks, and the ResBlock that each block of the U-Net begins with."""
_FLUX_ATTENTION = ("double_blocks.*.*_attn.qkv", "double_blocks.*.*_attn.proj", "single_blocks.*.linear?")
_FLUX_MLP = ("double_blocks.*.*_mlp.*",)
_LUMINA_ATTENTION = ("layers.*.attention.qkv", "layers.*.attention.out")
_LUMINA_MLP = ("layers.*.feed_forward.w?",)
_QWEN_ATTENTION = ("transformer_blocks.*.attn.*",)
_QWEN_MLP = ("transformer_blocks.*.*_mlp.net.*",)
_HIDREAM_ATTENTION = ("*_stream_blocks.*.block.attn1.to_*",)
_HIDREAM_MLP = ("*_stream_blocks.*.block.ff_i.shared_experts.w?", "*_stream_blocks.*.block.ff_t.w?")


def _targets(attention: tuple[str, ...], mlp: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    return {"attn-mlp": attention + mlp, "attn": attention, **_EVERYTHING}


GENERIC = Family(
    name="generic",
    targets=_targets(("*attn*", "*attention*"), ("*block*", "*layer*")),
    blocks=("*blocks.*", "*layers.*"),
    key_prefix="",
    preset_modules={
        "Attention": ("*attn*", "*attention*"),
        "CrossAttention": ("*attn*", "*attention*"),
        "FeedForward": ("*.ff.*", "*mlp*", "*feed_forward*"),
    },
)
"""Any other model that ComfyUI samples: its target by the affine law, its sigmas from its own schedule. Named
after its config class in ComfyUI."""

_SDXL = Family(
    name="SDXL",
    architecture="stable-diffusion-xl-v1-base",
    base_model="sdxl_base_v1-0",
    targets=_targets(_UNET_ATTENTION, _UNET_MLP),
    blocks=("input_blocks.*", "middle_block", "output_blocks.*"),
    units=_UNET_UNITS,
    preset_modules={
        "Transformer2DModel": ("*.transformer_blocks.*", "*.proj_in", "*.proj_out"),
        "BasicTransformerBlock": ("*.transformer_blocks.*",),
        "ResnetBlock2D": ("*.in_layers.*", "*.emb_layers.*", "*.out_layers.*", "*.skip_connection"),
        "Downsample2D": ("input_blocks.*.op",),
        "Upsample2D": ("output_blocks.*.conv",),
    },
    space="output",
    text_encoders={"clip_l": "lora_te1_", "clip_g": "lora_te2_"},
    pooled=("clip_g",),
    bucket_step=64,
    resolution=1024,
    implementation="https://github.com/Stability-AI/generative-models",
    prediction="epsilon",
    export="unet",
    layer_sign=r"attn2[._]to_[kv]",
    clip_type="STABLE_DIFFUSION",
    caption=Caption(77, 2048, 1280),
    latents="sdxl",
)
_SD1 = replace(
    _SDXL,
    name="SD1.5",
    architecture="stable-diffusion-v1",
    base_model="sd_v1",
    text_encoders={"clip_l": "lora_te_"},
    pooled=(),
    resolution=512,
    implementation="https://github.com/CompVis/stable-diffusion",
    caption=Caption(77, 768),
    latents="sd",
)
_SD3 = Family(
    name="SD3",
    architecture="stable-diffusion-3",
    base_model="medium",
    targets=_targets(_MMDIT_ATTENTION, _MMDIT_MLP),
    blocks=("joint_blocks.*",),
    in_place={"ContextProcessorBlock": InPlaceBlock(("x",), ("norm1", "norm2"))},
    preset_modules={"JointTransformerBlock": ("joint_blocks.*",)},
    sigmas="logit-normal",
    shift=3.0,
    text_encoders={"clip_l": "lora_te1_", "clip_g": "lora_te2_"},
    pooled=("clip_l", "clip_g"),
    network_module="networks.lora_sd3",
    implementation="https://github.com/Stability-AI/sd3.5",
    export="sd3",
    layer_sign="joint_blocks",
    clip_type="SD3",
    caption=Caption(154, 4096, 2048),
    latents="sd3",
)
_FLUX = Family(
    name="Flux.1 Dev",
    architecture="flux-1-dev",
    base_model="flux1",
    targets=_targets(_FLUX_ATTENTION, _FLUX_MLP),
    blocks=("double_blocks.*", "single_blocks.*"),
    in_place={
        "DoubleStreamBlock": InPlaceBlock(
            ("img", "txt"), ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2")
        ),
        "SingleStreamBlock": InPlaceBlock(("x",), ("pre_norm",)),
    },
    preset_modules={
        **dict.fromkeys(("DoubleStreamBlock", "MMDoubleStreamBlock"), ("double_blocks.*",)),
        **dict.fromkeys(("SingleStreamBlock", "MMSingleStreamBlock"), ("single_blocks.*",)),
    },
    sigmas="logit-normal",
    shift=3.1582,
    resolution_shift="flux",
    guidance=1.0,
    cfg=1.0,
    network_module="networks.lora_flux",
    implementation="https://github.com/black-forest-labs/flux",
    export="flux",
    layer_sign="double_blocks|single_(transformer_)?blocks",
    clip_type="FLUX",
    caption=Caption(512, 4096, 768),
    latents="flux",
    latent_scale=(0.3611, 0.1159),
)
_FLUX2 = replace(
    _FLUX,
    name="Flux.2",
    architecture="flux-2-dev",
    base_model="flux2",
    patch=1,
    key_prefix="",
    network_module="networks.lora",
    export="flux2",
    clip_type="FLUX2",
    caption=None,
    latents="",
)
_LUMINA2 = Family(
    name="Lumina 2",
    architecture="lumina-2",
    base_model="lumina2",
    targets=_targets(_LUMINA_ATTENTION, _LUMINA_MLP),
    blocks=("layers.*", "noise_refiner.*", "context_refiner.*"),
    sigmas="logit-normal",
    shift=6.0,
    key_prefix="",
    network_module="networks.lora_lumina",
    export="lumina2",
    layer_sign="noise_refiner|context_refiner",
    clip_type="LUMINA2",
    latents="lumina",
    latent_scale=(0.3611, 0.1159),
)

_GENERIC_ROWS = {
    "AuraFlow": "STABLE_DIFFUSION",
    "ACEStep15": "ACE",
    "Boogu": "BOOGU",
    "CogVideoX_T2V": "COGVIDEOX",
    **dict.fromkeys(("CosmosT2IPredict2", "CosmosT2V"), "COSMOS"),
    "GenmoMochi": "MOCHI",
    "HunyuanDiT": "HUNYUAN_DIT",
    "Ideogram4": "IDEOGRAM4",
    "JoyImage": "JOYIMAGE",
    "Kandinsky5": "KANDINSKY5",
    "Kandinsky5Image": "KANDINSKY5_IMAGE",
    "Lens": "LENS",
    "LongCatImage": "LONGCAT_IMAGE",
    "MageFlow": "MAGE",
    "Omnigen2": "OMNIGEN2",
    "PixArtAlpha": "PIXART",
    "PixelDiTT2I": "PIXELDIT",
    "StableAudio": "STABLE_AUDIO",
    "Stable_Cascade_C": "STABLE_CASCADE",
}
"""Models that train as GENERIC does -> their CLIPType, by which their text encoder files are loaded."""

_FLOW = replace(GENERIC, sigmas="logit-normal", own_shift=True)
"""A flow model that peers train at logit-normal levels; each row's shift is that of the peer it names."""

_WAN = replace(
    _FLOW,
    name="WAN21_T2V",
    preset_modules={"WanAttentionBlock": ("blocks.*",)},
    shift=3.0,  # kohya-ss/musubi-tuner, docs/wan.md
    clip_type="WAN",
    arch=("wan21",),
)
_WAN_I2V = replace(_WAN, first_frame="nodes_wan.WanImageToVideo", needs_first_frame=True, arch=())
_HUNYUAN = replace(_FLOW, name="HunyuanVideo", targets=_targets(_FLUX_ATTENTION, _FLUX_MLP))
_LTXV = replace(
    _FLOW,
    name="LTXV",
    targets=_targets(("transformer_blocks.*attn*",), ("transformer_blocks.*ff.*",)),
    resolution_shift="ltx",
    cfg=3.0,  # Lightricks/LTX-Video, configs
    bucket_step=32,
    patch=1,
    clip_type="LTXV",
)

FAMILIES: Mapping[str, Family] = {
    "SD15": replace(_SD1, arch=("sd1", "sd15")),
    "SD20": replace(
        _SD1,
        name="SD2",
        architecture="stable-diffusion-v2-512",
        base_model="sd_v2",
        is_v2=True,
        text_encoders={"clip_h": "lora_te_"},
        caption=Caption(77, 1024),
        arch=("sd2",),
    ),
    "SDXL": replace(_SDXL, arch=("sdxl",)),
    "SSD1B": replace(_SDXL, name="SSD-1B", arch=("ssd",)),
    "Segmind_Vega": replace(_SDXL, name="Segmind Vega", arch=("vega",)),
    "KOALA_700M": replace(_SDXL, name="KOALA 700M", export="unet1"),
    "KOALA_1B": replace(_SDXL, name="KOALA 1B", export="unet1"),
    "SDXLRefiner": replace(
        _SDXL,
        name="SDXL Refiner",
        architecture="stable-diffusion-xl-v1-refiner",
        base_model="sdxl_refiner_v1-0",
        export="",
        text_encoders={},
        pooled=(),
        caption=Caption(77, 1280, 1280),
    ),
    "SD3": replace(_SD3, arch=("sd3",)),
    "SD35Medium": replace(
        _SD3, name="SD3.5 Medium", architecture="stable-diffusion-3-5-medium", base_model="5-medium"
    ),
    "SD35Large": replace(
        _SD3, name="SD3.5 Large", architecture="stable-diffusion-3-5-large", base_model="5-large"
    ),
    "GraftStarter": replace(
        _SD3, name="Graft starter", architecture="graft-starter", base_model="graft_starter"
    ),
    "Flux": replace(_FLUX, arch=("flux", "flex1", "flux_kontext"), bypasses_guidance=True),
    "FluxInpaint": replace(_FLUX, name="Flux.1 Fill", caption=None, inpaints=True),
    "FluxSchnell": replace(
        _FLUX,
        name="Flux.1 Schnell",
        architecture="flux-1-schnell",
        sigmas="logit-normal",
        shift=1.0,
        resolution_shift="none",
        guidance=None,
        notes=(_distilled("schnell"),),
    ),
    "Flux2": replace(_FLUX2, arch=("flux2",)),
    "Flux2Klein": replace(
        _FLUX2,
        name="Flux.2 Klein",
        architecture="flux-2-klein",
        guidance=None,
        cfg=4.0,
        arch=("flux2_klein_4b", "flux2_klein_9b"),
    ),
    "Chroma": replace(
        _FLUX,
        name="Chroma",
        architecture="chroma",
        base_model="chroma",
        shift=1.0,
        resolution_shift="none",
        guidance=None,
        cfg=4.0,
        key_prefix="diffusion_model.",
        export="chroma",
        clip_type="CHROMA",
        caption=Caption(512, 4096),
        arch=("chroma",),
        own_shift=True,
    ),
    "Lumina2": replace(_LUMINA2, arch=("lumina2",)),
    "ZImage": replace(
        _LUMINA2,
        name="Z-Image",
        architecture="z-image",
        base_model="z_image",
        shift=3.0,
        references="TextEncodeZImageOmni",
        export="z_image",
        arch=("zimage",),
    ),
    "QwenImage": Family(
        name="Qwen-Image",
        architecture="qwen-image",
        base_model="qwen_image",
        targets=_targets(_QWEN_ATTENTION, _QWEN_MLP),
        blocks=("transformer_blocks.*",),
        idle=(
            "transformer_blocks.-1.txt_mlp.*",
            "transformer_blocks.-1.attn.add_q_proj",
            "transformer_blocks.-1.attn.to_add_out",
        ),
        preset_modules={"QwenImageTransformerBlock": ("transformer_blocks.*",)},
        references="TextEncodeQwenImageEditPlus",
        references_by_file={r"edit(?!.*(plus|25\d\d))": "TextEncodeQwenImageEdit"},
        sigmas="logit-normal",
        shift=2.2,
        key_prefix="",
        export="qwen",
        layer_sign=r"transformer_blocks[._]\d+[._](img|txt)_(mlp|mod)",
        clip_type="QWEN_IMAGE",
        caption=Caption(256, 3584),
        arch=("qwen_image", "qwen_image_edit", "qwen_image_edit_plus"),
        own_shift=True,
    ),
    "HiDream": Family(
        name="HiDream",
        architecture="hidream-i1",
        base_model="hidream",
        targets=_targets(_HIDREAM_ATTENTION, _HIDREAM_MLP),
        blocks=("double_stream_blocks.*", "single_stream_blocks.*"),
        sigmas="logit-normal",
        shift=3.0,
        key_prefix="",
        export="hidream",
        layer_sign="double_stream_blocks|single_stream_blocks",
        clip_type="HIDREAM",
        arch=("hidream",),
    ),
    "WAN21_T2V": _WAN,
    "WAN21_I2V": replace(_WAN_I2V, name="WAN21_I2V", arch=("wan21_i2v",)),
    "WAN22_I2V": replace(_WAN_I2V, name="WAN22_I2V"),
    "WAN22_T2V": replace(
        _WAN,
        name="WAN22_T2V",
        bucket_step=32,
        first_frame="nodes_wan.Wan22ImageToVideoLatent",
        arch=("wan22_5b",),
    ),
    "HunyuanVideo": replace(_HUNYUAN, shift=7.0, clip_type="HUNYUAN_VIDEO"),  # musubi-tuner, docs
    "HunyuanVideo15": replace(
        _HUNYUAN,
        name="HunyuanVideo15",
        shift=2.0,  # musubi-tuner, docs/hunyuan_video_1_5.md, cfg too
        cfg=6.0,
        clip_type="HUNYUAN_VIDEO_15",
        first_frame="nodes_hunyuan.HunyuanVideo15ImageToVideo",
    ),
    "HunyuanImage21": replace(  # tdrussell/diffusion-pipe: logit-normal, no shift
        _HUNYUAN, name="HunyuanImage21", bucket_step=32, clip_type="HUNYUAN_IMAGE"
    ),
    "LTXV": replace(_LTXV, first_frame="nodes_lt.LTXVImgToVideo"),
    "LTXAV": replace(_LTXV, name="LTXAV", arch=("ltx2",)),
    "ACEStep": replace(
        _FLOW,
        name="ACEStep",
        shift=3.0,  # ace-step/ACE-Step, trainer.py
        cfg=5.0,  # Comfy-Org/workflow_templates, audio_ace_step_1_t2a_song
        clip_type="ACE",
    ),
    "Anima": replace(
        _FLOW,
        name="Anima",
        # Without the adapter of the text: Nerogar/OneTrainer, presets; tdrussell/diffusion-pipe, docs.
        targets=_targets(("blocks.*_attn.*",), ("blocks.*.mlp.*",)),
        clip_type="STABLE_DIFFUSION",
        arch=("anima",),
    ),
    "ErnieImage": replace(  # OneTrainer's presets
        _FLOW, name="ErnieImage", clip_type="STABLE_DIFFUSION", arch=("ernie_image",)
    ),
    "Krea2": replace(
        _FLOW,
        name="Krea2",
        shift=2.5,  # musubi-tuner, docs/krea2.md, cfg too
        cfg=5.5,
        reference_method="index",
        clip_type="KREA2",
        arch=("krea2",),
    ),
    **{name: replace(GENERIC, name=name, clip_type=clip_type) for name, clip_type in _GENERIC_ROWS.items()},
}
"""By the class name of ComfyUI's model config (`comfy.supported_models`), or the name VARIANTS gives."""


def _sd3_variant(unet_config: Mapping[str, Any]) -> str:
    """SD3.5 Medium alone has a second attention in some blocks; both 3.5 normalize queries and keys. No
    published one has as few blocks as the model in starter/.
    """
    if unet_config.get("depth") in (4, 6):  # of its first version, and now
        return "GraftStarter"
    if unet_config.get("x_block_self_attn_layers"):
        return "SD35Medium"
    return "SD35Large" if unet_config.get("qk_norm") else "SD3"


def _flux2_variant(unet_config: Mapping[str, Any]) -> str:
    """Klein alone has no input for guidance."""
    return "Flux2" if unet_config.get("guidance_embed", True) else "Flux2Klein"


def _wan_variant(unet_config: Mapping[str, Any]) -> str:
    """Wan 2.2's experts for image to video are text to video to ComfyUI, but for inputs of a first frame."""
    return "WAN22_I2V" if unet_config.get("in_dim", 16) == 36 else "WAN21_T2V"


VARIANTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "SD3": _sd3_variant,
    "Flux2": _flux2_variant,
    "WAN21_T2V": _wan_variant,
}
"""ComfyUI config classes that hold several models: unet_config -> row of FAMILIES."""
