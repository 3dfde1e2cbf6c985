"""The metadata of a LoRA file: sd-scripts' `ss_*` keys, `modelspec.*`, and ComfyUI's own.

`run_metadata` is written down when training starts and travels with the state; `lora_metadata` adds what is
known when the file is saved. Values are strings, spelled as kohya's sd-scripts spells them
(library/train_util.py, networks/lora*.py; modelspec: Stability-AI/ModelSpec 1.0.1).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import save
from torch import Tensor

from ...adapters.build import method_of
from ...config import OptimizerConfig, TrainConfig, digest, to_dict
from ...data.batch import EncodedDataset
from ...family import Family
from ...model import Sampling
from ...objective.sigmas import is_flow
from ...state import TrainState
from ..input_file import parse_json
from ..text import readable

COVER_SIDE = 512
"""Longest side of the cover image in pixels: readers take headers of up to 8 MB."""


def run_metadata(
    config: TrainConfig, dataset: EncodedDataset, family: Family, sampling: Sampling, *, name: str
) -> dict[str, str]:
    """Return what the file says about the run: settings, noise and data."""
    optimizer, goal, adapter = config.optimizer, config.objective, config.adapter
    steps = dataset.steps_per_epoch(config.batch_size)
    prediction = "v" if _is_v(sampling) else family.prediction
    values: dict[str, Any] = {
        "ss_output_name": name,
        "ss_session_id": int(digest(config, name)[:8], 16),
        "ss_seed": config.seed,
        "ss_learning_rate": optimizer.lr,
        "ss_unet_lr": optimizer.lr,
        "ss_text_encoder_lr": optimizer.lr * adapter.text_encoder or None,
        "ss_optimizer": _optimizer_line(optimizer),
        "ss_lr_scheduler": config.schedule.name,
        "ss_lr_warmup_steps": config.schedule.warmup_steps,
        "ss_max_grad_norm": optimizer.max_grad_norm,
        "ss_gradient_checkpointing": config.memory.checkpointing != "none",
        "ss_gradient_accumulation_steps": config.gradient_accumulation,
        "ss_batch_size_per_device": config.batch_size,
        "ss_total_batch_size": config.batch_size * config.gradient_accumulation,
        "ss_num_batches_per_epoch": steps,
        "ss_mixed_precision": {"fp32": "no"}.get(config.memory.dtype, config.memory.dtype),
        "ss_network_dropout": adapter.dropout or None,
        "ss_scale_weight_norms": adapter.max_norm or None,
        "ss_loss_type": {"mse": "l2"}.get(goal.loss, goal.loss),
        "ss_huber_c": goal.huber_delta if "huber" in goal.loss else None,
        "ss_min_snr_gamma": goal.min_snr_gamma if goal.weighting == "min-snr" else None,
        "ss_debiased_estimation": goal.weighting == "debiased",
        "ss_noise_offset": goal.noise_offset or None,
        "ss_multires_noise_discount": goal.pyramid_noise or None,
        "ss_ip_noise_gamma": goal.input_perturbation or None,
        "ss_zero_terminal_snr": not is_flow(sampling) and float(sampling.sigma_max) > 1000,
        "ss_v2": family.is_v2,
        "ss_validate_every_n_steps": config.validation.every or None,
        "ss_training_comment": "trained with Graft in ComfyUI",
        **({"modelspec.prediction_type": prediction} if prediction else {}),
        "graft_config": to_dict(config),
    }
    if family.sigmas != "schedule":
        sigmas = family.sigmas if goal.sigmas == "auto" else goal.sigmas
        values |= {
            "ss_timestep_sampling": sigmas,
            "ss_weighting_scheme": goal.weighting,
            "ss_logit_mean": goal.mean,
            "ss_logit_std": goal.std,
            "ss_mode_scale": goal.mode_scale,
            "ss_discrete_flow_shift": goal.shift or family.shift,
        }
    if family.guidance is not None:
        values["ss_guidance_scale"] = goal.guidance if goal.guidance >= 0 else family.guidance
    if (goal.min_noise, goal.max_noise) != (0.0, 1.0):
        values["modelspec.timestep_range"] = f"{goal.min_noise * 1000:.0f},{goal.max_noise * 1000:.0f}"
    return _strings({**values, **_dataset_values(dataset)})


def lora_metadata(
    state: TrainState,
    family: Family,
    *,
    title: str,
    trigger: str = "",
    cover: Tensor | None = None,
    graph: Mapping[str, Any] = MappingProxyType({}),
    finished: float = 0.0,
    seconds: float = 0.0,
) -> dict[str, str]:
    """Return the metadata of a LoRA file of `state`.

    `trigger` replaces the dataset's; `cover` is an image (H, W, 3) float32 in 0..1; `graph` is written as it
    is: "workflow" or "prompt", ComfyUI's names for the editor and API form, or "graft_job"; `finished` is the
    time of the state in seconds since 1970 (0: unknown), after `seconds` of training.
    """
    adapter, rank = state.adapter, state.adapter.rank
    triggers = [word.strip() for word in (trigger or state.notes.get(TRIGGER, "")).split(",") if word.strip()]
    method = method_of(adapter)
    plain = method.is_plain and not adapter.algorithms
    images = state.notes.get("ss_num_train_images", "")
    values: dict[str, Any] = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{family.architecture}/lora",
        "modelspec.implementation": family.implementation,
        "modelspec.title": title,
        "modelspec.description": f"{adapter.algorithm} for {family.name}, rank {rank}, {state.step} steps"
        + (f" on {images} images" if images else ""),
        "ss_base_model_version": family.base_model,
        "ss_network_module": family.network_module if plain else "lycoris.kohya",
        "ss_network_dim": rank,
        "ss_network_alpha": method.effective_alpha(adapter),
        "ss_network_args": {} if plain else {"algo": adapter.algorithm},
        "ss_steps": state.step,
        "ss_max_train_steps": state.step,
        "graft_base": state.base,
        "graft_adapter": to_dict(adapter),
    }
    per_epoch = int(state.notes.get("ss_num_batches_per_epoch", 0))
    if per_epoch:
        batches = state.step * int(state.notes.get("ss_gradient_accumulation_steps", 1))
        values["ss_epoch"] = values["ss_num_epochs"] = -(-batches // per_epoch)
    if finished:
        moment = datetime.fromtimestamp(finished, tz=timezone.utc)
        values["modelspec.date"] = moment.isoformat(timespec="seconds")
        values["ss_training_finished_at"] = finished
        values["ss_training_started_at"] = finished - seconds
    if triggers:
        values |= {
            TRIGGER: ", ".join(triggers),
            "modelspec.usage_hint": f"Write {', '.join(triggers)} in the prompt.",
            "trained_words": triggers,
            "ss_tag_frequency": _tag_frequency(state.notes, triggers),
        }
    if cover is not None:
        thumbnail = cover_image(cover)
        values["ssmd_cover_images"] = [thumbnail]
        values["modelspec.thumbnail"] = f"data:image/jpeg;base64,{thumbnail}"
    return {**state.notes, **_strings({**values, **graph})}


TRIGGER = "modelspec.trigger_phrase"


def cover_image(image: Tensor) -> str:
    """Return (H, W, 3) float32 in 0..1 as a small JPEG in base64."""
    thumbnail = Image.fromarray((image.clamp(0, 1) * 255).round().to("cpu").numpy().astype(np.uint8)[..., :3])
    thumbnail.thumbnail((COVER_SIDE, COVER_SIDE))
    buffer = io.BytesIO()
    thumbnail.save(buffer, "JPEG", quality=85)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def with_hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata with the digests by which AUTOMATIC1111, Civitai and ComfyUI recognize a file.

    As in sd-scripts' `precalculate_safetensors_hashes`, the file is digested with its `ss_*` metadata only.
    """
    file = save(
        dict(tensors), {key: readable(value) for key, value in metadata.items() if key.startswith("ss_")}
    )
    start = int.from_bytes(file[:8], "little") + 8
    whole = hashlib.sha256(memoryview(file)[start:]).hexdigest()
    legacy = hashlib.sha256(file[0x100000:0x110000]).hexdigest()[:8]
    return {
        **metadata,
        WEIGHTS: whole,
        "sshs_legacy_hash": legacy,
        "modelspec.hash_sha256": f"0x{whole}",
    }


