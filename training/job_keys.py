"""What the keys of a job file mean: ROOT_KEYS, KEYS and DATASET_KEYS, each key with the input it sets.

A key is read into {"node.input": value}, where "node" is a name in NODES of `job_graph.py`, "run" for what
concerns the run as a whole, or "may" for what several keys decide together (`job.derive`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from .optimizer import OPTIMIZERS

Settings = dict[str, Any]
"""What keys set: "node.input" -> value."""
Convert = Callable[[Any, str], Any]
"""(value in the file, its key) -> value of an input; raises ValueError."""
Read = Callable[[Any, str], Settings]


def to(target: str, convert: Convert) -> Read:
    """Return the reading of a key that sets one input."""
    return lambda value, key: {target: convert(value, key)}


def only(allowed: Any, why: str) -> Read:
    """Return the reading of a key that can only have one value: what Graft does anyway."""

    def read(value: Any, key: str) -> Settings:
        if value != allowed:
            raise ValueError(f"{key}: {value!r} is not possible: {why}. Set it to {_yaml(allowed)}.")
        return {}

    return read


def refused(why: str) -> Read:
    """Return the reading of a key that other trainers have and Graft has not."""

    def read(value: Any, key: str) -> Settings:
        raise ValueError(f"{key}: not supported: {why}. Remove the key.")

    return read


def text(value: Any, key: str) -> str:
    """Return a string; a number that YAML took for one is what was written."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{key}: expected a text, found {value!r}.")
    return str(value)


def number(value: Any, key: str) -> float:
    """Return a number, also from 1e-4, which YAML 1.1 reads as a text."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key}: expected a number, found {value!r}.") from None


def whole(value: Any, key: str) -> int:
    """Return a whole number that is not negative."""
    found = number(value, key)
    if found != int(found) or found < 0:
        raise ValueError(f"{key}: expected a whole number, 0 or more; found {value!r}.")
    return int(found)


def flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key}: expected true or false, found {value!r}.")
    return value


def one_of(choices: Mapping[str, Any]) -> Convert:
    """Return the conversion of names: what the file says -> what the input is given."""

    def convert(value: Any, key: str) -> Any:
        name = text(value, key)
        if name not in choices:
            near = get_close_matches(name, choices, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{key}: {name!r} is not one of {', '.join(choices)}.{hint}")
        return choices[name]

    return convert


def either(yes: Any, no: Any) -> Convert:
    """Return the conversion of true and false."""
    return lambda value, key: yes if flag(value, key) else no


def lines(value: Any, key: str) -> str:
    """Return a list of texts (or one text) as one a line."""
    entries = value if isinstance(value, list) else [value]
    return "\n".join(" ".join(text(entry, key).split()) for entry in entries)


def sizes(value: Any, key: str) -> str:
    entries = value if isinstance(value, list) else [value]
    return ", ".join(str(whole(entry, key)) for entry in entries)


def containing(value: Any, key: str) -> str:
    """Return parts of layer names as patterns, one a line."""
    return "\n".join(f"*{line}*" for line in lines(value, key).splitlines())


def multiples(value: Any, key: str) -> str:
    """Return {part of a layer's name: multiple of the learning rate} as lines "*part* = multiple"."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: expected 'part of a layer name: multiple' below it, found {value!r}.")
    return "\n".join(f"*{part}* = {number(times, f'{key}.{part}'):g}" for part, times in value.items())


def network_type(value: Any, key: str) -> Settings:
    name = one_of(NETWORKS)(value, key)
    return {"lora.algorithm": name, **({"lora_settings.full_matrix": True} if value in FULL else {})}


def min_snr(value: Any, key: str) -> Settings:
    return {"objective.weighting": "min-snr", "objective.min_snr_gamma": number(value, key)}


def device(value: Any, key: str) -> str:
    name = text(value, key)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"{key}: {name!r} is no device; write cpu, or cuda:0 for the first graphics card.")
    return name


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


