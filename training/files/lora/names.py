"""Names of layers in LoRA files: one table for reading, writing and checking them.

A file names a layer by a prefix and a path. The path is ComfyUI's own or another program's (`Spelling`),
which may split a fused layer or order its outputs differently. Files are read under every prefix; ComfyUI
reads fewer (`Architecture.own`, `Spelling.comfy`), which tests/comfy/test_names.py compares with its table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from ...family import TEXT, is_text

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Path of a layer -> shape of its weight."""

COMFY = "diffusion_model."
"""Before ComfyUI's own paths, as ComfyUI and ai-toolkit write them."""

FLAT_PREFIXES = ("lora_unet_", "lycoris_", "lora_transformer_", "lora_prior_unet_")
"""Before a path with underscores for dots: kohya, SimpleTuner and LyCORIS, OneTrainer, Stable Cascade."""

PREFIXES = (
    COMFY,
    "model.diffusion_model.",
    "base_model.model.",
    "base_model.model.diffusion_model.",
    "unet.base_model.model.",
    "transformer.",
    "unet.",
    "",
)
"""Before a path with its dots: ComfyUI and ai-toolkit, checkpoints, PEFT, diffusers."""


@dataclass(frozen=True)
class Part:
    """One layer of a file, within a layer of the network."""

    name: str
    first: int = 0
    """Row of the network's weight."""
    stop: int | None = None
    """Row behind the last; None is the end."""
    swapped: bool = False
    """Whether its halves are swapped: scale before shift."""


class Target(NamedTuple):
    """The rows of a weight that a name in a file stands for."""

    key: str
    """The weight: a module path, or a checkpoint's key."""
    first: int
    rows: int
    swapped: bool = False


Names = Callable[[str, Shape], Iterable[Part]]
"""(ComfyUI's path, shape of the weight) -> another program's parts of it; none where it has no such layer."""


@dataclass(frozen=True)
class Spelling:
    """Another program's names for the layers of an architecture."""

    names: Names
    comfy: tuple[str, ...] = ()
    """Prefixes under which ComfyUI's loader reads them, since 0.3.75."""


@dataclass(frozen=True)
class Architecture:
    """The names of one kind of network."""

    signs: tuple[str, ...]
    """Globs; a network is of this kind if one of them matches any of its paths."""
    spellings: tuple[Spelling, ...] = ()
    own: tuple[str, ...] = ()
    """Prefixes under which ComfyUI reads its own paths, besides "lora_unet_" and "diffusion_model."."""
    diffusers: str = ""
    """Prefix of the names that diffusers reads; empty where that is not known."""
    diffusers_names: Names | None = None
    """The names behind it; None for ComfyUI's own paths."""
    split: Names | None = None
    """Parts that replace ComfyUI's own paths behind "diffusion_model.", so that diffusers reads them too."""

    def parts(self, path: str, shape: Shape) -> list[Part]:
        """Return the layers that diffusers has for this one; none where it has none."""
        return list(self.diffusers_names(path, shape)) if self.diffusers_names else [Part(path)]

    @property
    def comfy_reads_diffusers(self) -> bool:
        """Whether ComfyUI's loader knows the names that diffusers reads."""
        under = [s.comfy for s in self.spellings if s.names is self.diffusers_names]
        return self.diffusers in (COMFY, *(prefix for comfy in under for prefix in comfy))

    def native_parts(self, path: str, shape: Shape) -> list[Part]:
        """Return the layers behind "diffusion_model." that are written for this one."""
        return (list(self.split(path, shape)) if self.split else []) or [Part(path)]


def spell(prefix: str, name: str) -> str:
    """Return a layer's name in a file."""
    return prefix + (name.replace(".", "_") if prefix.endswith("_") else name)


def network_names(shapes: Shapes) -> dict[str, Target]:
    """Return every name that files use for a network's layers."""
    names: dict[str, Target] = {}
    for spelling in architecture_of(shapes).spellings:
        for part, target in _parts(shapes, spelling.names):
            names.update((spell(prefix, part), target) for prefix in FLAT_PREFIXES + PREFIXES)
    for path, shape in shapes.items():
        target = Target(path, 0, _rows(shape))
        names.update((spell(prefix, path), target) for prefix in FLAT_PREFIXES + PREFIXES)
    return names


def comfy_names(shapes: Shapes) -> dict[str, Target]:
    """Return the names that ComfyUI's loader knows for a network's layers, as its `model_lora_keys_unet`."""
    architecture = architecture_of(shapes)
    names: dict[str, Target] = {}
    for path, shape in shapes.items():
        for prefix in ("lora_unet_", COMFY, *architecture.own):
            names[spell(prefix, path)] = Target(path, 0, _rows(shape))
    for spelling in architecture.spellings:
        for part, target in _parts(shapes, spelling.names):
            names.update((spell(prefix, part), target) for prefix in spelling.comfy)
    return names


