"""LoRA files: written with kohya keys, `.alpha` and metadata on the file; read in any spelling, checked.

Keys are `<prefix><module path with underscores>.<suffix>`, which every ComfyUI reads; a family without the
prefix is written with native `diffusion_model.<module path>.<suffix>` keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..adapters import ADAPTERS, Adapter, for_layer, method_of
from ..family import TEXT, Family, is_text
from ..state import TrainState
from ..tensor_file import TensorFile


def lora_tensors(state: TrainState, family: Family, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the file's tensors: the adapter's in `dtype`, and for each layer `.alpha` as a 0-d float32."""
    return {
        f"{lora_key(path, family)}.{suffix}": tensor
        for path, tensors in lora_layers(state, dtype).items()
        for suffix, tensor in tensors.items()
    }


def lora_layers(state: TrainState, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Tensor]]:
    """Return what a file holds for each layer: module path -> kohya's suffix -> tensor."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.weights.items():
        path, parameter = name.rsplit(".", 1)
        layers.setdefault(path, {})[parameter] = tensor
    found: dict[str, dict[str, Tensor]] = {}
    for path, weights in layers.items():
        config = for_layer(state.adapter, path)
        found[path] = rounded(method_of(config).file_tensors(weights, config), dtype)
    return found


EXACT = ("alpha", "dora_scale")
"""Suffixes that stay float32: a number, and the lengths of the whole weight's columns, whose rounding to bf16
would be a fifth of a small difference."""


def rounded(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a layer's tensors by suffix as a file of this dtype holds them."""
    return {s: t.to(torch.float32 if s in EXACT else dtype).contiguous() for s, t in tensors.items()}


def lora_key(path: str, family: Family) -> str:
    """Return the file's name for the layer at a module path of the diffusion model or a text encoder."""
    if is_text(path):
        encoder, _, inner = path.removeprefix(TEXT).partition(".transformer.")
        return family.text_encoders[encoder] + inner.replace(".", "_")
    return family.key_prefix + path.replace(".", "_") if family.key_prefix else f"diffusion_model.{path}"


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
        """Row of ADAPTERS that it belongs to."""
        return _algorithm(self.tensors)

    @property
    def method(self) -> type[Adapter]:
        return ADAPTERS[self.algorithm]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The method's parameters by name."""
        return self.method.from_file_tensors(self.tensors)

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


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file that holds together."""

    name: str
    layers: Mapping[str, LoraLayer]
    """By the file's own names."""
    other: Mapping[str, Tensor]
    """Tensors that belong to no method of ADAPTERS, by their keys."""
    metadata: Mapping[str, str]


def read_lora(path: Path) -> LoraFile:
    """Read a LoRA file in any spelling that ComfyUI knows: kohya, diffusers, PEFT, LyCORIS.

    Raises ValueError naming file and tensor when it is no sound LoRA file, or one that no loader renders.
    """
    opened = TensorFile(path, largest_header=MAX_HEADER)
    tensors = dict(opened)
    _require_finite(path.name, tensors)
    grouped: dict[str, dict[str, Tensor]] = {}
    other: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if any(key.endswith(suffix) for suffix in PEFT_DORA):
            raise ValueError(
                f"{path.name}: {key}: PEFT's DoRA stores the length of each output; ComfyUI ignores it and "
                "shows a wrong picture. Train DoRA here instead, which is over the input axis."
            )
        suffix = next((suffix for suffix in SUFFIXES if key.endswith(suffix)), None)
        if suffix is None:
            other[key] = tensor
            continue
        layer = grouped.setdefault(key.removesuffix(suffix), {})
        if SUFFIXES[suffix] in layer:
            raise ValueError(f"{path.name}: {key}: the file holds this factor twice, in two spellings.")
        layer[SUFFIXES[suffix]] = tensor
    layers = {
        name: LoraLayer(name, _checked(f"{path.name}: {name}", layer)) for name, layer in grouped.items()
    }
    if not layers:
        found = ", ".join(list(tensors)[:3]) or "nothing"
        raise ValueError(
            f"{path.name}: no LoRA; it holds {found}. Choose a file of {', '.join(ADAPTERS)} weights."
        )
    return LoraFile(path.name, layers, other, opened.metadata)


def _require_finite(file: str, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise ValueError(
                f"{file}: {key}: holds values that are no numbers; the training of it went wrong."
            )


def _algorithm(tensors: Mapping[str, Tensor]) -> str:
    if any(suffix.startswith("hada_") for suffix in tensors):
        return "loha"
    if any(suffix.startswith("lokr_") for suffix in tensors):
        return "lokr"
    return "dora" if "dora_scale" in tensors else "lora"


def _checked(where: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's tensors, alpha as a 0-d float32; ValueError unless they fit each other."""
    algorithm = _algorithm(tensors)
    for needed in _NEEDED[algorithm]:
        if not any(all(name in tensors for name in choice) for choice in needed):
            found = ", ".join(sorted(tensors))
            raise ValueError(f"{where}: {' and '.join(needed[0])} must both be there; found only {found}.")
    known = {*ADAPTERS[algorithm].suffixes.values(), "alpha"}
    if stray := sorted(set(tensors) - known):
        raise ValueError(f"{where}: {', '.join(stray)} has no place beside {algorithm} weights.")
    if "alpha" in tensors:
        if tensors["alpha"].numel() != 1:
            raise ValueError(
                f"{where}.alpha: expected one number, found shape {tuple(tensors['alpha'].shape)}."
            )
        tensors = {**tensors, "alpha": tensors["alpha"].float().reshape(())}
    try:
        layer = LoraLayer(where, tensors)
        factors = {name: tensor.to("meta") for name, tensor in layer.weights.items()}
        composed = layer.method.compose(factors)
        sound = (
            composed.ndim >= 2
            and composed.numel() > 0
            and all(f.ndim >= 2 for name, f in factors.items() if name != "magnitude")
        )
    except (RuntimeError, IndexError, ValueError):
        sound = False
    if not sound:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items()))
        raise ValueError(f"{where}: the shapes do not fit each other: {shapes}.")
    if algorithm == "dora":
        _check_magnitude(where, tensors)
    return tensors


def _check_magnitude(where: str, tensors: Mapping[str, Tensor]) -> None:
    found, columns = tuple(tensors["dora_scale"].shape), tensors["lora_down.weight"].shape[1]
    if len(found) < 2 or found[0] != 1 or tensors["dora_scale"].numel() != found[1] or columns % found[1]:
        raise ValueError(
            f"{where}.dora_scale: shape {found} is not (1, {columns}), one length an input. ComfyUI divides "
            "lengths of outputs by those of the base without the LoRA, so that it does not show what was "
            "trained; Graft trains DoRA over the input axis only."
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

PEFT_DORA = (
    ".lora_magnitude_vector",
    ".lora_magnitude_vector.weight",
    ".lora_magnitude_vector.default.weight",
)

_PAIR = (("lora_down.weight", "lora_up.weight"),)
_NEEDED: Mapping[str, tuple[tuple[tuple[str, ...], ...], ...]] = {
    "lora": (_PAIR,),
    "dora": (_PAIR,),
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
