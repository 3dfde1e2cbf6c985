"""The reading of a LoRA file: any spelling, every layer checked.

The names of a file's layers are left as they are here; `match.py` finds the layers in a model by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...adapters.build import ADAPTERS, Adapter
from ...user_error import UserError
from ..tensor_file import TensorFile
from .peft import ALPHA

MAX_HEADER = 32 << 20
"""Bytes of a safetensors header that a LoRA could need: 700 layers and a few previews stay far below."""


@dataclass(frozen=True)
class LoraLayer:
    """One layer of a file: tensors by kohya's suffix, checked to fit each other."""

    name: str
    """The file's own name for the layer."""
    tensors: Mapping[str, Tensor]

    @property
    def algorithm(self) -> str:
        """The row of ADAPTERS that its factors belong to."""
        return _algorithm_of(self.tensors)

    @property
    def title(self) -> str:
        """The method, for people."""
        if self.magnitude is None:
            return self.algorithm
        axis = " over outputs" if self.over_outputs else ""
        beside = "" if MAGNITUDE in self.method.suffixes.values() else f" with {MAGNITUDE}"
        return self.algorithm + beside + axis

    @property
    def is_trainable(self) -> bool:
        """Whether Graft trains this method. It trains DoRA over the inputs only, and on LoRA only."""
        return self.title in ADAPTERS

    @property
    def method(self) -> type[Adapter]:
        return ADAPTERS[self.algorithm]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The method's parameters by name."""
        return self.method.from_file_tensors(self.tensors)

    @property
    def magnitude(self) -> Tensor | None:
        """DoRA's lengths: (1, in, 1, ...) of columns, or (out, 1, ...) of rows."""
        return self.tensors.get(MAGNITUDE)

    @property
    def over_outputs(self) -> bool:
        """Whether the magnitudes are the lengths of rows, by ComfyUI's rule."""
        return self.magnitude is not None and self.magnitude.shape[0] == self.shape[0]

    @property
    def rank(self) -> int | None:
        return self.method.rank_in(self.weights)

    @property
    def scale(self) -> float:
        """Scale of the factors' product: alpha / rank, or 1 where the file has no alpha or rank."""
        alpha, rank = self.tensors.get(ALPHA), self.rank if self.method.has_alpha else None
        return 1.0 if alpha is None or rank is None else float(alpha) / rank

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of `product`, which is not computed for it; (outputs, 0) of a method that does not tell."""
        return self.method.shape_in({name: tensor.to("meta") for name, tensor in self.weights.items()})

    def is_for(self, rows: int, columns: int) -> bool:
        """Return whether the layer can belong to a weight of this shape, flattened."""
        return self.shape[0] == rows and self.shape[1] in (0, columns)

    def product(self) -> Tensor:
        """Return the difference to the base weight, (out, everything else) float32, without magnitudes.

        A method that multiplies the base has none of its own: see `merge.merge_weight`.
        """
        weights = {name: tensor.float() for name, tensor in self.weights.items()}
        return self.scale * self.method.compose(weights).flatten(1)

    def square(self) -> float:
        """Return the squared Frobenius norm of `product`; of two factors from small Gram matrices.

        0 for a method that multiplies the base: the norm is the base's too.
        """
        if self.method.multiplies_base:
            return 0.0
        factors = self.two_factors(torch.float64)
        if factors is None:
            return float(self.product().double().square().sum())
        up, down = factors[0], factors[1].flatten(1)
        return self.scale**2 * max(0.0, float(((up.T @ up) * (down @ down.T)).sum()))

    def two_factors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor] | None:
        """Return the method's `two_factors`, unscaled, or None."""
        return self.method.two_factors({name: tensor.to(dtype) for name, tensor in self.weights.items()})


@dataclass(frozen=True)
class OtherLayer:
    """A layer of a method that Graft knows only by name."""

    name: str
    method: str
    tensors: Mapping[str, Tensor]
    """By their keys in the file."""


