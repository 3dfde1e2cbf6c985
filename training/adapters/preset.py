"""Presets in LyCORIS's JSON layout: which layers are trained, each with its algorithm and rank.

{"enable_conv": true, "unet_target_module": ["Transformer2DModel"], "unet_target_name": ["conv_in"],
 "name_algo_map": {"*attn1*": {"algo": "lokr", "factor": 8}}, "module_algo_map": {"FeedForward": {"dim": 4}},
 "exclude_name": ["*.0.*"], "use_fnmatch": true}

Names are patterns over ComfyUI's module paths; a class of modules stands for the patterns that families have
for it (`Family.preset_modules`). A key that could not be honored is refused, never ignored
(https://github.com/KohakuBlueleaf/LyCORIS/blob/main/docs/Preset.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import AdapterConfig
from ..family import preset_modules
from ..files.input_file import parse_json
from ..user_error import UserError
from .build import ADAPTERS

SHARED = {
    "factor": "factor",
    "decompose_both": "decompose_both",
    "full_matrix": "full_matrix",
    "use_tucker": "tucker",
}
"""Keys of an algorithm map that Graft has one setting for, shared by all layers -> its field."""


def apply_preset(text: str, config: AdapterConfig) -> AdapterConfig:
    """Return `config` with the layers and per-layer settings of a preset.

    Raises UserError for text that is not such a preset, and for anything in it that cannot be honored.
    """
    try:
        preset = parse_json(text)
    except UserError as error:
        raise UserError(f"preset: not JSON ({error}).") from error
    if not isinstance(preset, dict):
        raise UserError('preset: expected an object such as {"unet_target_module": ["Transformer2DModel"]}.')
    for key, value in preset.items():
        if key.startswith("text_encoder_") and value:
            raise UserError(f"preset: {key}: text encoders are chosen in Build LoRA; leave the list empty.")
        if key not in KEYS and not key.startswith("text_encoder_"):
            raise UserError(f"preset: {key}: unknown key; known: {', '.join(KEYS)}.")
        kind = KEYS.get(key, object)
        if not isinstance(value, kind):
            raise UserError(f"preset: {key}: expected {kind.__name__}, got {value!r}.")
    globs = preset.get("use_fnmatch", False)
    rules: list[tuple[str, Mapping[str, Any]]] = [
        *((_pattern(name, globs), values) for name, values in preset.get("name_algo_map", {}).items()),
        *((p, v) for name, v in preset.get("module_algo_map", {}).items() for p in _module(name)),
    ]
    shared = _shared(rules)
    modules = [*preset.get("target_module", ()), *preset.get("unet_target_module", ())]
    names = [*preset.get("target_name", ()), *preset.get("unet_target_name", ())]
    include = [p for name in modules for p in _module(name)] + [_pattern(name, globs) for name in names]
    if include:
        include += [pattern for pattern, _ in rules]
    return dataclasses.replace(
        config,
        targets="all" if preset.get("enable_conv", True) else "linear",
        include=tuple(dict.fromkeys([*config.include, *include])),
        exclude=(*config.exclude, *(_pattern(name, globs) for name in preset.get("exclude_name", ()))),
        algorithms=(*_values(rules, "algo"), *config.algorithms),
        ranks=(*_values(rules, "dim"), *config.ranks),
        alphas=(*_values(rules, "alpha"), *config.alphas),
        **shared,
    )


def _pattern(name: str, glob: bool) -> str:
    """Return LyCORIS's pattern as ours: a glob, or a regular expression that matches from the start."""
    return name if glob else f"re:(?:{name}).*"


def _module(name: str) -> tuple[str, ...]:
    """Return the patterns of a class of modules."""
    modules = preset_modules()
    if name not in modules:
        raise UserError(
            f"preset: {name}: Graft does not know which layers of ComfyUI's models those are; it knows "
            f"{', '.join(modules)}. Name the layers in unet_target_name instead."
        )
    return modules[name]


def _values(rules: list[tuple[str, Mapping[str, Any]]], key: str) -> tuple[tuple[str, Any], ...]:
    kinds: dict[str, tuple[type, ...]] = {"algo": (str,), "dim": (int,), "alpha": (int, float)}
    ours = {other: name for name, method in ADAPTERS.items() for other in method.lycoris_names}
    pairs = [(pattern, values[key]) for pattern, values in rules if key in values]
    for pattern, value in pairs:
        if not isinstance(value, kinds[key]):
            raise UserError(f"preset: {pattern}: {key}: {value!r} is not a possible value.")
    return tuple(
        (
            pattern,
            ours.get(value, value) if key == "algo" else float(value) if key == "alpha" else value,
        )
        for pattern, value in pairs
    )


def _shared(rules: list[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the settings that all rules must agree on."""
    shared: dict[str, Any] = {}
    for pattern, values in rules:
        if not isinstance(values, dict):
            raise UserError(f'preset: {pattern}: expected an object such as {{"algo": "lokr"}}.')
        for key, value in values.items():
            if key in ("algo", "dim", "alpha"):
                continue
            if key not in SHARED:
                raise UserError(
                    f"preset: {pattern}: {key}: unknown; known: algo, dim, alpha, {', '.join(SHARED)}."
                )
            if shared.setdefault(SHARED[key], value) != value:
                raise UserError(f"preset: {key} must be the same everywhere in the preset.")
    return shared


KEYS: Mapping[str, type] = {
    "enable_conv": bool,
    "target_module": list,
    "target_name": list,
    "unet_target_module": list,
    "unet_target_name": list,
    "name_algo_map": dict,
    "module_algo_map": dict,
    "exclude_name": list,
    "use_fnmatch": bool,
}
