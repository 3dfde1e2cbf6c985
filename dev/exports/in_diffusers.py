"""The diffusers half of `dev/check_exports.py`: its own models of the tiny sizes, its own loader.

What a native layer is called there, and which of its rows, is taken from diffusers' converters of whole
checkpoints, so that nothing here repeats Graft's tables. They and the converters of LoRA files hold the
sizes of the real Flux, Chroma and Lumina 2, which are replaced by the tiny ones (`resized`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType
from typing import Any

import diffusers
import torch
import transformers
from diffusers.loaders import lora_conversion_utils, single_file_model
from diffusers.models.transformers.transformer_z_image import TimestepEmbedder
from torch import Tensor

from ...training.family import TEXT, is_text
from .files import Loaded, Written, base_of, compare, differences

version = diffusers.__version__
ENCODERS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}


@dataclass(frozen=True)
class Twin:
    """diffusers' side of a family."""

    pipeline: str
    model: str
    config: Mapping[str, Any]
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Those that diffusers' converters hold -> those of the tiny model."""
    converters: tuple[str, ...] = ()
    """Functions of lora_conversion_utils that hold them."""
    replaced: Mapping[str, Callable[[], torch.nn.Module]] = field(default_factory=dict)
    """Parts of the network whose size diffusers holds, in that of the tiny model."""
    encoders: Mapping[str, int] = field(default_factory=dict)
    """Text encoders by the pipeline's name -> their width."""


def _unet(attention: int, **changes: Any) -> dict[str, Any]:
    return {
        "sample_size": 8,
        "layers_per_block": 2,
        "cross_attention_dim": 64,
        "attention_head_dim": attention,
        **changes,
    }


_FLUX = {
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "axes_dims_rope": (8, 12, 12),
}
_FLUX2 = {
    "in_channels": 128,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 32,
    "num_attention_heads": 5,
    "joint_attention_dim": 64,
    "mlp_ratio": 2.0,
    "axes_dims_rope": (8, 8, 8, 8),
}
_SD3 = {
    "sample_size": 16,
    "num_layers": 2,
    "attention_head_dim": 64,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "caption_projection_dim": 128,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 8,
}
_FLUX_SIZES = {3072: 64, 12288: 256}

TWINS = {
    "SDXL": Twin(
        "StableDiffusionXLPipeline",
        "UNet2DConditionModel",
        _unet(
            0,
            attention_head_dim=(1, 1, 2),
            block_out_channels=(32, 32, 64),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 1, 2),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ),
        encoders={"text_encoder": 24, "text_encoder_2": 40},
    ),
    "SD1.5": Twin(
        "StableDiffusionPipeline",
        "UNet2DConditionModel",
        _unet(4, block_out_channels=(32, 32, 64, 64)),
        encoders={"text_encoder": 64},
    ),
    "SD3": Twin(
        "StableDiffusion3Pipeline",
        "SD3Transformer2DModel",
        _SD3,
        encoders={"text_encoder": 24, "text_encoder_2": 40},
    ),
    "SD3.5M": Twin(
        "StableDiffusion3Pipeline",
        "SD3Transformer2DModel",
        {**_SD3, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
        encoders={"text_encoder": 24, "text_encoder_2": 40},
    ),
    "Flux": Twin(
        "FluxPipeline",
        "FluxTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": 32, "guidance_embeds": True},
        _FLUX_SIZES,
        ("_convert_kohya_flux_lora_to_diffusers",),
    ),
    "Qwen-Image": Twin(
        "QwenImagePipeline",
        "QwenImageTransformer2DModel",
        {
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 64,
            "axes_dims_rope": (8, 12, 12),
        },
    ),
    "Z-Image": Twin(
        "ZImagePipeline",
        "ZImageTransformer2DModel",
        {
            "dim": 384,
            "n_layers": 1,
            "n_refiner_layers": 1,
            "n_heads": 3,
            "n_kv_heads": 3,
            "cap_feat_dim": 64,
        },
        replaced={"t_embedder": lambda: TimestepEmbedder(256, mid_size=384)},
    ),
    "Lumina2": Twin(
        "Lumina2Pipeline",
        "Lumina2Transformer2DModel",
        {
            "hidden_size": 192,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 32,
            "ffn_dim_multiplier": 0.25,
            "axes_dim_rope": (16, 16, 16),
            "cap_feat_dim": 64,
        },
        {2304: 192, 768: 96},
        ("_convert_non_diffusers_lumina2_lora_to_diffusers",),
    ),
    "Flux.2": Twin("Flux2Pipeline", "Flux2Transformer2DModel", _FLUX2),
    "Klein": Twin("Flux2KleinPipeline", "Flux2Transformer2DModel", {**_FLUX2, "guidance_embeds": False}),
    "Chroma": Twin(
        "ChromaPipeline",
        "ChromaTransformer2DModel",
        {
            **_FLUX,
            "approximator_num_channels": 64,
            "approximator_hidden_dim": 64,
            "approximator_layers": 2,
        },
        _FLUX_SIZES,
        ("_convert_kohya_flux_lora_to_diffusers",),
    ),
    "HiDream": Twin(
        "HiDreamImagePipeline",
        "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "caption_channels": [64, 64],
            "text_emb_dim": 32,
            "num_routed_experts": 2,
            "num_activated_experts": 1,
            "axes_dims_rope": (16, 8, 8),
            "max_resolution": (16, 16),
            "llama_layers": [0, 1],
        },
    ),
}