WEIGHTS = "sshs_model_hash"
"""Key of the weights' digest."""


def _dataset_values(dataset: EncodedDataset) -> dict[str, Any]:
    index, entries, sources = dataset.index, dataset.entries, dataset.images.sources
    samples = np.unique(index.sample[entries])
    configs = [source.config for source in sources]
    dirs = {
        source.title: {
            "n_repeats": int(index.repeats[entries][chosen].max()),
            "img_count": len(np.unique(index.sample[entries][chosen])),
        }
        for place, source in enumerate(sources)
        if (chosen := index.source[index.sample[entries]] == place).any()
    }
    triggers = dict.fromkeys(config.caption.trigger for config in configs if config.caption.trigger)
    return {
        "ss_num_train_images": len(samples),
        "ss_num_reg_images": int(sum(configs[i].regularisation for i in index.source[samples].tolist())),
        "ss_dataset_dirs": dirs,
        **(_size_values(dataset) if dataset.has_pixels else {}),
        "ss_cache_latents": True,
        "ss_flip_aug": any(config.augment.flip for config in configs),
        "ss_color_aug": any(config.augment.jitters for config in configs),
        "ss_random_crop": any(config.augment.crop != "center" for config in configs),
        "ss_shuffle_caption": any(config.caption.shuffle for config in configs),
        "ss_keep_tokens": max(config.caption.keep_tokens for config in configs),
        "ss_caption_dropout_rate": max(config.caption.dropout for config in configs),
        "ss_caption_tag_dropout_rate": max(config.caption.tag_dropout for config in configs),
        **({TRIGGER: ", ".join(triggers)} if triggers else {}),
        **({"graft_slider": to_dict(dataset.images.words)} if dataset.images.words else {}),
    }