def in_diffusers_names(paths: Iterable[str]) -> bool:
    """Return whether a network is stored under diffusers' names, which ComfyUI renames when it loads it."""
    paths = list(paths)
    return not architecture_of(paths).signs and any(_STORED_BY_DIFFUSERS.fullmatch(path) for path in paths)


_STORED_BY_DIFFUSERS = re.compile(
    r"(?:joint_)?transformer_blocks\.\d+\.norm1_context\.linear|single_transformer_blocks\.\d+\.attn\.to_.+"
    r"|(?:down|up)_blocks\.\d+\.(?:attentions|resnets)\..+|layers\.\d+\.attention\.to_q"
)


def _parts(shapes: Shapes, names: Names) -> Iterator[tuple[str, Target]]:
    for path, shape in shapes.items():
        for part in names(path, shape):
            rows = (_rows(shape) if part.stop is None else part.stop) - part.first
            yield part.name, Target(path, part.first, rows, part.swapped)


def _rows(shape: Shape) -> int:
    return shape[0] if shape else 0


def architecture_of(paths: Iterable[str]) -> Architecture:
    """Return a network's row by its paths; one with ComfyUI's names only where no row fits."""
    paths = list(paths)
    for architecture in ARCHITECTURES.values():
        if any(fnmatchcase(path, sign) for sign in architecture.signs for path in paths):
            return architecture
    return Architecture(())


# Text encoders


@dataclass(frozen=True)
class TextEncoder:
    """The names of one text encoder; each prefix ends where the layer's path begins."""

    peft: str
    kohya: tuple[str, ...]
    """The one to write first."""
    checkpoint: tuple[str, ...]
    """Prefixes in checkpoints."""
    path: re.Pattern[str]
    """A layer's path, with dots or underscores; its groups are the parts between them."""


_CLIP_PATH = re.compile(
    r"(text_model)[._](encoder)[._](layers)[._](\d+)[._](?:(self_attn|mlp)[._](\w+)|(layer_norm[12]))"
)
_T5_PATH = re.compile(
    r"(encoder)[._](block)[._](\d+)[._](layer)[._](\d+)[._](SelfAttention|DenseReluDense)[._](\w+)"
)

TEXT_ENCODERS: Mapping[str, TextEncoder] = {
    "clip_l": TextEncoder(
        "text_encoder.",
        ("lora_te1_", "lora_te_"),
        (
            "cond_stage_model.transformer.",
            "conditioner.embedders.0.transformer.",
            "text_encoders.clip_l.transformer.",
        ),
        _CLIP_PATH,
    ),
    "clip_g": TextEncoder(
        "text_encoder_2.",
        ("lora_te2_",),
        ("conditioner.embedders.1.model.", "text_encoders.clip_g.transformer."),
        _CLIP_PATH,
    ),
    "clip_h": TextEncoder(
        "text_encoder.", ("lora_te_", "lora_te1_"), ("cond_stage_model.model.",), _CLIP_PATH
    ),
    "t5xxl": TextEncoder(
        "text_encoder_3.", ("lora_te3_", "lora_te2_"), ("text_encoders.t5xxl.transformer.",), _T5_PATH
    ),
}
"""As in ComfyUI's `model_lora_keys_clip`; SD1.5's CLIP-L is lora_te_, OneTrainer's T5 of Flux lora_te2_."""


def native_prefix(encoder: str) -> str:
    """Return how ComfyUI's names of a text encoder's layers begin."""
    return f"{TEXT}{encoder}.transformer."


def text_names(encoder: str, path: str) -> list[str]:
    """Return the names of a text encoder's layer, in kohya, native and PEFT files."""
    names = [native_prefix(encoder) + path]
    if row := TEXT_ENCODERS.get(encoder):
        names += [*(spell(kohya, path) for kohya in row.kohya), row.peft + path]
    return names


def text_layer(name: str) -> tuple[str, str] | None:
    """Return (text encoder, path) of a layer from its name in any layout, None where it is none.

    Underscores are read back by what CLIP's and T5's layers are called.
    """
    for encoder, row in TEXT_ENCODERS.items():
        for prefix in (*row.kohya, native_prefix(encoder), row.peft):
            if name.startswith(prefix) and (path := _text_path(row, name.removeprefix(prefix))):
                return encoder, path
    return None


def split_text_path(path: str) -> tuple[str, str]:
    """Return (text encoder, path within it) of a module path that `is_text`."""
    encoder, _, inner = path.removeprefix(TEXT).partition(".transformer.")
    return encoder, inner


