"""LoRA files: written under names that every ComfyUI reads; read in any spelling, checked.

Keys are kohya's, `<prefix><module path with underscores>.<suffix>` and `.alpha`. A family without that prefix
has `diffusion_model.<module path>` before the suffixes; where diffusers knows it, plain LoRA is written as by
ai-toolkit, `lora_A.weight` and `lora_B.weight` with alpha in them, which ComfyUI and diffusers read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...adapters.build import ADAPTERS, Adapter, for_layer, method_of
from ...family import Family, is_text
from ...state import TrainState
from ...user_error import UserError
from ..tensor_file import TensorFile
from .names import ARCHITECTURES, COMFY, spelled, split_text_path
from .peft import is_plain, peft_tensors, shape_of


def lora_tensors(state: TrainState, family: Family, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the file's tensors in `dtype`; an `.alpha` is a 0-d float32."""
    tensors: dict[str, Tensor] = {}
    architecture = None if family.key_prefix else ARCHITECTURES.get(family.export)
    for path, values in lora_layers(state).items():
        if architecture is None or is_text(path) or not is_plain(values):
            found = {f"{lora_key(path, family)}.{s}": t for s, t in rounded(values, dtype).items()}
        else:
            exact = {suffix: tensor.float() for suffix, tensor in values.items()}
            parts = architecture.native_parts(path, shape_of(values))
            found = rounded(peft_tensors(exact, parts, COMFY), dtype)
        tensors |= found
    return tensors


