"""What Build LoRA's settings give on a model: layers, parameters, and the state that a LoRA file starts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ...adapters.build import build_adapters, idle_patterns, needs_base
from ...adapters.select import select
from ...config import AdapterConfig, digest
from ...files.lora.initial_weights import config_from_file, match_layers, start_from_file
from ...files.lora.match import Matched
from ...files.lora.read import LoraFile, read_lora
from ...memory.weight_store import UNPLACED
from ...run.saved_state import StateHandle, save_state
from ...state import TrainState
from ...tools.files import left_out_lines
from ...tools.merge import digest_of_layers
from ..model.denoiser import ComfyDenoiser
from .paths import graft_folder, lora_file_path, own_folder


@dataclass(frozen=True)
class Start:
    """A LoRA file beside the model that it is to be trained on."""

    file: LoraFile
    config: AdapterConfig
    """Algorithm, rank and alpha as in the file where the settings ask for it."""
    matched: Matched


def start_of(denoiser: ComfyDenoiser, config: AdapterConfig) -> Start:
    """Find the layers of `config.start_from` in the model.

    Raises UserError when the file is not there, not sound, or made for another kind of model.
    """
    file = read_lora(lora_file_path(config.start_from))
    matched = match_layers(file, denoiser.specs, denoiser.family)
    if config.start_size == "file":
        config = config_from_file(matched, denoiser.specs, config)
    return Start(file, config, matched)


def first_state(
    denoiser: ComfyDenoiser, config: AdapterConfig, seed: int
) -> tuple[StateHandle | None, list[str]]:
    """Return step 0 of a run that starts from `config.start_from`, kept in output/graft/starts, and lines
    that list what of the file is not trained; None where the settings name no file.

    Raises UserError when the file cannot be brought to the settings, and says what to set.
    """
    if not config.start_from:
        return None, []
    start = start_of(denoiser, config)
    specs, family, config = denoiser.specs, denoiser.family, start.config
    with ExitStack() as stack:
        chosen = {path: specs[path] for path in {*select(specs, family, config), *start.matched.layers}}
        layers = None
        if needs_base(build_adapters(chosen, config)):
            layers = stack.enter_context(denoiser.hold(torch.float32, UNPLACED)).layers
        weights = start_from_file(start.matched, specs, family, config, seed=seed, layers=layers)
    state = TrainState(0, config, denoiser.fingerprint, weights, family=family.name)
    key = digest(config, denoiser.fingerprint, digest_of_layers(start.file), seed)
    handle = save_state(state, own_folder(graft_folder() / "starts" / key))
    return handle, not_trained(start)


def summary(denoiser: ComfyDenoiser, config: AdapterConfig) -> str:
    """Return what will be trained, for people: layers, parameters, and what of a start file is left out."""
    chosen, lines = select(denoiser.specs, denoiser.family, config), []
    if config.start_from:
        start = start_of(denoiser, config)
        config = start.config
        chosen = select(denoiser.specs, denoiser.family, config)
        fresh = len(chosen.keys() - start.matched.layers.keys())
        chosen |= {path: denoiser.specs[path] for path in start.matched.layers}
        lines.append(f"{len(start.matched.layers)} layers start from {config.start_from}, {fresh} fresh")
        lines.append(f"{config.algorithm}, rank {config.rank}, alpha {config.effective_alpha:g}")
        lines += not_trained(start)
    if not config.text_encoder:  # whose layers are not known here
        lines += idle_patterns(denoiser.specs, denoiser.family, config)
    with torch.device("meta"):
        adapters = build_adapters(chosen, config)
    count = sum(p.numel() for a in adapters.values() for p in a.parameters() if p.requires_grad)
    head = f"{denoiser.family.name}: {len(chosen)} layers, {count / 1e6:.2f} M trained parameters"
    return "\n".join([head, *lines])


def not_trained(start: Start) -> list[str]:
    """Return lines that list the keys of the file that are left out, and why; none where all are trained."""
    lines = left_out_lines(start.matched.left_out)
    return [f"{start.file.name}: {lines[0]}", *lines[1:]] if lines else []