def _text_path(row: TextEncoder, rest: str) -> str | None:
    match = row.path.fullmatch(rest)
    return ".".join(filter(None, match.groups())) if match else None


def layer_names(shapes: Shapes) -> dict[str, Target]:
    """Return every name that files use for the layers of a network and its text encoders, by module paths."""
    names = network_names({path: shape for path, shape in shapes.items() if not is_text(path)})
    for path, shape in shapes.items():
        if is_text(path):
            names.update(dict.fromkeys(text_names(*split_text_path(path)), Target(path, 0, shape[0])))
            names[path] = Target(path, 0, shape[0])
    return names


# What a name means without its model


def own_path(name: str, *, flat: bool) -> str | None:
    """Return the path of a network's layer as far as its name tells, with the underscores that it has.

    None where it may be another program's name, which only the base explains. For a `flat` path diffusers'
    names of U-Nets count as ComfyUI's own: it knows them behind "lora_unet_".
    """
    prefixes = sorted((*FLAT_PREFIXES, *PREFIXES), key=len, reverse=True)
    prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
    path = name.removeprefix(prefix)
    comfys = prefix.endswith(COMFY) or prefix == "lora_unet_"
    if name.startswith("lora_te"):
        return None
    newer = re.sub(r"\.to_out$", ".to_out.0", path.replace(".processor.", "."))
    if (_UNET_BLOCKS if comfys else _OF_UNETS).fullmatch(newer.replace(".", "_")):
        return newer if flat and not prefix.endswith(COMFY) else None
    foreign = (_IN_BLOCKS if comfys else _ANYWHERE).fullmatch(path.replace(".", "_"))
    return None if foreign or prefix in _OTHER_PROGRAMS else path


_OTHER_PROGRAMS = ("lora_transformer_", "lora_prior_unet_", "transformer.", "unet.", "unet.base_model.model.")


# The rows


def _by_rules(rules: Mapping[str, tuple[str, ...]]) -> Names:
    """Names by regular expression over ComfyUI's path.

    Three of them are queries, keys and values, of which the last two share the rows behind the first; four
    are Flux's, with the MLP's rows last. A name that ends in "!" has its halves swapped, one in "~" where the
    weight is two rows per input (shift and scale alone).
    """

    def names(path: str, shape: Shape) -> Iterable[Part]:
        for pattern, templates in rules.items():
            if match := re.fullmatch(pattern, path):
                for template, (first, stop) in zip(templates, _edges(shape, len(templates))):
                    swapped = template[-1] == "!" or (template[-1] == "~" and shape[0] == 2 * shape[1])
                    yield Part(match.expand(template.rstrip("!~")), first, stop, swapped)
                return

    return names


def _edges(shape: Shape, count: int) -> list[tuple[int, int | None]]:
    if count == 1:
        return [(0, None)]
    width = shape[1]
    each = width if count == 4 else (shape[0] - width) // 2
    starts = [0, *(width + each * i for i in range(count - 1))]
    return list(zip(starts, [*starts[1:], None]))


