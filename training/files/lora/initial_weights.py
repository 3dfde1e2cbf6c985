"""The initial weights of a run that starts from a LoRA file: its layers, brought to the run's settings.

The adapters then compute exactly what the file does. A layer that the file calls by several names (separate
q, k, v of a fused qkv) becomes one LoRA, a smaller rank is padded, and what the file lacks starts fresh.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...adapters.build import ADAPTERS, Adapter, build_adapters, initialize, named_parameters
from ...adapters.select import select
from ...config import AdapterConfig
from ...family import Family
from ...frozen_base.frozen_layer import FrozenLayer, LayerSpec
from ...log import log
from ...user_error import UserError
from .match import Matched, WholeLayer, by_reason, match_lora
from .names import layer_names
from .read import LoraFile, LoraLayer


def build_initial_weights(
    matched: Matched,
    specs: Mapping[str, LayerSpec],
    family: Family,
    config: AdapterConfig,
    *,
    seed: int = 0,
    layers: Mapping[str, FrozenLayer] | None = None,
) -> dict[str, Tensor]:
    """Return the weights of step 0: the file's layers, and fresh ones for the rest of what `config` selects.

    Layers of the file outside the selection are trained too; keys that are left out are logged. `layers`
    holds the base, for methods that need it. Raises UserError when the file does not go with `config`, saying
    what to set.
    """
    for reason, keys in by_reason(matched.left_out).items():
        log.warning(
            "%s: %d keys %s in %s and are not trained: %s",
            matched.file,
            len(keys),
            reason,
            family.name,
            ", ".join(keys),
        )
    if config.init == "pissa":
        raise UserError(
            f"{matched.file}: a file takes the place of PiSSA's initial weights; set init to 'default'."
        )
    chosen = {*select(specs, family, config), *matched.layers}
    adapters = build_adapters({name: spec for name, spec in specs.items() if name in chosen}, config)
    initialize(adapters, seed, layers)
    for name, layer in matched.layers.items():
        with torch.no_grad():
            load_layer(
                adapters[name], layer, f"{matched.file}: {layer.name}", layers[name] if layers else None
            )
    return {name: parameter.detach() for name, parameter in named_parameters(adapters).items()}


def config_from_file(
    matched: Matched, specs: Mapping[str, LayerSpec], config: AdapterConfig
) -> AdapterConfig:
    """Return `config` with algorithm, rank, alpha and the methods' own settings as in the file.

    What most layers have becomes the setting, and patterns name the layers that differ.
    """
    layers = matched.layers
    algorithms = {path: layer.algorithm for path, layer in layers.items()}
    ranks = {path: layer.rank or config.rank for path, layer in layers.items()}
    alphas = {
        path: float(layer.tensors.get("alpha", ranks[path])) if layer.method.has_alpha else 0.0
        for path, layer in layers.items()
    }
    algorithm, rank, alpha = (_most(values) for values in (algorithms, ranks, alphas))
    settings = dataclasses.replace(
        config,
        algorithm=algorithm,
        rank=rank,
        alpha=alpha,
        rslora=False,
        init="default",
        tucker=any(core in layer.weights for layer in layers.values() for core in layer.method.cores),
        algorithms=tuple((path, value) for path, value in algorithms.items() if value != algorithm),
        ranks=tuple((path, value) for path, value in ranks.items() if value != rank),
        alphas=tuple((path, value) for path, value in alphas.items() if value != alpha),
    )
    for name in dict.fromkeys(algorithms.values()):
        own = {
            path: (specs[path], layer.weights) for path, layer in layers.items() if layer.algorithm == name
        }
        settings = ADAPTERS[name].settings_of(settings, own)
    return settings


def match_layers(file: LoraFile, specs: Mapping[str, LayerSpec], family: Family) -> Matched:
    """Find the file's layers in the model, parts of fused layers joined.

    Methods that Graft does not train, and whole differences that are not those of a layer and its bias, are
    left out. Raises UserError when nothing is left, or when parts of one layer cannot be joined.
    """
    names = layer_names({path: spec.shape for path, spec in specs.items()})
    matched = match_lora(file, names, {path: spec.shape[0] for path, spec in specs.items()}, family.name)
    layers = {path: layer for path, layer in matched.layers.items() if layer.is_trainable}
    left_out = dict(matched.left_out)
    for path in matched.layers.keys() - layers.keys():
        layer = matched.layers[path]
        reason = f"are {layer.title}, which Graft does not train"
        left_out |= {f"{layer.name}.{suffix}": reason for suffix in layer.tensors}
    for part in matched.whole:
        if _is_full(part, specs[part.target.key]) and part.target.key not in matched.layers:
            layers[part.target.key] = LoraLayer(part.name, part.tensors)
            continue
        left_out |= {f"{part.name}.{suffix}": "are whole differences, no factors," for suffix in part.tensors}
    for name in matched.others:
        other = file.others[name]
        left_out |= dict.fromkeys(other.tensors, f"are {other.method}, which Graft does not train")
    if not layers:
        methods = ", ".join(sorted(set(file.methods.values())))
        raise UserError(
            f"{file.name}: nothing in it can be trained: it holds {methods}. Choose a file of "
            f"{', '.join(ADAPTERS)}."
        )
    return Matched(matched.file, layers, left_out=left_out)


def _is_full(part: WholeLayer, spec: LayerSpec) -> bool:
    """Return whether a whole difference is what the algorithm full trains of a layer."""
    return (
        part.tensors.keys() - {"alpha"} == ({"diff", "diff_b"} if spec.has_bias else {"diff"})
        and not part.target.swapped
        and tuple(part.tensors["diff"].shape) == spec.shape
    )


def load_layer(adapter: Adapter, layer: LoraLayer, where: str, base: FrozenLayer | None = None) -> None:
    """Give a fresh adapter the difference that `layer` describes; ranks beyond its own add nothing yet.

    Raises UserError, beginning with `where`, for an adapter of another method, other factors or a lower rank.
    """
    if not isinstance(adapter, layer.method):
        raise UserError(
            f"{where}: the file holds {layer.algorithm} weights; set the algorithm to it, not "
            f"{adapter.config.algorithm}."
        )
    parameters = dict(adapter.named_parameters())
    factors = {
        name: _match_shape(tensor, name, parameters, f"{where}.{name}", adapter, layer)
        for name, tensor in adapter.adapt_factors(layer.weights).items()
    }
    # One factor of a product takes the ratio of the two strengths, and the rest are copied as they are.
    ratio = layer.scale / adapter.scale
    scaled = adapter.strength_factors(factors)
    for name, tensor in factors.items():
        target = parameters[name]
        if target.shape != tensor.shape and name in adapter.padded_with_zeros:
            target.zero_()
        corner = target[tuple(slice(0, side) for side in tensor.shape)]
        corner.copy_(tensor.float() * ratio if name in scaled and ratio != 1 else tensor)
    adapter.complete(factors, base)


def _match_shape(
    tensor: Tensor,
    name: str,
    parameters: Mapping[str, Tensor],
    where: str,
    adapter: Adapter,
    layer: LoraLayer,
) -> Tensor:
    """Return a file's factor with the axes of the parameter; only the rank may differ."""
    if name not in parameters:
        raise UserError(f"{where}: the settings have no such factor; {_as_in_the_file(layer)}.")
    target = parameters[name]
    old, new = layer.rank or 0, adapter.config.rank
    if tensor.ndim != target.ndim:  # a kernel may be flat, in either
        shape = (tensor.shape[0], *target.shape[1:])
        tensor = tensor.reshape(shape) if tensor.numel() == math.prod(shape) else tensor
    sides = list(zip(tensor.shape, target.shape))
    if tensor.ndim != target.ndim or any(a != b and (a, b) != (old, new) for a, b in sides):
        raise UserError(
            f"{where}: shape {tuple(tensor.shape)} does not fit {tuple(target.shape)} of the layer "
            f"{adapter.spec.shape}; {_as_in_the_file(layer)}, or choose the base that the file was trained "
            "on."
        )
    if any(a > b for a, b in sides):
        raise UserError(
            f"{where}: the file has rank {old} here and the settings have {new}; {_as_in_the_file(layer)}."
        )
    if tensor.shape != target.shape and any(core in layer.weights for core in adapter.cores):
        raise UserError(f"{where}: the rank of a Tucker core cannot change; {_as_in_the_file(layer)}.")
    return tensor


def _as_in_the_file(layer: LoraLayer) -> str:
    return f"take rank and factors from the file (rank {layer.rank}, {layer.algorithm})"


def _most(values: Mapping[str, Any]) -> Any:
    return Counter(values.values()).most_common(1)[0][0]