def _size_values(dataset: EncodedDataset) -> dict[str, Any]:
    """Return what is said of the sizes of images and clips in pixels; nothing of sounds."""
    index, entries = dataset.index, dataset.entries
    configs = [source.config for source in dataset.images.sources]
    buckets = [
        (size, int(dataset.order.visits[place]))
        for place, size in enumerate(index.buckets)
        if len(size) > 1 and (index.bucket[entries] == place).any()
    ]
    if not buckets:
        return {}
    counts = {str(i): {"resolution": size, "count": count} for i, (size, count) in enumerate(buckets)}
    resolution = max(max(config.bucket.resolutions) for config in configs)
    return {
        "ss_resolution": f"({resolution}, {resolution})",
        "modelspec.resolution": f"{resolution}x{resolution}",
        "ss_enable_bucket": not configs[0].bucket.square,
        "ss_bucket_no_upscale": not configs[0].bucket.upscale,
        "ss_bucket_info": {"buckets": counts},
        "ss_min_bucket_reso": min(min(size[:2]) for size, _ in buckets),
        "ss_max_bucket_reso": max(max(size[:2]) for size, _ in buckets),
    }


def _tag_frequency(notes: Mapping[str, str], triggers: list[str]) -> dict[str, dict[str, int]]:
    """Return the trigger words alone: readers list every tag that they find here as a trigger word."""
    try:
        folders = parse_json(notes.get("ss_dataset_dirs", "{}"))
        counts = {title: folder["img_count"] for title, folder in folders.items()}
    except (ValueError, LookupError, TypeError, AttributeError):  # another program's, which stay as they are
        counts = {}
    return {title: dict.fromkeys(triggers, count) for title, count in (counts or {"images": 1}).items()}


def _optimizer_line(config: OptimizerConfig) -> str:
    if config.package_class:
        return f"{config.package_class}({config.arguments})"
    return f"{config.name}(weight_decay={config.weight_decay},betas={config.betas})"


def _is_v(sampling: Sampling) -> bool:
    return any(base.__name__ == "V_PREDICTION" for base in type(sampling).__mro__)


def _strings(values: Mapping[str, Any]) -> dict[str, str]:
    return {k: json.dumps(v) if isinstance(v, dict | list) else str(v) for k, v in values.items()}