FULL = ("lokr_full_rank",)
NETWORKS = {"lora": "lora", "dora": "dora", "lokr": "lokr", "lokr_full_rank": "lokr", "loha": "loha"}
NUMBER_FORMATS = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32",
}  # fmt: skip
OPTIMIZER_NAMES = {
    **{name: name for name in OPTIMIZERS},
    **{name.replace("-", "_"): name for name in OPTIMIZERS},
    "prodigyopt": "prodigy",
    "adamw_schedulefree": "schedule-free-adamw",
    "radam_schedulefree": "schedule-free-radam",
    "stableadamw": "stable-adamw",
}
SCHEDULE_NAMES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_restarts": "restarts", "polynomial": "polynomial", "rex": "rex",
}  # fmt: skip
TIMESTEPS = {"sigmoid": "sigmoid", "linear": "uniform", "lognorm": "logit-normal", "mode": "mode"}
LOSS_NAMES = {"mse": "mse", "mae": "l1", "huber": "huber", "pseudo-huber": "pseudo-huber"}
SAMPLER_NAMES = {
    "flowmatch": "euler", "euler": "euler", "ddpm": "ddpm", "ddim": "ddim", "euler_a": "euler_ancestral",
    "dpmpp_2m": "dpmpp_2m", "heun": "heun", "uni_pc": "uni_pc",
}  # fmt: skip
CAPTIONS = {"txt": "txt", ".txt": "txt", "caption": "caption", ".caption": "caption", "json": "json"}
NOISE = {"flux": "flowmatch", "sd3": "flowmatch", "sdxl": "ddpm", "sd1": "ddpm", "chroma": "flowmatch"}
"""model.arch -> the only noise scheduler it is trained by."""
TEXT_ENCODERS = ("text_encoder_path", "clip_l_path", "text_encoder_2_path", "clip_g_path", "t5_path")
"""In the order of Load Base Model's inputs."""

NOTHING_LEAVES = "nothing leaves this machine"
EVERY_STEP = "every step is in the run's log.jsonl and log.csv anyway"
TOKENIZERS = "tokenizers come with ComfyUI"
FLUX_SIGMAS = "these are levels of another noise schedule; the model's own are used"
RAMP = "blocks cannot be ramped up one after another; give them a rate of their own in lr_if_contains"
TREAD = "token routing changes the network that is trained"

ROOT_KEYS: Mapping[str, Read] = {
    "job": to("run.job", one_of({"extension": "extension", "train": "train"})),
    "meta.name": to("run.title", text),
    "meta.version": to("run.version", text),
    "meta.flux_clip_tokenizer": refused(TOKENIZERS),
    "meta.flux_t5_tokenizer": refused(TOKENIZERS),
    "meta.flux_warmup_steps": to("optimizer.warmup_steps", whole),
    "meta.flux_max_grad_norm": to("optimizer.max_grad_norm", number),
    "meta.flux_seed": to("train.seed", whole),
    "meta.flux_lora_zero_init": only(True, "a LoRA always starts as no change to the model"),
    "meta.flux_sigma_min": refused(FLUX_SIGMAS),
    "meta.flux_sigma_max": refused(FLUX_SIGMAS),
    "meta.flux_ckpt_dir": refused("checkpoints lie in the run's own folder in training_folder"),
    "meta.flux_log_every": to("run.log_every", whole),
    "meta.flux_checkpoint_every": to("checkpoints.steps", whole),
    "config.name": to("run.name", text),
    "config.process": lambda value, key: {},
}
"""Key of the file -> what it sets."""