def lora_layers(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Return what a file holds for each layer: module path -> kohya's suffix -> tensor."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.weights.items():
        path, parameter = name.rsplit(".", 1)
        layers.setdefault(path, {})[parameter] = tensor
    settings = {path: for_layer(state.adapter, path) for path in layers}
    return {
        path: method_of(settings[path]).file_tensors(weights, settings[path])
        for path, weights in layers.items()
    }


EXACT = ("alpha", "dora_scale")
"""Suffixes that stay float32: a number, and the lengths of the whole weight's columns, whose rounding to bf16
would be a fifth of a small difference."""


def rounded(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a layer's tensors by suffix as a file of this dtype holds them."""
    return {s: t.to(torch.float32 if s in EXACT else dtype).contiguous() for s, t in tensors.items()}


def lora_key(path: str, family: Family) -> str:
    """Return the file's name for the layer at a module path of the diffusion model or a text encoder."""
    if is_text(path):
        encoder, inner = split_text_path(path)
        return spelled(family.text_encoders[encoder], inner)
    return spelled(family.key_prefix or COMFY, path)


MAX_HEADER = 32 << 20
"""Bytes of a safetensors header that a LoRA could need: 700 layers and a few previews stay far below."""


@dataclass(frozen=True)
class LoraLayer:
    """What a file holds for one layer: tensors by kohya's suffix, checked to fit each other."""

    name: str
    """The file's own name for the layer."""
    tensors: Mapping[str, Tensor]

    @property
    def algorithm(self) -> str:
        """Row of ADAPTERS that its factors belong to."""
        factors = _factors(self.tensors)
        return "dora" if factors == "lora" and self.magnitude is not None else factors

    @property
    def title(self) -> str:
        """The method, for people."""
        if self.magnitude is None:
            return self.algorithm
        axis = " over outputs" if self.over_outputs else ""
        return "dora" + axis if self.algorithm == "dora" else f"{self.algorithm} with dora_scale{axis}"

    @property
    def is_trainable(self) -> bool:
        """Whether Graft trains this method: DoRA only over the inputs, and only of a LoRA."""
        return self.title in ADAPTERS

    @property
    def method(self) -> type[Adapter]:
        return ADAPTERS[self.algorithm]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The method's parameters by name."""
        known = self.method.suffixes.values()
        return self.method.from_file_tensors({s: t for s, t in self.tensors.items() if s in known})

    @property
    def magnitude(self) -> Tensor | None:
        """DoRA's lengths: (1, in, 1, ...) of columns, or (out, 1, ...) of rows."""
        return self.tensors.get("dora_scale")

    @property
    def over_outputs(self) -> bool:
        """Whether the lengths are those of rows, by ComfyUI's rule."""
        return self.magnitude is not None and self.magnitude.shape[0] == self.shape[0]

    @property
    def rank(self) -> int | None:
        return self.method.rank_in(self.weights)

    @property
    def scale(self) -> float:
        """What the factors' product is multiplied by: alpha / rank, 1 where the file has no alpha or rank."""
        alpha = self.tensors.get("alpha")
        return 1.0 if alpha is None or self.rank is None else float(alpha) / self.rank

    @property
    def shape(self) -> tuple[int, int]:
        """Of `product`, which is not formed for it."""
        factors = {name: tensor.to("meta") for name, tensor in self.weights.items()}
        rows, columns = self.method.compose(factors).flatten(1).shape
        return rows, columns

    def product(self) -> Tensor:
        """Return the difference to the base weight, (out, everything else) float32; DoRA's: no magnitude."""
        weights = {name: tensor.float() for name, tensor in self.weights.items()}
        return self.scale * self.method.compose(weights).flatten(1)

    def square(self) -> float:
        """Return the squared Frobenius norm of `product`; of two factors from small Gram matrices."""
        weights = {name: tensor.double() for name, tensor in self.weights.items()}
        if set(weights) - {"magnitude"} != {"up", "down"}:
            return float(self.product().double().square().sum())
        up, down = weights["up"], weights["down"].flatten(1)
        return self.scale**2 * max(0.0, float(((up.T @ up) * (down @ down.T)).sum()))


@dataclass(frozen=True)
class OtherLayer:
    """A layer of a method that Graft knows by name only."""

    name: str
    method: str
    tensors: Mapping[str, Tensor]
    """By their keys in the file."""


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file that holds together."""

    name: str
    layers: Mapping[str, LoraLayer]
    """By the file's own names."""
    whole: Mapping[str, Mapping[str, Tensor]]
    """Differences that are no product: name -> suffix of WHOLE -> tensor. ComfyUI's loader applies them."""
    others: Mapping[str, OtherLayer]
    """Layers of methods that are not computed here, by the file's own names."""
    other: Mapping[str, Tensor]
    """Tensors that belong to no method, by their keys."""
    metadata: Mapping[str, str]

    @property
    def methods(self) -> dict[str, str]:
        """Return the method of every layer, for people, by the file's own names."""
        return {
            **dict.fromkeys(self.whole, "whole difference"),
            **{name: layer.title for name, layer in self.layers.items()},
            **{name: layer.method for name, layer in self.others.items()},
        }


def read_lora(path: Path) -> LoraFile:
    """Read a LoRA file in any spelling that ComfyUI knows: kohya, diffusers, PEFT, LyCORIS.

    Raises UserError naming file and tensor when it is no sound LoRA file.
    """
    opened = TensorFile(path, largest_header=MAX_HEADER)
    tensors = dict(opened)
    _require_finite(path.name, tensors)
    grouped, other = _grouped(path.name, tensors)
    layers: dict[str, LoraLayer] = {}
    whole: dict[str, dict[str, Tensor]] = {}
    others: dict[str, OtherLayer] = {}
    for name, keys in grouped.items():
        values = {suffix: tensors[key] for suffix, key in keys.items()}
        factors = {suffix: tensor for suffix, tensor in values.items() if suffix not in WHOLE}
        where = f"{path.name}: {name}"
        if method := _other_method(values):
            others[name] = OtherLayer(name, method, {key: tensors[key] for key in keys.values()})
            continue
        if len(factors) < len(values):
            if not factors.keys() - {"alpha"}:
                whole[name] = values
                continue
            whole[name] = {suffix: tensor for suffix, tensor in values.items() if suffix in WHOLE}
            if beside := sorted({"diff", "w_norm", "set_weight"} & values.keys()):
                raise UserError(f"{where}: {beside[0]} beside factors; ComfyUI would leave the factors out.")
        layers[name] = LoraLayer(name, _checked(where, factors))
    if not grouped:
        found = ", ".join(list(tensors)[:3]) or "nothing"
        raise UserError(
            f"{path.name}: no LoRA; it holds {found}. Choose a file of {', '.join(ADAPTERS)} weights."
        )
    return LoraFile(path.name, layers, whole, others, other, opened.metadata)


def _grouped(file: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, str]], dict[str, Tensor]]:
    """Return the keys by layer and suffix, and the tensors that no suffix is known for."""
    grouped: dict[str, dict[str, str]] = {}
    other: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name, suffix = split_key(key)
        if not suffix:
            other[key] = tensor
            continue
        layer = grouped.setdefault(name, {})
        if suffix in layer:
            raise UserError(f"{file}: {key}: the file holds this factor twice, in two spellings.")
        layer[suffix] = key
    return grouped, other


def split_key(key: str) -> tuple[str, str]:
    """Return (name of the layer, kohya's suffix) of a file's key; the key and "" where no suffix is known."""
    ending = next((ending for ending in ENDINGS if key.endswith(ending)), "")
    return (key.removesuffix(ending), ENDINGS[ending]) if ending else (key, "")


def _other_method(values: Mapping[str, Tensor]) -> str:
    """Return the name of a method that is only known by name, "" for those that are computed."""
    for suffix, tensor in values.items():
        if suffix in OTHER_METHODS:
            return "BOFT" if suffix == "oft_blocks" and tensor.ndim == 4 else OTHER_METHODS[suffix]
    return ""