def _qkv(block: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{block}.{name}" for name in names)


_SD3 = {
    r"joint_blocks\.(\d+)\.x_block\.(attn2?)\.qkv": _qkv(r"transformer_blocks.\1.\2", "to_q", "to_k", "to_v"),
    r"joint_blocks\.(\d+)\.context_block\.attn\.qkv": _qkv(
        r"transformer_blocks.\1.attn", "add_q_proj", "add_k_proj", "add_v_proj"
    ),
    r"joint_blocks\.(\d+)\.x_block\.(attn2?)\.proj": (r"transformer_blocks.\1.\2.to_out.0",),
    r"joint_blocks\.(\d+)\.context_block\.attn\.proj": (r"transformer_blocks.\1.attn.to_add_out",),
    r"joint_blocks\.(\d+)\.x_block\.(attn2?)\.ln_([qk])": (r"transformer_blocks.\1.\2.norm_\3",),
    r"joint_blocks\.(\d+)\.context_block\.attn\.ln_([qk])": (r"transformer_blocks.\1.attn.norm_added_\2",),
    r"joint_blocks\.(\d+)\.x_block\.mlp\.fc1": (r"transformer_blocks.\1.ff.net.0.proj",),
    r"joint_blocks\.(\d+)\.x_block\.mlp\.fc2": (r"transformer_blocks.\1.ff.net.2",),
    r"joint_blocks\.(\d+)\.context_block\.mlp\.fc1": (r"transformer_blocks.\1.ff_context.net.0.proj",),
    r"joint_blocks\.(\d+)\.context_block\.mlp\.fc2": (r"transformer_blocks.\1.ff_context.net.2",),
    r"joint_blocks\.(\d+)\.x_block\.adaLN_modulation\.1": (r"transformer_blocks.\1.norm1.linear",),
    r"joint_blocks\.(\d+)\.context_block\.adaLN_modulation\.1": (
        r"transformer_blocks.\1.norm1_context.linear~",
    ),
    r"t_embedder\.mlp\.0": ("time_text_embed.timestep_embedder.linear_1",),
    r"t_embedder\.mlp\.2": ("time_text_embed.timestep_embedder.linear_2",),
    r"y_embedder\.mlp\.0": ("time_text_embed.text_embedder.linear_1",),
    r"y_embedder\.mlp\.2": ("time_text_embed.text_embedder.linear_2",),
    r"x_embedder\.proj": ("pos_embed.proj",),
    r"pos_embed": ("pos_embed.pos_embed",),
    r"context_embedder": ("context_embedder",),
    r"final_layer\.adaLN_modulation\.1": ("norm_out.linear!",),
    r"final_layer\.linear": ("proj_out",),
}

_FLUX_BLOCKS = {
    r"double_blocks\.(\d+)\.img_attn\.qkv": _qkv(r"transformer_blocks.\1.attn", "to_q", "to_k", "to_v"),
    r"double_blocks\.(\d+)\.txt_attn\.qkv": _qkv(
        r"transformer_blocks.\1.attn", "add_q_proj", "add_k_proj", "add_v_proj"
    ),
    r"double_blocks\.(\d+)\.img_attn\.proj": (r"transformer_blocks.\1.attn.to_out.0",),
    r"double_blocks\.(\d+)\.txt_attn\.proj": (r"transformer_blocks.\1.attn.to_add_out",),
    r"double_blocks\.(\d+)\.img_attn\.norm\.query_norm(?:\.scale)?": (r"transformer_blocks.\1.attn.norm_q",),
    r"double_blocks\.(\d+)\.img_attn\.norm\.key_norm(?:\.scale)?": (r"transformer_blocks.\1.attn.norm_k",),
    r"double_blocks\.(\d+)\.txt_attn\.norm\.query_norm(?:\.scale)?": (
        r"transformer_blocks.\1.attn.norm_added_q",
    ),
    r"double_blocks\.(\d+)\.txt_attn\.norm\.key_norm(?:\.scale)?": (
        r"transformer_blocks.\1.attn.norm_added_k",
    ),
    r"single_blocks\.(\d+)\.norm\.query_norm(?:\.scale)?": (r"single_transformer_blocks.\1.attn.norm_q",),
    r"single_blocks\.(\d+)\.norm\.key_norm(?:\.scale)?": (r"single_transformer_blocks.\1.attn.norm_k",),
    r"img_in": ("x_embedder",),
    r"txt_in": ("context_embedder",),
    r"final_layer\.adaLN_modulation\.1": ("norm_out.linear!",),
    r"final_layer\.linear": ("proj_out",),
}
_FLUX = {
    **_FLUX_BLOCKS,
    r"double_blocks\.(\d+)\.img_mlp\.0": (r"transformer_blocks.\1.ff.net.0.proj",),
    r"double_blocks\.(\d+)\.img_mlp\.2": (r"transformer_blocks.\1.ff.net.2",),
    r"double_blocks\.(\d+)\.txt_mlp\.0": (r"transformer_blocks.\1.ff_context.net.0.proj",),
    r"double_blocks\.(\d+)\.txt_mlp\.2": (r"transformer_blocks.\1.ff_context.net.2",),
    r"double_blocks\.(\d+)\.img_mod\.lin": (r"transformer_blocks.\1.norm1.linear",),
    r"double_blocks\.(\d+)\.txt_mod\.lin": (r"transformer_blocks.\1.norm1_context.linear",),
    r"single_blocks\.(\d+)\.linear1": (
        *_qkv(r"single_transformer_blocks.\1.attn", "to_q", "to_k", "to_v"),
        r"single_transformer_blocks.\1.proj_mlp",
    ),
    r"single_blocks\.(\d+)\.linear2": (r"single_transformer_blocks.\1.proj_out",),
    r"single_blocks\.(\d+)\.modulation\.lin": (r"single_transformer_blocks.\1.norm.linear",),
    r"time_in\.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    r"time_in\.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    r"vector_in\.in_layer": ("time_text_embed.text_embedder.linear_1",),
    r"vector_in\.out_layer": ("time_text_embed.text_embedder.linear_2",),
    r"guidance_in\.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    r"guidance_in\.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
}
_CHROMA = {
    **_FLUX,
    r"distilled_guidance_layer\.in_proj": ("distilled_guidance_layer.in_proj",),
    r"distilled_guidance_layer\.out_proj": ("distilled_guidance_layer.out_proj",),
    r"distilled_guidance_layer\.layers\.(\d+)\.in_layer": (r"distilled_guidance_layer.layers.\1.linear_1",),
    r"distilled_guidance_layer\.layers\.(\d+)\.out_layer": (r"distilled_guidance_layer.layers.\1.linear_2",),
}
_FLUX2 = {
    **_FLUX_BLOCKS,
    r"double_blocks\.(\d+)\.img_mlp\.0": (r"transformer_blocks.\1.ff.linear_in",),
    r"double_blocks\.(\d+)\.img_mlp\.2": (r"transformer_blocks.\1.ff.linear_out",),
    r"double_blocks\.(\d+)\.txt_mlp\.0": (r"transformer_blocks.\1.ff_context.linear_in",),
    r"double_blocks\.(\d+)\.txt_mlp\.2": (r"transformer_blocks.\1.ff_context.linear_out",),
    r"single_blocks\.(\d+)\.linear1": (r"single_transformer_blocks.\1.attn.to_qkv_mlp_proj",),
    r"single_blocks\.(\d+)\.linear2": (r"single_transformer_blocks.\1.attn.to_out",),
    r"(double_stream_modulation_(?:img|txt)|single_stream_modulation)\.lin": (r"\1.linear",),
    r"time_in\.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
    r"time_in\.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
    r"guidance_in\.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
    r"guidance_in\.out_layer": ("time_guidance_embed.guidance_embedder.linear_2",),
}

_Z_IMAGE = {
    r"((?:layers|noise_refiner|context_refiner)\.\d+\.attention)\.qkv": _qkv(r"\1", "to_q", "to_k", "to_v"),
    r"((?:layers|noise_refiner|context_refiner)\.\d+\.attention)\.out": (r"\1.to_out.0",),
    r"((?:layers|noise_refiner|context_refiner)\.\d+\.attention)\.([qk])_norm": (r"\1.norm_\2",),
    r"final_layer\.(linear|adaLN_modulation\.1)": (r"all_final_layer.2-1.\1",),
    r"x_embedder": ("all_x_embedder.2-1",),
}
_LUMINA2 = {
    r"(layers|noise_refiner|context_refiner)\.(\d+)\.attention\.qkv": _qkv(
        r"\1.\2.attn", "to_q", "to_k", "to_v"
    ),
    r"(layers|noise_refiner|context_refiner)\.(\d+)\.attention\.out": (r"\1.\2.attn.to_out.0",),
    r"(layers|noise_refiner|context_refiner)\.(\d+)\.attention\.([qk])_norm": (r"\1.\2.attn.norm_\3",),
    r"(layers|noise_refiner|context_refiner)\.(\d+)\.feed_forward\.w([123])": (
        r"\1.\2.feed_forward.linear_\3",
    ),
    r"(layers|noise_refiner)\.(\d+)\.adaLN_modulation\.1": (r"\1.\2.norm1.linear",),
    r"t_embedder\.mlp\.0": ("time_caption_embed.timestep_embedder.linear_1",),
    r"t_embedder\.mlp\.2": ("time_caption_embed.timestep_embedder.linear_2",),
    r"cap_embedder\.([01])": (r"time_caption_embed.caption_embedder.\1",),
    r"x_embedder": ("x_embedder",),
    r"final_layer\.adaLN_modulation\.1": ("norm_out.linear_1",),
    r"final_layer\.linear": ("norm_out.linear_2",),
}

_AURA_FLOW = {
    r"double_layers\.(\d+)\.attn\.w2([qkv])": (r"joint_transformer_blocks.\1.attn.to_\2",),
    r"double_layers\.(\d+)\.attn\.w1([qkv])": (r"joint_transformer_blocks.\1.attn.add_\2_proj",),
    r"double_layers\.(\d+)\.attn\.w2o": (r"joint_transformer_blocks.\1.attn.to_out.0",),
    r"double_layers\.(\d+)\.attn\.w1o": (r"joint_transformer_blocks.\1.attn.to_add_out",),
    r"double_layers\.(\d+)\.mlpX\.c_fc([12])": (r"joint_transformer_blocks.\1.ff.linear_\2",),
    r"double_layers\.(\d+)\.mlpX\.c_proj": (r"joint_transformer_blocks.\1.ff.out_projection",),
    r"double_layers\.(\d+)\.mlpC\.c_fc([12])": (r"joint_transformer_blocks.\1.ff_context.linear_\2",),
    r"double_layers\.(\d+)\.mlpC\.c_proj": (r"joint_transformer_blocks.\1.ff_context.out_projection",),
    r"double_layers\.(\d+)\.modX\.1": (r"joint_transformer_blocks.\1.norm1.linear",),
    r"double_layers\.(\d+)\.modC\.1": (r"joint_transformer_blocks.\1.norm1_context.linear",),
    r"single_layers\.(\d+)\.attn\.w1([qkv])": (r"single_transformer_blocks.\1.attn.to_\2",),
    r"single_layers\.(\d+)\.attn\.w1o": (r"single_transformer_blocks.\1.attn.to_out.0",),
    r"single_layers\.(\d+)\.modCX\.1": (r"single_transformer_blocks.\1.norm1.linear",),
    r"single_layers\.(\d+)\.mlp\.c_fc([12])": (r"single_transformer_blocks.\1.ff.linear_\2",),
    r"single_layers\.(\d+)\.mlp\.c_proj": (r"single_transformer_blocks.\1.ff.out_projection",),
    r"t_embedder\.mlp\.0": ("time_step_proj.linear_1",),
    r"t_embedder\.mlp\.2": ("time_step_proj.linear_2",),
    r"cond_seq_linear": ("context_embedder",),
    r"init_x_linear": ("pos_embed.proj",),
    r"final_linear": ("proj_out",),
    r"modF\.1": ("norm_out.linear!",),
}

_PIXART = {
    r"blocks\.(\d+)\.attn\.qkv": _qkv(r"transformer_blocks.\1.attn1", "to_q", "to_k", "to_v"),
    r"blocks\.(\d+)\.attn\.proj": (r"transformer_blocks.\1.attn1.to_out.0",),
    r"blocks\.(\d+)\.cross_attn\.q_linear": (r"transformer_blocks.\1.attn2.to_q",),
    r"blocks\.(\d+)\.cross_attn\.kv_linear": _qkv(r"transformer_blocks.\1.attn2", "to_k", "to_v"),
    r"blocks\.(\d+)\.cross_attn\.proj": (r"transformer_blocks.\1.attn2.to_out.0",),
    r"blocks\.(\d+)\.mlp\.fc1": (r"transformer_blocks.\1.ff.net.0.proj",),
    r"blocks\.(\d+)\.mlp\.fc2": (r"transformer_blocks.\1.ff.net.2",),
    r"csize_embedder\.mlp\.0": ("adaln_single.emb.resolution_embedder.linear_1",),
    r"csize_embedder\.mlp\.2": ("adaln_single.emb.resolution_embedder.linear_2",),
    r"ar_embedder\.mlp\.0": ("adaln_single.emb.aspect_ratio_embedder.linear_1",),
    r"ar_embedder\.mlp\.2": ("adaln_single.emb.aspect_ratio_embedder.linear_2",),
    r"x_embedder\.proj": ("pos_embed.proj",),
    r"y_embedder\.y_proj\.fc1": ("caption_projection.linear_1",),
    r"y_embedder\.y_proj\.fc2": ("caption_projection.linear_2",),
    r"t_embedder\.mlp\.0": ("adaln_single.emb.timestep_embedder.linear_1",),
    r"t_embedder\.mlp\.2": ("adaln_single.emb.timestep_embedder.linear_2",),
    r"t_block\.1": ("adaln_single.linear",),
    r"final_layer\.linear": ("proj_out",),
}

_KREA2_BLOCK = {
    **{f"attn\\.w{name}": f"attn.to_{name}" for name in "qkv"},
    r"attn\.gate": "attn.to_gate",
    r"attn\.wo": "attn.to_out.0",
    **{f"mlp\\.{name}": f"ff.{name}" for name in ("gate", "up", "down")},
}
_KREA2 = {
    **{rf"blocks\.(\d+)\.{own}": (rf"transformer_blocks.\1.{name}",) for own, name in _KREA2_BLOCK.items()},
    **{
        rf"txtfusion\.(layerwise|refiner)_blocks\.(\d+)\.{own}": (rf"text_fusion.\1_blocks.\2.{name}",)
        for own, name in _KREA2_BLOCK.items()
    },
    "first": ("img_in",),
    r"tmlp\.0": ("time_embed.linear_1",),
    r"tmlp\.2": ("time_embed.linear_2",),
    r"tproj\.1": ("time_mod_proj",),
    r"txtmlp\.1": ("txt_in.linear_1",),
    r"txtmlp\.3": ("txt_in.linear_2",),
    r"txtfusion\.projector": ("text_fusion.projector",),
    r"last\.linear": ("final_layer.linear",),
}


_flux, _chroma, _flux2 = _by_rules(_FLUX), _by_rules(_CHROMA), _by_rules(_FLUX2)
_sd3, _lumina2 = _by_rules(_SD3), _by_rules(_LUMINA2)


def _z_image(path: str, shape: Shape) -> Iterable[Part]:
    """Z-Image's names; none for Lumina 2's qkv with fewer keys than queries, which ComfyUI splits wrongly."""
    if path.endswith(".qkv") and shape[0] != 3 * shape[1]:
        return []
    return _by_rules(_Z_IMAGE)(path, shape)


def _flux2_as_flux(path: str, shape: Shape) -> Iterable[Part]:
    """Flux.1's names, which ComfyUI reads for Flux.2 too; its MLP has a gate, so that part is left out."""
    return [part for part in _flux(path, shape) if not part.name.endswith("proj_mlp")]


def _linear1_qkv(path: str, shape: Shape) -> Iterable[Part]:
    """Flux's attention without the MLP beside it."""
    if path.endswith(".linear1"):
        yield Part(f"{path}_qkv", 0, 3 * shape[1])


def _krea2_out(path: str, shape: Shape) -> Iterable[Part]:
    for part in _by_rules(_KREA2)(path, shape):
        yield Part(part.name.removesuffix(".0"))


def _hunyuan_video(path: str, shape: Shape) -> Iterable[Part]:
    """diffusion-pipe's names."""
    name = f"{path}."
    for old, new in (
        ("_mod.lin.", "_mod.linear."),
        ("_attn.qkv.", "_attn_qkv."),
        ("_attn.proj.", "_attn_proj."),
        ("mlp.0.", "mlp.fc1."),
        ("mlp.2.", "mlp.fc2."),
        (".modulation.lin.", ".modulation.linear."),
    ):
        name = name.replace(old, new)
    yield Part(name.removesuffix("."))


def _without_decoder(path: str, shape: Shape) -> Iterable[Part]:
    if path.startswith("decoder."):
        yield Part(path.removeprefix("decoder."))


_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_UNET = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}