KEYS: Mapping[str, Read] = {
    "type": to("run.type", one_of({"sd_trainer": "sd_trainer", "flux_trainer": "flux_trainer"})),
    "training_folder": to("run.output", text),
    "device": to("run.device", device),
    "trigger_word": to("may.trigger", text),
    "performance_log_every": to("run.log_every", whole),
    "network.type": network_type,
    "network.linear": to("lora.rank", whole),
    "network.linear_alpha": to("lora.alpha", number),
    "network.conv": to("may.conv", whole),
    "network.conv_alpha": to("may.conv_alpha", number),
    "network.dropout": to("lora_settings.dropout", number),
    "network.lokr_factor": to("lora_settings.factor", lambda value, key: int(number(value, key))),
    "network.network_kwargs.lr_if_contains": to("lora_settings.learning_rates", multiples),
    "network.network_kwargs.only_if_contains": to("lora.include", containing),
    "network.network_kwargs.ignore_if_contains": to("lora.exclude", containing),
    "network.ramp_double_blocks": only(False, RAMP),
    "network.ramp_target_lr": refused(RAMP),
    "network.ramp_warmup_steps": refused(RAMP),
    "network.ramp_type": refused(RAMP),
    "save.dtype": to("save.dtype", one_of(NUMBER_FORMATS)),
    "save.save_every": to("checkpoints.steps", whole),
    "save.max_step_saves_to_keep": to("checkpoints.keep", whole),
    "save.push_to_hub": only(False, NOTHING_LEAVES),
    "save.hf_repo_id": refused(NOTHING_LEAVES),
    "save.hf_private": refused(NOTHING_LEAVES),
    "train.batch_size": to("train.batch_size", whole),
    "train.steps": to("train.steps", whole),
    "train.gradient_accumulation_steps": to("optimizer.gradient_accumulation", whole),
    "train.train_unet": only(True, "the diffusion model is what is trained"),
    "train.train_text_encoder": to("lora.text_encoder", either(1.0, 0.0)),
    "train.gradient_checkpointing": to("memory.checkpointing", either("block", "none")),
    "train.noise_scheduler": to("may.noise_scheduler", one_of({"flowmatch": "flowmatch", "ddpm": "ddpm"})),
    "train.optimizer": to("optimizer.optimizer", one_of(OPTIMIZER_NAMES)),
    "train.optimizer_params.weight_decay": to("optimizer.weight_decay", number),
    "train.optimizer_params.d_coef": to("optimizer.d_coef", number),
    "train.lr": to("train.learning_rate", number),
    "train.lr_scheduler": to("optimizer.schedule", one_of(SCHEDULE_NAMES)),
    "train.lr_scheduler_params.num_warmup_steps": to("optimizer.warmup_steps", whole),
    "train.lr_scheduler_params.num_cycles": to("optimizer.cycles", whole),
    "train.lr_scheduler_params.power": to("optimizer.power", number),
    "train.max_grad_norm": to("optimizer.max_grad_norm", number),
    "train.seed": to("train.seed", whole),
    "train.skip_first_sample": to("sample.before_training", either(False, True)),
    "train.disable_sampling": to("may.disable_sampling", flag),
    "train.linear_timesteps": to("objective.sigmas", either("uniform", "auto")),
    "train.timestep_type": to("objective.sigmas", one_of(TIMESTEPS)),
    "train.loss_type": to("objective.loss", one_of(LOSS_NAMES)),
    "train.noise_offset": to("objective.noise_offset", number),
    "train.min_snr_gamma": min_snr,
    "train.ema_config.use_ema": to("may.use_ema", flag),
    "train.ema_config.ema_decay": to("may.ema_decay", number),
    "train.dtype": to("memory.precision", one_of(NUMBER_FORMATS)),
    "train.bypass_guidance_embedding": only(False, "Flux Dev is trained with the guidance it was made with"),
    "train.use_layer_streaming": to("may.streaming", flag),
    "train.streaming_memory_limit_gb": to("may.limit", number),
    "model.name_or_path": to("base.model", text),
    "model.arch": to("may.arch", one_of({name: name for name in NOISE})),
    "model.is_flux": to("may.arch", either("flux", None)),
    "model.is_v3": to("may.arch", either("sd3", None)),
    "model.is_sd3": to("may.arch", either("sd3", None)),
    "model.is_sdxl": to("may.arch", either("sdxl", None)),
    "model.is_xl": to("may.arch", either("sdxl", None)),
    "model.is_auraflow": only(False, "AuraFlow was not tried"),
    "model.quantize": to("may.quantize", flag),
    "model.low_vram": to("may.low_vram", flag),
    "model.compile": to("memory.compile", flag),
    "model.vae_path": to("base.vae", text),
    **{f"model.{key}": to(f"base.{key}", text) for key in TEXT_ENCODERS},
    "sample.sampler": to("sample.sampler", one_of(SAMPLER_NAMES)),
    "sample.sample_every": to("sample.every", whole),
    "sample.width": to("sample.width", whole),
    "sample.height": to("sample.height", whole),
    "sample.prompts": to("sample.prompts", lines),
    "sample.neg": to("sample.negative", text),
    "sample.seed": to("sample.seed", whole),
    "sample.walk_seed": to("sample.walk_seed", flag),
    "sample.guidance_scale": to("may.guidance_scale", number),
    "sample.sample_steps": to("sample.steps", whole),
    "tread.enabled": only(False, TREAD),
    "tread.mask": refused(TREAD),
    "tread.schedule": refused(TREAD),
    "tread.reinject": refused(TREAD),
    "tread.loss": refused(TREAD),
}
"""Key of config.process[0] -> what it sets."""

DATASET_KEYS: Mapping[str, Read] = {
    "folder_path": to("dataset.folder", text),
    "caption_ext": to("dataset_settings.captions_from", one_of(CAPTIONS)),
    "caption_dropout_rate": to("dataset.caption_dropout", number),
    "shuffle_tokens": to("dataset_settings.shuffle_tags", flag),
    "cache_latents": only(True, "every image is encoded once"),
    "cache_latents_to_disk": only(True, "what is encoded is kept on the disk"),
    "resolution": to("dataset.resolution", sizes),
    "force_recache": to("encode.encode_again", flag),
    "num_repeats": to("dataset.repeats", whole),
    "flip_x": to("dataset.flip", flag),
    "is_reg": to("dataset_settings.regularisation", flag),
    "trigger_word": to("dataset.trigger", text),
}
"""Key of an entry of datasets[] -> what it sets."""
