"""The ComfyUI half of `dev/check_exports.py`: tiny models of its classes, their files, and its own loader."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.sd
import comfy.utils
import torch
from safetensors.torch import save_file

from ...tests.support.tiny_clips import clip_of
from ...tests.support.tiny_models import SIBLINGS, TINY, Tiny
from ...training import rng
from ...training.adapters.build import named_parameters, restore_adapters
from ...training.comfy.model.denoiser import NETWORK, ComfyDenoiser
from ...training.config import AdapterConfig, TrainConfig
from ...training.family import TEXT, is_text
from ...training.files.lora.diffusers import FILE_FORMATS
from ...training.loop import initial_state
from ...training.run.saved_state import save_state
from ...training.state import TrainState
from .files import DTYPES, Loaded, Written, base_of, chosen, compare, differences


def _sized(name: str, **changes: Any) -> Tiny:
    tiny = {**TINY, **SIBLINGS}[name]
    return replace(tiny, unet={**tiny.unet, **changes})


_TWO_BLOCKS = {"num_res_blocks": [2, 2, 2], "channel_mult": [1, 1, 2]}
FAMILIES = {
    "SDXL": _sized(
        "sdxl",
        **_TWO_BLOCKS,
        transformer_depth=[0, 0, 1, 1, 2, 2],
        transformer_depth_output=[0, 0, 0, 1, 1, 1, 2, 2, 2],
        transformer_depth_middle=2,
    ),
    "SD1.5": _sized(
        "sd15",
        num_res_blocks=[2, 2, 2, 2],
        channel_mult=[1, 1, 2, 2],
        transformer_depth=[1, 1, 1, 1, 1, 1, 0, 0],
        transformer_depth_output=[1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    ),
    "SD3": TINY["sd3"],
    "SD3.5M": TINY["sd35m"],
    "Flux": _sized("flux", mlp_ratio=4.0),
    "Qwen-Image": TINY["qwen"],
    "Z-Image": _sized(
        "zimage", dim=384, n_heads=3, n_kv_heads=3, ffn_dim_multiplier=8 / 3, pad_tokens_multiple=32
    ),
    "Lumina2": _sized("lumina2", dim=192, n_heads=4),
    "Flux.2": TINY["flux2"],
    "Klein": SIBLINGS["klein"],
    "Chroma": _sized("chroma", mlp_ratio=4.0),
    "HiDream": TINY["hidream"],
}
"""With the numbers of blocks, and the ratios of widths, that diffusers insists on. Lumina 2 keeps fewer heads
for keys and values than for queries."""

CLIPS = {"SDXL": "sdxl", "SD1.5": "sd15", "SD3": "sd35m", "SD3.5M": "sd35m"}
"""Families whose text encoders can be trained -> the tiny CLIP of the same ones."""

CASES = {
    "LoRA attn": AdapterConfig(targets="attn"),
    "LoRA attn-mlp": AdapterConfig(targets="attn-mlp"),
    "DoRA": AdapterConfig(algorithm="dora"),
    "DoRA all": AdapterConfig(algorithm="dora", targets="all"),
    "LoHa": AdapterConfig(algorithm="loha"),
    "LoHa-Tucker": AdapterConfig(algorithm="loha", tucker=True, targets="all"),
    "LoKr": AdapterConfig(algorithm="lokr", targets="all"),
    "LoKr full": AdapterConfig(algorithm="lokr", full_matrix=True),
    "LoKr both": AdapterConfig(algorithm="lokr", rank=1, alpha=0.5, decompose_both=True, factor=4),
    "LoCon": AdapterConfig(targets="all"),
    "Tucker": AdapterConfig(tucker=True, targets="all"),
    "rsLoRA": AdapterConfig(rslora=True),
    "PiSSA": AdapterConfig(init="pissa"),
    "everything": AdapterConfig(targets="everything"),
    "text LoRA": AdapterConfig(text_encoder=1.0),
    "text DoRA": AdapterConfig(algorithm="dora", text_encoder=1.0),
    "text LoKr": AdapterConfig(algorithm="lokr", text_encoder=1.0),
}
RANK, ALPHA = 4, 2.0
"""Not equal, so that a lost alpha shows."""


def write(out: Path, only: Iterable[str]) -> Iterator[Written]:
    """Write the models, states and files that `only` names."""
    for family in FAMILIES:
        cases = [c for c in CASES if chosen(Written(family, c, "", ""), only) and has_case(family, c)]
        if not cases:
            continue
        patcher, clip = model_of(family)
        (out / family).mkdir(parents=True, exist_ok=True)
        save_file(weights_of(patcher, clip), out / family / "base.safetensors")
        for case in cases:
            denoiser = ComfyDenoiser(patcher, clip if CASES[case].text_encoder else None)
            state = random_state(denoiser, settings(case))
            save_state(state, out / family / case)
            for name, tensors_of in FILE_FORMATS.items():
                for dtype, torch_dtype in DTYPES.items():
                    file = Written(family, case, name, dtype)
                    try:
                        tensors = tensors_of(state, denoiser.family, torch_dtype)
                    except ValueError as refusal:
                        file = replace(file, refused=str(refusal))
                    else:
                        save_file(tensors, file.path(out))
                    yield file
        print(f"{family}: {len(cases)} cases", flush=True)


def read(out: Path, files: Iterable[Written], reader: str) -> Iterator[Loaded]:
    """Load each file with the stock loader; the patches' differences against the trained ones."""
    for family, group in groupby(files, lambda file: file.family):
        patcher, clip = model_of(family)
        base = base_of(out, family)
        set_weights(patcher, clip, base)
        for case, cased in groupby(group, lambda file: file.case):
            of_case = list(cased)
            trained = differences(out, of_case[0], base)
            encoders = clip if CASES[case].text_encoder else None
            for file in of_case:
                with captured_warnings() as warnings:
                    tensors = comfy.utils.load_torch_file(str(file.path(out)), safe_load=True)
                    model, text = comfy.sd.load_lora_for_models(patcher, encoders, tensors, 1.0, 1.0)
                    weights = {k.removeprefix(f"{NETWORK}."): v for k, v in patched(model).items()}
                    weights |= {TEXT + k: v for k, v in patched(text and text.patcher).items()}
                yield compare(Loaded(file, reader, warnings=warnings), trained, weights)
        print(f"{family}: read", flush=True)