def _require_finite(file: str, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise UserError(
                f"{file}: {key}: holds values that are no numbers; the training of it went wrong."
            )


def _factors(suffixes: Iterable[str]) -> str:
    """Return the row of ADAPTERS that these suffixes' factors belong to."""
    if any(suffix.startswith("hada_") for suffix in suffixes):
        return "loha"
    return "lokr" if any(suffix.startswith("lokr_") for suffix in suffixes) else "lora"


def _checked(where: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's tensors, alpha as a 0-d float32; UserError unless they fit each other."""
    factors = _factors(tensors)
    for needed in _NEEDED[factors]:
        if not any(all(name in tensors for name in choice) for choice in needed):
            found = ", ".join(sorted(tensors))
            raise UserError(f"{where}: {' and '.join(needed[0])} must both be there; found only {found}.")
    known = {*ADAPTERS[factors].suffixes.values(), "alpha", "dora_scale"}
    if stray := sorted(set(tensors) - known):
        raise UserError(f"{where}: {', '.join(stray)} has no place beside {factors} weights.")
    if "alpha" in tensors:
        if tensors["alpha"].numel() != 1:
            raise UserError(
                f"{where}.alpha: expected one number, found shape {tuple(tensors['alpha'].shape)}."
            )
        tensors = {**tensors, "alpha": tensors["alpha"].float().reshape(())}
    layer = LoraLayer(where, tensors)
    try:
        factors_of = {name: tensor.to("meta") for name, tensor in layer.weights.items()}
        composed = layer.method.compose(factors_of)
        sound = (
            composed.ndim >= 2
            and composed.numel() > 0
            and all(f.ndim >= 2 and f.numel() for name, f in factors_of.items() if name != "magnitude")
        )
    except (RuntimeError, IndexError, ValueError):
        sound = False
    if not sound:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items()))
        raise UserError(f"{where}: the shapes do not fit each other: {shapes}.")
    if layer.magnitude is not None:
        _check_magnitude(layer, where)
    return tensors


def _check_magnitude(layer: LoraLayer, where: str) -> None:
    assert layer.magnitude is not None
    found, (rows, columns) = tuple(layer.magnitude.shape), layer.shape
    over_inputs = len(found) >= 2 and found[0] == 1 and columns % found[1] == 0
    count = found[1] if over_inputs else rows
    if len(found) < 2 or layer.magnitude.numel() != count or (not over_inputs and found[0] != rows):
        raise UserError(
            f"{where}.dora_scale: shape {found} is neither (1, {columns}), one length an input, nor "
            f"({rows}, 1), one an output."
        )


SUFFIXES: Mapping[str, str] = {
    **{f".{suffix}": suffix for method in ADAPTERS.values() for suffix in method.suffixes.values()},
    ".alpha": "alpha",
    **{
        f"{spelling}{side}{end}": f"lora_{factor}.weight"
        for spelling, sides in {
            ".lora_": ("A", "B"),
            ".lora.": ("down", "up"),
            "_lora.": ("down", "up"),
            ".lora_linear_layer.": ("down", "up"),
        }.items()
        for side, factor in zip(sides, ("down", "up"))
        for end in ((".weight", ".default.weight", "") if side in "AB" else (".weight",))
    },
}
"""How files end their keys -> kohya's suffix. What ComfyUI's `LoRAAdapter.load` reads, and LyCORIS's own."""

WHOLE = ("diff", "diff_b", "w_norm", "b_norm", "set_weight")
"""Suffixes of differences that are no product: of a weight, its bias, a norm and its bias; a new weight."""

OTHER_METHODS: Mapping[str, str] = {
    **dict.fromkeys(("oft_blocks", "oft_diag", "rescale"), "OFT"),
    **dict.fromkeys(("oft_r", "oft_s", "oft_R.weight"), "OFT (PEFT)"),
    **dict.fromkeys(("boft_R", "boft_s"), "BOFT (PEFT)"),
    **dict.fromkeys(("a1.weight", "a2.weight", "b1.weight", "b2.weight"), "GLoRA"),
    **dict.fromkeys(
        (
            "lora_magnitude_vector",
            "lora_magnitude_vector.weight",
            "lora_magnitude_vector.default.weight",
        ),
        "DoRA over outputs (PEFT)",
    ),
    "reshape_weight": "LoRA of a wider layer",
}
"""Suffixes of methods that are not computed here -> their names."""

ENDINGS: Mapping[str, str] = {**SUFFIXES, **{f".{suffix}": suffix for suffix in (*WHOLE, *OTHER_METHODS)}}

_PAIR = (("lora_down.weight", "lora_up.weight"),)
_NEEDED: Mapping[str, tuple[tuple[tuple[str, ...], ...], ...]] = {
    "lora": (_PAIR,),
    "loha": (
        (("hada_w1_a", "hada_w1_b"),),
        (("hada_w2_a", "hada_w2_b"),),
    ),
    "lokr": (
        (("lokr_w1_a", "lokr_w1_b"), ("lokr_w1",)),
        (("lokr_w2_a", "lokr_w2_b"), ("lokr_w2",)),
    ),
}
"""By method: groups of which one alternative must be complete."""
