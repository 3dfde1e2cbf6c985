"""The choice of trained layers and their settings: path patterns, block ranges, per-layer values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from ..config import AdapterConfig
from ..family import Family, block_of, is_text
from ..frozen_base.frozen_layer import LayerSpec
from ..user_error import UserError
from .lora import kernel_can_be_decomposed

T = TypeVar("T")

KINDS: Mapping[str, tuple[str, ...]] = {
    "all": ("linear", "conv1d", "conv2d"),
    "everything": ("linear", "conv1d", "conv2d", "embedding"),
}
"""Layer kinds a target preset takes; linear alone where it is not listed."""

PARTS: Mapping[str, tuple[int, int]] = {"early": (0, 1), "middle": (1, 2), "late": (2, 3)}
"""Thirds of the model, for `AdapterConfig.blocks`."""


def select(specs: Mapping[str, LayerSpec], family: Family, config: AdapterConfig) -> dict[str, LayerSpec]:
    """Return the layers to train, by module path, in the model's order.

    Raises UserError, naming what exists, for an unknown preset and when nothing matches.
    """
    if config.targets not in family.targets:
        raise UserError(
            f"targets: {family.name} has no preset {config.targets!r}; "
            f"choose one of {', '.join(family.targets)}."
        )
    specs, text = _split_text(specs)
    kinds = KINDS.get(config.targets, ("linear",))
    preset = family.targets[config.targets]
    candidates = {n: s for n, s in specs.items() if s.kind in kinds and matches(n, preset)}
    included = {n: s for n, s in candidates.items() if not config.include or matches(n, config.include)}
    if config.blocks:
        inside = in_blocks(specs, family, config.blocks)
        included = {n: s for n, s in included.items() if n in inside}
    idle = family.idle_layers(specs)
    included |= text if config.text_encoder else {}
    chosen = {n: s for n, s in included.items() if n not in idle and not matches(n, config.exclude)}
    if not chosen:
        names = list(candidates or specs)
        examples = ", ".join(names[:: max(1, len(names) // 8)][:8])
        within = f", blocks {config.blocks!r}" if config.blocks else ""
        raise UserError(
            f"no layer is left to train: targets {config.targets!r}, include {list(config.include)}, exclude "
            f"{list(config.exclude)}{within} match none of the {len(names)} layers. "
            f"Clear include and exclude in Build LoRA. Layers are named like {examples}."
        )
    return chosen


def ineffective_patterns(specs: Mapping[str, LayerSpec], family: Family, config: AdapterConfig) -> list[str]:
    """Return a sentence for every pattern in the settings that matches no layer, and one for `tucker` where
    no trained layer has a kernel to decompose.

    Raises UserError as `select` does.
    """
    # A LoRA file that training starts from brings layers of its own.
    trained = specs if config.start_from else select(specs, family, config)
    rules = {"algorithms": config.algorithms, "ranks": config.ranks, "alphas": config.alphas}
    used = [(name, pattern, specs) for name in ("include", "exclude") for pattern in getattr(config, name)]
    for name, pairs in {**rules, "learning rates": config.lrs}.items():
        used += [(name, pattern, trained) for pattern, _ in pairs]
    notes = [
        f"{name}: {pattern!r} matches no layer and changes nothing; a layer is called {next(iter(layers))}."
        for name, pattern, layers in used
        if not any(matches(path, (pattern,)) for path in layers)
    ]
    if config.tucker and not any(map(kernel_can_be_decomposed, trained.values())):
        notes.append(
            "tucker True has no effect: no trained layer is a two-dimensional convolution larger than 1x1; "
            "set targets to all, which has them where the model does."
        )
    return notes


def _split_text(specs: Mapping[str, LayerSpec]) -> tuple[dict[str, LayerSpec], dict[str, LayerSpec]]:
    """Return the diffusion model's layers, which presets choose from, and those of the text encoders."""
    network = {path: spec for path, spec in specs.items() if not is_text(path)}
    return network, {path: spec for path, spec in specs.items() if is_text(path)}


def for_layer(config: AdapterConfig, path: str) -> AdapterConfig:
    """Return the settings of the layer at `path`: its algorithm, rank and alpha, with no patterns left."""
    return dataclasses.replace(
        config,
        algorithm=first_match(path, config.algorithms, config.algorithm),
        rank=first_match(path, config.ranks, config.rank),
        alpha=first_match(path, config.alphas, config.alpha),
        algorithms=(),
        ranks=(),
        alphas=(),
    )


def first_match(path: str, rules: Iterable[tuple[str, T]], default: T) -> T:
    """Return the value of the first rule whose pattern matches `path`."""
    return next((value for pattern, value in rules if matches(path, (pattern,))), default)


def in_blocks(specs: Mapping[str, LayerSpec], family: Family, ranges: str) -> set[str]:
    """Return the layers in the repeated blocks that `ranges` names; see `AdapterConfig.blocks`.

    Raises UserError for text that cannot be read and for a block that the model does not have.
    """
    block_of_layer = {name: block_of(name, family.blocks) for name in specs}
    inside = {name: block for name, block in block_of_layer.items() if block not in (None, name)}
    blocks = list(dict.fromkeys(inside.values()))
    wanted = {blocks[index] for part in ranges.split(",") for index in _indices(part.strip(), len(blocks))}
    return {name for name, block in inside.items() if block in wanted}


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Return whether any pattern matches: a glob, or after "re:" a regular expression over the whole path."""
    return any(_matches(path, pattern) for pattern in patterns)


def _matches(path: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatchcase(path, pattern)
    try:
        return re.fullmatch(pattern[3:], path) is not None
    except re.error as error:
        raise UserError(f"pattern {pattern!r} is not a regular expression: {error}.") from error


def _indices(part: str, count: int) -> range:
    if part in PARTS:
        first, last = PARTS[part]
        return range(round(first * count / 3), round(last * count / 3))
    match = re.fullmatch(r"(\d+)(?:\s*(-)\s*(\d*))?", part)
    if not match:
        raise UserError(
            f"blocks: {part!r} is no block range; write for instance '0-11, 18, 30-', early, middle or late."
        )
    first = int(match[1])
    last = int(match[3]) if match[3] else count - 1 if match[2] else first
    if not first <= last < count:
        raise UserError(f"blocks: {part!r} is not within the model's {count} blocks, 0 to {count - 1}.")
    return range(first, last + 1)