def _unet(residual_blocks: int) -> Names:
    """Names of U-Nets with so many residual blocks a level: 2 in SD1.5, SD2, SDXL and the like."""
    level = residual_blocks + 1

    def names(path: str, shape: Shape) -> Iterable[Part]:
        if path in _UNET:
            return [Part(_UNET[path])]
        match = re.fullmatch(r"(input_blocks|middle_block|output_blocks)\.(\d+)\.(.+)", path)
        if not match:
            return []
        side, index, inner = match[1], int(match[2]), match[3]
        if side == "middle_block":
            block, at, is_attention = "mid_block", index // 2, index == 1
        else:
            index -= side == "input_blocks"
            block = f"{'down' if side == 'input_blocks' else 'up'}_blocks.{index // level}"
            at = index % level
            child, _, inner = inner.partition(".")
            if inner in ("op", "conv"):
                return [Part(f"{block}.{'downsamplers' if inner == 'op' else 'upsamplers'}.0.conv")]
            is_attention = child == "1"
        if is_attention:
            return [Part(f"{block}.attentions.{at}.{inner}")]
        return [Part(f"{block}.resnets.{at}.{_RESNET[inner]}")] if inner in _RESNET else []

    return names


def _old_unet(residual_blocks: int) -> Names:
    """The same as diffusers had them while attention had processors: the names that ComfyUI reads."""
    newer = _unet(residual_blocks)

    def names(path: str, shape: Shape) -> Iterable[Part]:
        for part in newer(path, shape):
            yield Part(part.name.replace(".to_", ".processor.to_").replace(".to_out.0", ".to_out"))

    return names