def has_case(family: str, case: str) -> bool:
    """Return whether there is a text encoder to train where the case trains one."""
    return family in CLIPS or not CASES[case].text_encoder


def settings(case: str) -> AdapterConfig:
    """Return the case's settings, at a rank and an alpha of the sweep where it has none of its own."""
    config = CASES[case]
    return config if config.alpha else replace(config, rank=RANK, alpha=ALPHA)


def model_of(family: str) -> tuple[Any, Any]:
    """Return a tiny MODEL and, for families whose text encoders are trained, its CLIP."""
    return FAMILIES[family](), clip_of(CLIPS[family]) if family in CLIPS else None


def weights_of(patcher: Any, clip: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of the network and the text encoders by the names that checkpoints have for them."""
    network = patcher.get_model_object(NETWORK).state_dict()
    scales = r"(query_norm|key_norm|distilled_guidance_layer\.norms\.\d+)\.weight$"
    weights = {re.sub(scales, r"\1.scale", name): tensor for name, tensor in network.items()}
    if clip is not None:
        weights |= {TEXT + name: tensor for name, tensor in clip.cond_stage_model.state_dict().items()}
    return {name: tensor.float().contiguous().clone() for name, tensor in weights.items()}


def set_weights(patcher: Any, clip: Any, base: dict[str, torch.Tensor]) -> None:
    """Give the models the weights that `write` saved. Raises ValueError where a layer has another name.

    Flux's norms, which newer versions name differently, are left as they are.
    """
    parts = {"": patcher.get_model_object(NETWORK)} | ({TEXT: clip.cond_stage_model} if clip else {})
    for prefix, module in parts.items():
        own = {n.removeprefix(prefix): t for n, t in base.items() if is_text(n) == bool(prefix)}
        differing = module.load_state_dict(own, strict=False)
        tensors = {**own, **module.state_dict()}
        names = (*differing.missing_keys, *differing.unexpected_keys)
        if layers := [name for name in names if tensors[name].ndim > 1]:
            raise ValueError(f"{layers[0]}: in one of the two ComfyUIs only; are the files of this checkout?")


def random_state(denoiser: ComfyDenoiser, config: AdapterConfig) -> TrainState:
    """Return a fresh state of the engine's with noise on all that would be trained."""
    state = initial_state(denoiser, TrainConfig(adapter=config))
    adapters = restore_adapters(denoiser.specs, config, state.weights, torch.device("cpu"))
    parameters = named_parameters(adapters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=rng.generator(1, name))
                parameter += 0.2 * noise
    return replace(state, weights={name: p.detach() for name, p in parameters.items()})


def patched(patcher: Any) -> dict[str, torch.Tensor]:
    """Return the difference that a patcher's patches make to each weight, by its key."""
    if patcher is None:
        return {}
    weights = patcher.model.state_dict()
    return {
        key: comfy.lora.calculate_weight(patches, weights[key].clone(), key) - weights[key]
        for key, patches in patcher.patches.items()
    }


@contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """Yield a list that gets what ComfyUI warns of, and let nothing of it be printed."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    before, root.handlers = root.handlers, [handler]
    try:
        yield messages
    finally:
        root.handlers = before
