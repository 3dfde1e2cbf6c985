"""Build LoRA's settings on a model: how much is trained, and the initial state that a LoRA file gives."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...adapters.build import build_adapters, ineffective_patterns, method_of, needs_base
from ...adapters.select import select
from ...config import AdapterConfig, digest
from ...files.lora.initial_weights import build_initial_weights, config_from_file, match_layers
from ...files.lora.match import Matched
from ...files.lora.read import LoraFile, read_lora
from ...files.tensor_digest import tensor_digest
from ...files.tensor_file import write_tensors
from ...memory.weight_store import UNPLACED
from ...run.saved_state import StateHandle, save_state
from ...state import TrainState
from ...tools.files import left_out_lines
from ...tools.merge import digest_of_layers
from ...user_error import UserError
from ..model.denoiser import ComfyDenoiser
from ..paths import GIVEN, given_lora_path, graft_folder, lora_file_path, own_folder


@dataclass(frozen=True)
class InitialLora:
    """A LoRA file matched with the model that it will be trained on."""

    file: LoraFile
    config: AdapterConfig
    """With algorithm, rank and alpha of the file where the settings ask for that."""
    matched: Matched


def match_initial_lora(denoiser: ComfyDenoiser, config: AdapterConfig) -> InitialLora:
    """Find the layers of `config.start_from` in the model.

    Raises UserError when the file is missing, damaged, or made for another kind of model.
    """
    file = read_lora(lora_file_path(config.start_from))
    matched = match_layers(file, denoiser.specs, denoiser.family)
    if config.start_size == "file":
        config = config_from_file(matched, denoiser.specs, config)
    return InitialLora(file, config, matched)


def store_lora_model(lora: Any) -> str:
    """Write a LORA_MODEL of the graph into output/graft/starts; return the name for `start_from`.

    The name is its content's digest, so the same LORA_MODEL starts the same run. Raises UserError for what is
    no LORA_MODEL.
    """
    is_lora = isinstance(lora, Mapping) and all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in lora.items()
    )
    if not is_lora or not lora:
        raise UserError(
            "lora_model: this is no LORA_MODEL; connect what Train LoRA or Train Steps gives out."
        )
    tensors = {key: tensor.detach().to("cpu").contiguous().clone() for key, tensor in lora.items()}
    content = digest(sorted((key, tensor_digest(tensor).hex()) for key, tensor in tensors.items()))
    path = given_lora_path(content)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, {})
    return GIVEN + content


def save_initial_state(
    denoiser: ComfyDenoiser, config: AdapterConfig, seed: int
) -> tuple[StateHandle | None, list[str]]:
    """Save step 0 of a run that starts from `config.start_from` in output/graft/starts; return it, and lines
    that list which keys of the file are not trained. Returns None where the settings name no file.

    Raises UserError when the file does not go with the settings, saying what to set.
    """
    if not config.start_from:
        return None, []
    initial = match_initial_lora(denoiser, config)
    specs, family, config = denoiser.specs, denoiser.family, initial.config
    with ExitStack() as stack:
        chosen = {path: specs[path] for path in {*select(specs, family, config), *initial.matched.layers}}
        layers = None
        if needs_base(build_adapters(chosen, config)):
            layers = stack.enter_context(denoiser.hold(torch.float32, UNPLACED)).layers
        weights = build_initial_weights(initial.matched, specs, family, config, seed=seed, layers=layers)
    state = TrainState(0, config, denoiser.fingerprint, weights, family=family.name)
    key = digest(config, denoiser.fingerprint, digest_of_layers(initial.file), seed)
    handle = save_state(state, own_folder(graft_folder() / "starts" / key))
    return handle, untrained_lines(initial)


def summary(denoiser: ComfyDenoiser, config: AdapterConfig) -> str:
    """Return what will be trained, for people: layers, parameters, and keys of a LoRA file left out."""
    chosen, lines = select(denoiser.specs, denoiser.family, config), []
    if config.start_from:
        initial = match_initial_lora(denoiser, config)
        config, matched = initial.config, initial.matched.layers
        chosen = select(denoiser.specs, denoiser.family, config)
        fresh = len(chosen.keys() - matched.keys())
        chosen |= {path: denoiser.specs[path] for path in matched}
        alpha = method_of(config).effective_alpha(config)
        lines.append(f"{len(matched)} layers start from {config.start_from}, {fresh} fresh")
        lines.append(f"{config.algorithm}, rank {config.rank}, alpha {alpha:g}")
        lines += untrained_lines(initial)
    if not config.text_encoder:  # whose layers are not known here
        lines += ineffective_patterns(denoiser.specs, denoiser.family, config)
    with torch.device("meta"):
        adapters = build_adapters(chosen, config)
    count = sum(p.numel() for a in adapters.values() for p in a.parameters() if p.requires_grad)
    head = f"{denoiser.family.name}: {len(chosen)} layers, {count / 1e6:.2f} M trained parameters"
    return "\n".join([head, *lines])


def untrained_lines(initial: InitialLora) -> list[str]:
    """Return lines that list the file's keys that are left out, by reason; none where all are trained."""
    lines = left_out_lines(initial.matched.left_out)
    return [f"{initial.file.name}: {lines[0]}", *lines[1:]] if lines else []