def _class_embedding(path: str, shape: Shape) -> Iterable[Part]:
    if path in ("label_emb.0.0", "label_emb.0.2"):
        yield Part(_UNET[path].replace("add_", "class_"))


def _unet_row(residual_blocks: int, *signs: str) -> Architecture:
    names = _unet(residual_blocks)
    return Architecture(
        signs,
        (
            Spelling(names, ("lora_unet_", "lycoris_")),
            Spelling(_old_unet(residual_blocks), ("", "unet.")),
            Spelling(_class_embedding, ("lora_unet_", "lycoris_", "", "unet.")),
        ),
        diffusers="unet.",
        diffusers_names=names,
    )


_TRANSFORMER = ("transformer.", "lora_transformer_", "lycoris_")
_FLUX_SPELLINGS = (Spelling(_flux2), Spelling(_flux, _TRANSFORMER), Spelling(_linear1_qkv, (COMFY,)))

ARCHITECTURES: Mapping[str, Architecture] = {
    "krea2": Architecture(("txtfusion.*",), (Spelling(_by_rules(_KREA2)), Spelling(_krea2_out))),
    "hunyuan_video": Architecture(("txt_in.input_embedder*",), (Spelling(_hunyuan_video),)),
    "hunyuan_3d": Architecture(("latent_in*",)),
    "flux2": Architecture(
        ("double_stream_modulation_img.*",),
        (Spelling(_flux2), Spelling(_flux2_as_flux, _TRANSFORMER), Spelling(_linear1_qkv, (COMFY,))),
        diffusers="transformer.",
        diffusers_names=_flux2,
    ),
    "chroma": Architecture(
        ("distilled_guidance_layer.layers.*.in_layer",),
        (Spelling(_chroma), *_FLUX_SPELLINGS),
        diffusers="transformer.",
        diffusers_names=_chroma,
    ),
    "flux": Architecture(
        ("double_blocks.*.img_attn.*", "single_blocks.*.linear1"),
        _FLUX_SPELLINGS,
        diffusers="transformer.",
        diffusers_names=_flux,
    ),
    "sd3": Architecture(
        ("joint_blocks.*.x_block.*", "joint_blocks.*.context_block.*"),
        (Spelling(_sd3, (*_TRANSFORMER, "base_model.model.")),),
        diffusers="transformer.",
        diffusers_names=_sd3,
    ),
    "z_image": Architecture(
        ("layers.*.adaLN_modulation.0", "x_pad_token"),
        (Spelling(_z_image, (COMFY, "lycoris_")),),
        diffusers=COMFY,
        diffusers_names=lambda path, shape: list(_z_image(path, shape)) or [Part(path)],
        split=_z_image,
    ),
    "lumina2": Architecture(
        ("noise_refiner.*.attention.qkv", "context_refiner.*.attention.qkv"),
        (Spelling(_lumina2), Spelling(_z_image, (COMFY, "lycoris_"))),
        diffusers="transformer.",
        diffusers_names=_lumina2,
    ),
    "hidream": Architecture(
        ("double_stream_blocks.*.block.*",),
        own=("transformer.", "lycoris_"),
        diffusers=COMFY,
    ),
    "qwen": Architecture(
        ("transformer_blocks.*.img_mlp.net.*",),
        own=("", "transformer.", "lycoris_"),
        diffusers=COMFY,
    ),
    "aura_flow": Architecture(
        ("double_layers.*.attn.w1q", "single_layers.*.attn.w1q"),
        (Spelling(_by_rules(_AURA_FLOW), ("transformer.",)),),
    ),
    "pixart": Architecture(
        ("blocks.*.cross_attn.kv_linear",),
        (Spelling(_by_rules(_PIXART), ("transformer.", "base_model.model.", "unet.base_model.model.")),),
    ),
    "ace_step_15": Architecture(("decoder.layers.*",), (Spelling(_without_decoder),)),
    "unet1": _unet_row(1, "input_blocks.2.0.op"),
    "unet": _unet_row(2, "input_blocks.*", "middle_block.*", "output_blocks.*"),
}
"""Kinds of networks whose files have other names than ComfyUI's own; the first that fits counts."""