def read(out: Path, files: Iterable[Written], reader: str) -> Iterator[Loaded]:
    """Load each file into a pipeline of the family; its layers' differences against the trained ones."""
    for family, group in groupby(files, lambda file: file.family):
        twin, base = TWINS[family], base_of(out, family)
        require_twin(twin, base)
        for _, cased in groupby(group, lambda file: file.case):
            of_case = list(cased)
            trained = renamed(twin, base, differences(out, of_case[0], base))
            for file in of_case:
                yield load(twin, out, file, reader, trained)
        print(f"{family}: read", flush=True)


def load(twin: Twin, out: Path, file: Written, reader: str, trained: Mapping[str, Tensor]) -> Loaded:
    """Load one file as `pipeline.load_lora_weights` does."""
    path = file.path(out)
    with captured_warnings():  # of parts that a pipeline for images should have
        pipeline = pipeline_of(twin)
    with captured_warnings() as warnings, resized(twin):
        try:
            pipeline.load_lora_weights(str(path.parent), weight_name=path.name)
        except Exception as error:  # noqa: BLE001 - whatever a library says of a file is the finding
            message = f"{type(error).__name__}: {error}"
            return Loaded(file, reader, len(trained), lost=sorted(trained), error=message)
    weights = {}
    for name, part in parts_of(pipeline, twin).items():
        for layer, module in part.float().named_modules():
            if hasattr(module, "get_delta_weight"):
                [adapter] = module.active_adapters
                weights[f"{name}.{layer}.weight"] = module.get_delta_weight(adapter).detach()
    return compare(Loaded(file, reader, warnings=warnings), trained, weights)


def pipeline_of(twin: Twin) -> Any:
    """Return a pipeline of a model of the twin's sizes, its text encoders, and nothing else."""
    parts: dict[str, Any] = dict(network_of(twin))
    for name, width in twin.encoders.items():
        config = transformers.CLIPTextConfig(
            hidden_size=width,
            projection_dim=width,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
        )
        parts[name] = transformers.CLIPTextModelWithProjection(config)
    pipeline = getattr(diffusers, twin.pipeline)
    required = [n for n, p in inspect.signature(pipeline).parameters.items() if p.default is p.empty]
    return pipeline(**{**dict.fromkeys(required), **parts})


def network_of(twin: Twin) -> dict[str, Any]:
    """Return diffusers' network of the twin's sizes, under the pipeline's name for it."""
    network = getattr(diffusers, twin.model)(**twin.config)
    for name, part in twin.replaced.items():
        setattr(network, name, part())
    return {"unet" if twin.model.startswith("UNet") else "transformer": network}


def require_twin(twin: Twin, base: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the base, converted as a checkpoint, has the names and shapes of the twin."""
    [(name, network)] = network_of(twin).items()
    own = {f"{name}.{key}": tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    converted = {key: tuple(t.shape) for key, t in converted_checkpoint(twin, base).items()}
    if differing := sorted(own.items() ^ converted.items()):
        raise ValueError(f"{twin.model}: {len(differing)} weights differ: {differing[:6]}")


def converted_checkpoint(twin: Twin, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a whole network's weights as diffusers converts them: "<network>.<path>" -> tensor."""
    [(name, network)] = network_of(twin).items()
    convert = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[twin.model]["checkpoint_mapping_fn"]
    own = {path: tensor for path, tensor in weights.items() if not is_text(path)}
    if name == "unet":
        own = {f"model.diffusion_model.{path}": tensor for path, tensor in own.items()}
    code = convert.__code__
    convert.__code__ = with_sizes(code, twin.sizes)
    try:
        converted = convert(own, config=network.config)
    finally:
        convert.__code__ = code
    return {f"{name}.{path}": tensor for path, tensor in converted.items()}


def renamed(twin: Twin, base: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return differences of weights under diffusers' names: those of a checkpoint that is 0 elsewhere."""
    whole = {path: trained.get(path, torch.zeros_like(tensor)) for path, tensor in base.items()}
    converted = converted_checkpoint(twin, whole)
    for path, tensor in trained.items():
        if is_text(path):
            encoder, _, inner = path.removeprefix(TEXT).partition(".transformer.")
            converted[f"{ENCODERS[encoder]}.{inner}"] = tensor
    return {path: tensor for path, tensor in converted.items() if tensor.any()}


def parts_of(pipeline: Any, twin: Twin) -> dict[str, torch.nn.Module]:
    """Return the pipeline's modules that a LoRA may change, by its names for them."""
    return {name: getattr(pipeline, name) for name in (*network_of(twin), *twin.encoders)}


@contextmanager
def resized(twin: Twin) -> Iterator[None]:
    """Let the converters of LoRA files hold the tiny model's sizes in the context."""
    functions: list[Callable[..., Any]] = [getattr(lora_conversion_utils, name) for name in twin.converters]
    before = [function.__code__ for function in functions]
    for function in functions:
        function.__code__ = with_sizes(function.__code__, twin.sizes)
    try:
        yield
    finally:
        for function, code in zip(functions, before):
            function.__code__ = code


def with_sizes(constant: Any, sizes: Mapping[int, int]) -> Any:
    """Return a code object, or a constant of one, with other numbers in it."""
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=tuple(with_sizes(c, sizes) for c in constant.co_consts))
    if isinstance(constant, tuple):
        return tuple(with_sizes(c, sizes) for c in constant)
    return sizes.get(constant, constant) if type(constant) is int else constant


@contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """Yield a list that gets what diffusers warns of, but for text encoders that a file does not change."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: "safe to ignore" not in record.getMessage())
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("diffusers")
    before, logger.handlers = logger.handlers, [handler]
    try:
        yield messages
    finally:
        logger.handlers = before