@dataclass(frozen=True)
class LoraFile:
    """A checked LoRA file."""

    name: str
    layers: Mapping[str, LoraLayer]
    """By the file's own names."""
    whole: Mapping[str, Mapping[str, Tensor]]
    """Differences that are not a product, which ComfyUI applies: name -> suffix of WHOLE -> tensor."""
    others: Mapping[str, OtherLayer]
    """Layers of methods that Graft does not compute, by the file's own names."""
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

    Raises UserError naming the file and the tensor unless it is a sound LoRA file.
    """
    opened = TensorFile(path, largest_header=MAX_HEADER)
    tensors = dict(opened)
    _require_finite(path.name, tensors)
    grouped, other = _group_keys(path.name, tensors)
    layers: dict[str, LoraLayer] = {}
    whole: dict[str, dict[str, Tensor]] = {}
    others: dict[str, OtherLayer] = {}
    for name, keys in grouped.items():
        values = {suffix: tensors[key] for suffix, key in keys.items()}
        factors = {suffix: tensor for suffix, tensor in values.items() if suffix not in WHOLE}
        where = f"{path.name}: {name}"
        if method := _other_method(values, factors):
            others[name] = OtherLayer(name, method, {key: tensors[key] for key in keys.values()})
            continue
        if len(factors) < len(values):
            if not factors.keys() - {ALPHA}:
                whole[name] = values
                continue
            whole[name] = {suffix: tensor for suffix, tensor in values.items() if suffix in WHOLE}
            if beside := sorted({"diff", "w_norm", "set_weight"} & values.keys()):
                raise UserError(f"{where}: {beside[0]} beside factors; ComfyUI would leave the factors out.")
        layers[name] = LoraLayer(name, _check_layer(where, factors))
    if not grouped:
        names = ", ".join(list(tensors)[:3]) or "nothing"
        raise UserError(
            f"{path.name}: not a LoRA; it holds {names}. Choose a file of {', '.join(ADAPTERS)} weights."
        )
    return LoraFile(path.name, layers, whole, others, other, opened.metadata)


def _group_keys(
    file: str, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, str]], dict[str, Tensor]]:
    """Return the keys by layer and suffix, and the tensors whose suffix is unknown."""
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
    endings = _endings(tuple(ADAPTERS.values()))
    ending = next((ending for ending in endings if key.endswith(ending)), "")
    return (key.removesuffix(ending), endings[ending]) if ending else (key, "")


def _other_method(values: Mapping[str, Tensor], factors: Mapping[str, Tensor]) -> str:
    """Return the name of a method that Graft does not compute, "" for those that it does."""
    if other := ADAPTERS[_algorithm_of(factors)].other_form(factors):
        return other
    return next((OTHER_METHODS[suffix] for suffix in values if suffix in OTHER_METHODS), "")


def _require_finite(file: str, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise UserError(
                f"{file}: {key}: holds infinite or NaN values; its training went wrong. Choose another file."
            )


def _algorithm_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the row of ADAPTERS that has the most of these suffixes, the first of several. Magnitudes decide
    last: other methods may have them too.
    """

    def count(name: str) -> tuple[int, int]:
        method = ADAPTERS[name]
        present = tensors.keys() & set(method.suffixes.values())
        return (len(present - {MAGNITUDE}), len(present)) if present and method.is_in(tensors) else (0, 0)

    return max(ADAPTERS, key=count)


def _check_layer(where: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's tensors, alpha as a 0-d float32. Raises UserError unless they fit each other."""
    layer = LoraLayer(where, tensors)
    known = {*layer.method.suffixes.values(), ALPHA, MAGNITUDE}
    if stray := sorted(set(tensors) - known):
        raise UserError(f"{where}: {', '.join(stray)} has no place beside {layer.algorithm} weights.")
    if ALPHA in tensors:
        if tensors[ALPHA].numel() != 1:
            raise UserError(f"{where}.alpha: expected one number, found shape {tuple(tensors[ALPHA].shape)}.")
        tensors = {**tensors, ALPHA: tensors[ALPHA].float().reshape(())}
    try:
        factors_of = {name: tensor.to("meta") for name, tensor in layer.weights.items()}
        sound = layer.method.shape_in(factors_of)[0] > 0 and all(
            f.ndim >= 2 and f.numel() for name, f in factors_of.items() if name != "magnitude"
        )
    except KeyError as missing:
        suffix = layer.method.suffixes[missing.args[0]]
        raise UserError(
            f"{where}: {suffix} is missing; found only {', '.join(sorted(tensors))}. The file is damaged."
        ) from missing
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
    shape, (rows, columns) = tuple(layer.magnitude.shape), layer.shape
    over_inputs = len(shape) >= 2 and shape[0] == 1 and columns % shape[1] == 0
    count = shape[1] if over_inputs else rows
    if len(shape) < 2 or layer.magnitude.numel() != count or (not over_inputs and shape[0] != rows):
        raise UserError(
            f"{where}.{MAGNITUDE}: shape {shape} is neither (1, {columns}), one length an input, nor "
            f"({rows}, 1), one an output."
        )


LORA_SPELLINGS: Mapping[str, str] = {
    f"{spelling}{side}{end}": f"lora_{factor}.weight"
    for spelling, sides in {
        ".lora_": ("A", "B"),
        ".lora.": ("down", "up"),
        "_lora.": ("down", "up"),
        ".lora_linear_layer.": ("down", "up"),
    }.items()
    for side, factor in zip(sides, ("down", "up"))
    for end in ((".weight", ".default.weight", "") if side in "AB" else (".weight",))
}
"""How other programs end LoRA's keys -> kohya's suffix: what ComfyUI's `LoRAAdapter.load` reads."""

WHOLE = ("diff", "diff_b", "w_norm", "b_norm", "set_weight")
"""Suffixes of differences that are not a product: of a weight, its bias, a norm, its bias; a new weight."""

OTHER_METHODS: Mapping[str, str] = {
    **dict.fromkeys(("oft_diag", "rescale"), "OFT"),
    **dict.fromkeys(("oft_r", "oft_s", "oft_R.weight"), "OFT (PEFT)"),
    **dict.fromkeys(("boft_R", "boft_s"), "BOFT (PEFT)"),
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
"""Suffixes of methods that Graft does not compute -> their names."""

MAGNITUDE = "dora_scale"
"""Suffix of DoRA's magnitudes, which LyCORIS writes beside LoHa and LoKr too."""


@cache
def _endings(methods: tuple[type[Adapter], ...]) -> Mapping[str, str]:
    """Return how keys of a file end -> kohya's suffix."""
    own = [suffix for method in methods for suffix in method.suffixes.values()]
    suffixes = (*own, ALPHA, *WHOLE, *OTHER_METHODS)
    return {**{f".{suffix}": suffix for suffix in suffixes}, **LORA_SPELLINGS}