def _flat(pattern: str, template: str) -> str:
    """Return a regular expression for what a rule makes of names, with underscores for dots."""
    groups = re.findall(r"\((?!\?)((?:[^()]|\(\?:[^()]*\))*)\)", pattern)
    expression = re.escape(template.rstrip("!~"))
    for index, group in enumerate(groups, 1):
        expression = expression.replace(rf"\\{index}", f"(?:{group})")
    return expression.replace(r"\.", "_")


_RULES = [
    (pattern, template)
    for rules in (_SD3, _FLUX, _CHROMA, _FLUX2, _Z_IMAGE, _LUMINA2, _AURA_FLOW, _PIXART, _KREA2)
    for pattern, templates in rules.items()
    for template in templates
    if pattern.replace("\\", "") != template
]
_BLOCK_NAMES = "|".join(
    (
        *(_flat(*rule) for rule in _RULES if "\\1" in rule[1]),
        r"single_blocks_\d+_(?:linear1_qkv|modulation_linear)",
        r"double_blocks_\d+_(?:img|txt)_(?:mlp_fc[12]|mod_linear)",
    )
)
_UNET_BLOCKS = re.compile("(?:down_blocks|up_blocks|mid_block)_.*")
_OF_UNETS = re.compile("|".join((_UNET_BLOCKS.pattern, *(name.replace(".", "_") for name in _UNET.values()))))
_IN_BLOCKS = re.compile(_BLOCK_NAMES)
_ANYWHERE = re.compile("|".join((_BLOCK_NAMES, *(_flat(*rule) for rule in _RULES if "\\1" not in rule[1]))))
