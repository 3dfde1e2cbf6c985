"""The keys of a job file: ROOT_KEYS, KEYS and DATASET_KEYS, each key with the input it sets.

A key is read into {"node.input": value}, where "node" is a name in NODES of `graph.py`, "run" for what
concerns the run as a whole, or "may" for what several keys decide together (`rules.py`).

What ai-toolkit's names mean was read off its source (ostris/ai-toolkit, 27a03a9): toolkit/config_modules.py,
toolkit/samplers/custom_flowmatch_sampler.py and jobs/process/BaseSDTrainProcess.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from ..adapters.build import ADAPTERS
from ..config import Compute
from ..family import architectures
from ..optimizer.rows import OPTIMIZERS
from ..user_error import UserError

Settings = dict[str, Any]
"""What keys set: "node.input" -> value."""
Convert = Callable[[Any, str], Any]
"""(value in the file, its key) -> value of an input; raises UserError."""
Read = Callable[[Any, str], Settings]


def to(target: str, convert: Convert) -> Read:
    """Return the reading of a key that sets one input."""
    return lambda value, key: {target: convert(value, key)}


def only(allowed: Any, why: str) -> Read:
    """Return the reading of a key that can only have one value: what Graft does anyway."""

    def read(value: Any, key: str) -> Settings:
        if value != allowed:
            raise UserError(f"{key}: {value!r} is not possible: {why}. Set it to {_yaml(allowed)}.")
        return {}

    return read


def refused(why: str) -> Read:
    """Return the reading of a key that Graft does not support; it is ignored if off or empty."""

    def read(value: Any, key: str) -> Settings:
        if is_off(value):
            return {}
        raise UserError(f"{key}: not supported: {why}. Remove the key.")

    return read


def is_off(value: Any) -> bool:
    """Return whether a key with this value asks for nothing: false, empty, or only such keys below it."""
    values = value.values() if isinstance(value, Mapping) else [value]
    return all(part is None or part is False or part in ("", [], {}) for part in values)


def no_setting(value: Any, key: str) -> Settings:
    """Return nothing: the reading of a harmless key."""
    return {}


@dataclass(frozen=True)
class Beside:
    """The reading of a key that only counts with another key of the file, its switch.

    Without the switch it is refused: a setting without effect is a mistake.
    """

    switch: str
    why: str
    """Why it changes nothing without the switch, or whatever the switch is."""
    read: Read = no_setting
    """What it sets with the switch on."""
    off: Any = None
    """Value of the switch with which it sets nothing either."""

    def beside(self, switch: Any) -> Read:
        """Return the reading of the key beside this value of its switch."""
        return no_setting if switch == self.off else self.read

    def __call__(self, value: Any, key: str) -> Settings:
        return {}


def text(value: Any, key: str) -> str:
    """Return a string, also where YAML read it as a number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{key}: expected a text, found {value!r}.")
    return str(value)


def number(value: Any, key: str) -> float:
    """Return a number, also from 1e-4, which YAML 1.1 reads as text."""
    try:
        result = float(value)
        if isinstance(value, bool) or math.isnan(result):
            raise UserError
        return result
    except (TypeError, ValueError):
        raise UserError(f"{key}: expected a number, found {value!r}.") from None


def whole(value: Any, key: str) -> int:
    """Return a whole number, 0 or more."""
    result = number(value, key)
    if not result.is_integer() or result < 0:
        raise UserError(f"{key}: expected a whole number, 0 or more; found {value!r}.")
    return int(result)


def clip_frames(value: Any, key: str) -> int | None:
    """Return the frames of a clip; None for one frame, an image."""
    return whole(value, key) if whole(value, key) > 1 else None


def flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{key}: expected true or false, found {value!r}.")
    return value


def one_of(choices: Mapping[str, Any], advice: str = "") -> Convert:
    """Return the conversion of names: name in the file -> value of the input.

    `advice` is for names that only other trainers know.
    """

    def convert(value: Any, key: str) -> Any:
        name = text(value, key)
        if name not in choices:
            near = get_close_matches(name, choices, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{key}: {name!r} is not one of {', '.join(choices)}.{advice or hint}")
        return choices[name]

    return convert


def either(yes: Any, no: Any) -> Convert:
    """Return the conversion of true and false."""
    return lambda value, key: yes if flag(value, key) else no


def lines(value: Any, key: str) -> str:
    """Return a list of texts (or one text) as lines."""
    entries = value if isinstance(value, list) else [value]
    return "\n".join(" ".join(text(entry, key).split()) for entry in entries)


def sizes(value: Any, key: str) -> str:
    entries = value if isinstance(value, list) else [value]
    return ", ".join(str(whole(entry, key)) for entry in entries)


def betas(value: Any, key: str) -> Settings:
    """Set both of an optimizer's betas."""
    if not isinstance(value, list) or len(value) != 2:
        raise UserError(f"{key}: expected two numbers, as [0.9, 0.99]; found {value!r}.")
    return {f"optimizer.beta{i + 1}": number(beta, key) for i, beta in enumerate(value)}


def containing(value: Any, key: str) -> str:
    """Return parts of layer names as patterns, one a line."""
    return "\n".join(f"*{line}*" for line in lines(value, key).splitlines())


def multiples(value: Any, key: str) -> str:
    """Return {part of a layer's name: multiple of the learning rate} as lines "*part* = multiple"."""
    if not isinstance(value, Mapping):
        raise UserError(f"{key}: expected 'part of a layer name: multiple' below it, found {value!r}.")
    return "\n".join(f"*{part}* = {number(times, f'{key}.{part}'):g}" for part, times in value.items())


def optimizer(value: Any, key: str) -> Settings:
    """Set the optimizer: a row of OPTIMIZERS, or a class of a package by its name with a dot."""
    if isinstance(value, str) and "." in value:
        return {"optimizer.package_class": value}
    return {"optimizer.optimizer": one_of(OPTIMIZER_NAMES)(value, key)}


def arguments(value: Any, key: str) -> str:
    """Return the arguments of a class of a package as JSON."""
    if not isinstance(value, Mapping):
        raise UserError(f"{key}: expected 'name: value' below it, found {value!r}.")
    return json.dumps(value)


def network_type(value: Any, key: str) -> Settings:
    """Set the algorithm: a row of ADAPTERS, or another name of it with its switches."""
    types = {
        other: (name, switches)
        for name, method in ADAPTERS.items()
        for other, switches in {name: {}, **method.network_types}.items()
    }
    name, switches = one_of(types)(value, key)
    return {"lora.algorithm": name, **{f"may.{switch}": on for switch, on in switches.items()}}


def min_snr(value: Any, key: str) -> Settings:
    return {"objective.weighting": "min-snr", "objective.min_snr_gamma": number(value, key)}


def samples(value: Any, key: str) -> Settings:
    """Return the prompts of a list of samples, and which of them have settings of their own."""
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise UserError(f"{key}: expected a list of '- prompt: ...', found {value!r}.")
    own = [
        f"{key}[{i}].{name}"
        for i, entry in enumerate(value)
        for name in entry
        if name != "prompt" and entry[name] not in (None, "")
    ]
    prompts = lines([entry.get("prompt", "") for entry in value], key)
    return {"sample.prompts": prompts, "may.own": own or None}


def architecture(value: Any, key: str) -> str:
    """Return a name of a family; what follows a colon ("zimage:turbo") only names a file to download."""
    name = text(value, key).partition(":")[0]
    known: str = one_of({arch: arch for arch in architectures()}, ELSEWHERE)(name, key)
    return known


def device(value: Any, key: str) -> str:
    name = text(value, key)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"{key}: {name!r} is not a device; write cpu, or cuda:0 for the first GPU.")
    return name


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


NUMBER_FORMATS = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32",
}  # fmt: skip
OPTIMIZER_NAMES = {
    **{name: name for name in OPTIMIZERS},
    **{name.replace("-", "_"): name for name in OPTIMIZERS},
    "prodigyopt": "prodigy",
    "prodigyplusschedulefree": "prodigy-plus-schedule-free",
    "prodigy_plus_schedulefree": "prodigy-plus-schedule-free",
    "adamw_schedulefree": "schedule-free-adamw",
    "radam_schedulefree": "schedule-free-radam",
    "stableadamw": "stable-adamw",
}
SCHEDULE_NAMES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_restarts": "restarts", "polynomial": "polynomial", "rex": "rex",
}  # fmt: skip
TIMESTEPS = {
    "sigmoid": ("sigmoid", 1.0), "linear": ("uniform", 1.0), "shift": ("uniform", 0.0),
    "flux_shift": ("uniform", 0.0), "lumina2_shift": ("uniform", 0.0), "lognorm": ("logit-normal", 0.0),
    "mode": ("mode", 0.0),
}  # fmt: skip
"""ai-toolkit's names -> (distribution, shift): 1 is none, 0 the model's. It lacks "lognorm" and "mode"."""
CONTENT_OR_STYLE = {"balanced": None, "style": -math.log2(3)}
"""-> `ObjectiveConfig.bias`: "style" takes the distribution's quantile at u^3."""
LOSS_NAMES = {"mse": "mse", "mae": "l1", "huber": "huber", "pseudo-huber": "pseudo-huber"}
SAMPLER_NAMES = {
    "flowmatch": "euler", "euler": "euler", "ddpm": "ddpm", "ddim": "ddim", "euler_a": "euler_ancestral",
    "dpmpp_2m": "dpmpp_2m", "heun": "heun", "uni_pc": "uni_pc",
}  # fmt: skip
CAPTIONS = {"txt": "txt", ".txt": "txt", "caption": "caption", ".caption": "caption", "json": "json"}
DIFFUSERS = "diffusers (PEFT)"
"""In FILE_FORMATS: how Save LoRA names the layers."""
QUANTIZED = {"qfloat8": "fp8", "float8": "fp8", "int8": "int8", "nf4": "nf4"}
"""model.qtype -> `MemoryConfig.base`; "nf4" is Graft's own name for 4 bits."""
TEXT_ENCODERS = ("text_encoder_path", "clip_l_path", "text_encoder_2_path", "clip_g_path", "t5_path")
"""In the order of Load Base Model's inputs."""

SLIDER = "concept_slider"
TYPES = {"sd_trainer": 1, "flux_trainer": 1, "diffusion_trainer": 1, SLIDER: 2}
"""`type` -> 2 for a slider from words."""

OTHER_NAMES = {
    "learning_rate": "lr", "rank": "linear", "dim": "linear", "alpha": "linear_alpha", "epochs": "steps",
    "max_train_steps": "steps", "lr_warmup_steps": "num_warmup_steps", "warmup_steps": "num_warmup_steps",
    "seed_value": "seed", "repeats": "num_repeats", "clip_path": "clip_l_path", "trigger": "trigger_word",
}  # fmt: skip
"""Name of a key in other trainers -> last part of its name here, for the hint in a refusal."""

NOTHING_LEAVES = "nothing leaves this machine"
TOKENIZERS = "tokenizers come with ComfyUI"
FLUX_SIGMAS = "these are levels of another noise schedule; the model's own are used"
RAMP = "blocks cannot be ramped up one after another; give them a rate of their own in lr_if_contains"
ELSEWHERE = " Other image models that ComfyUI samples are trained in the editor, from Load Base Model."
UNWEIGHTED = " linear draws the levels of weighted, without the loss weights that were measured on Flex.1."
CONTENT = " Instead of content, set timestep_type: shift for more high noise."
FOUR_BITS = " Graft's 4 bits are nf4, its 8 bits qfloat8 and int8."
BELL = "it also weighs the loss by a bell curve; timestep_type: linear draws the same levels without it"
ONE_SCALE = "all images train the LoRA at its full strength"
GUIDANCE_LOSS = "a loss at another guidance was not tried"
TEXT_ENCODERS_LEAVE = "text encoders run once, before training, and as their file has them"
NO_CONTROLS = "Graft makes no control images; put them into a folder and name it in control_path"
CLIPS = "only clips have frames"
NO_SOUND = "the sound of clips is not trained"
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
    "config.process": lambda value, key: {},  # KEYS and DATASET_KEYS read it
}
"""Key of the file -> what it sets."""

KEYS: Mapping[str, Read] = {
    "type": to("run.type", one_of(TYPES)),
    "training_folder": to("run.output", text),
    "device": to("run.device", device),
    "trigger_word": to("may.trigger", text),
    "performance_log_every": to("run.log_every", whole),
    "force_recache": to("encode.encode_again", either(True, None)),
    "sqlite_db_path": to("checkpoints.sqlite", lambda value, key: bool(text(value, key)) or None),
    "logging.log_every": to("may.log_every", whole),
    "logging.use_ui_logger": to("checkpoints.sqlite", either(True, None)),
    "logging.verbose": only(False, "ComfyUI's own messages are shown when it fails"),
    "logging.use_wandb": only(False, NOTHING_LEAVES),
    "logging.project_name": Beside("logging.use_wandb", NOTHING_LEAVES),
    "logging.run_name": Beside("logging.use_wandb", NOTHING_LEAVES),
    "network.type": network_type,
    "network.linear": to("lora.rank", whole),
    "network.linear_alpha": to("lora.alpha", number),
    "network.conv": to("may.conv", whole),
    "network.conv_alpha": to("may.conv_alpha", number),
    "network.dropout": to("lora_settings.dropout", number),
    "network.transformer_only": only(True, "layers outside the blocks are left as they are"),
    "network.lokr_full_rank": to("may.full_matrix", flag),
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
    "save.save_workflow": to("save.save_workflow", flag),
    "save.save_format": to("save.format", one_of({"safetensors": None, "diffusers": DIFFUSERS})),
    "save.push_to_hub": only(False, NOTHING_LEAVES),
    "save.hf_repo_id": refused(NOTHING_LEAVES),
    "save.hf_private": refused(NOTHING_LEAVES),
    "train.batch_size": to("train.batch_size", whole),
    "train.steps": to("train.steps", whole),
    "train.gradient_accumulation": to("optimizer.gradient_accumulation", whole),
    "train.gradient_accumulation_steps": to("optimizer.gradient_accumulation", whole),
    "train.train_unet": only(True, "the diffusion model is what is trained"),
    "train.train_text_encoder": to("lora.text_encoder", either(1.0, 0.0)),
    "train.gradient_checkpointing": to("memory.checkpointing", either("block", "none")),
    "train.noise_scheduler": to("may.noise_scheduler", one_of({"flowmatch": "flowmatch", "ddpm": "ddpm"})),
    "train.optimizer": optimizer,
    "train.optimizer_params.arguments": to("optimizer.arguments", arguments),
    "train.optimizer_params.weight_decay": to("optimizer.weight_decay", number),
    "train.optimizer_params.d_coef": to("optimizer.d_coef", number),
    "train.optimizer_params.betas": betas,
    "train.optimizer_params.eps": to("optimizer.eps", number),
    "train.lr": to("train.learning_rate", number),
    "train.lr_scheduler": to("optimizer.schedule", one_of(SCHEDULE_NAMES)),
    "train.lr_scheduler_params.num_warmup_steps": to("optimizer.warmup_steps", whole),
    "train.lr_scheduler_params.num_cycles": to("optimizer.cycles", whole),
    "train.lr_scheduler_params.power": to("optimizer.power", number),
    "train.max_grad_norm": to("optimizer.max_grad_norm", number),
    "train.seed": to("train.seed", whole),
    "train.skip_first_sample": to("sample.before_training", either(False, True)),
    "train.force_first_sample": only(False, "the first set is drawn when a run begins, not when it goes on"),
    "train.disable_sampling": to("may.disable_sampling", flag),
    "train.unload_text_encoder": only(
        False, "captions would be ignored; they are encoded once, and the text encoders are unloaded anyway"
    ),
    "train.cache_text_embeddings": only(True, "every caption is encoded once and cached on disk"),
    "train.linear_timesteps": refused(BELL),
    "train.timestep_type": to("may.timesteps", one_of(TIMESTEPS, UNWEIGHTED)),
    "train.content_or_style": to("objective.bias", one_of(CONTENT_OR_STYLE, CONTENT)),
    "train.switch_boundary_every": only(1, "one network is trained, not experts in turn"),
    "train.diff_output_preservation": to("may.preserve_class", flag),
    "train.diff_output_preservation_multiplier": to("may.class_multiplier", number),
    "train.diff_output_preservation_class": to("may.class_word", text),
    "train.blank_prompt_preservation": to("may.preserve_blank", flag),
    "train.blank_prompt_preservation_multiplier": to("may.blank_multiplier", number),
    "train.do_differential_guidance": to("may.differential_guidance", flag),
    "train.differential_guidance_scale": to("may.differential_guidance_scale", number),
    "train.do_guidance_loss": only(False, GUIDANCE_LOSS),
    "train.guidance_loss_target": Beside("train.do_guidance_loss", GUIDANCE_LOSS),
    "train.audio_loss_multiplier": only(1, NO_SOUND),
    "train.max_loss": refused("a loss is not clipped; max_grad_norm limits what it changes"),
    "train.validation_config": refused("images are held out with Validation Settings, in the editor"),
    "train.loss_type": to("objective.loss", one_of(LOSS_NAMES)),
    "train.noise_offset": to("objective.noise_offset", number),
    "train.min_snr_gamma": min_snr,
    "train.ema_config.use_ema": to("may.use_ema", flag),
    "train.ema_config.ema_decay": to("may.ema_decay", number),
    "train.dtype": to("memory.precision", one_of(NUMBER_FORMATS)),
    "train.bypass_guidance_embedding": to("may.bypass", flag),
    "train.use_layer_streaming": to("may.streaming", flag),
    "train.streaming_memory_limit_gb": to("may.limit", number),
    "slider.positive_prompt": to("slider.positive", text),
    "slider.negative_prompt": to("slider.negative", text),
    "slider.target_class": to("slider.neutral", text),
    "slider.guidance_strength": to("slider.guidance", number),
    "slider.anchor_class": to("slider.anchor", text),
    "slider.anchor_strength": to("may.anchor_strength", number),
    "model.name_or_path": to("base.model", text),
    "model.arch": to("may.arch", architecture),
    "model.is_v2": to("may.arch", either("sd2", None)),
    "model.is_flux": to("may.arch", either("flux", None)),
    "model.is_v3": to("may.arch", either("sd3", None)),
    "model.is_sd3": to("may.arch", either("sd3", None)),
    "model.is_sdxl": to("may.arch", either("sdxl", None)),
    "model.is_xl": to("may.arch", either("sdxl", None)),
    "model.is_ssd": to("may.arch", either("ssd", None)),
    "model.is_vega": to("may.arch", either("vega", None)),
    "model.is_lumina2": to("may.arch", either("lumina2", None)),
    "model.is_auraflow": only(False, "AuraFlow was not tried"),
    "model.quantize": to("may.quantize", flag),
    "model.qtype": to("may.qtype", text),
    "model.quantize_te": only(False, TEXT_ENCODERS_LEAVE),
    "model.qtype_te": Beside("model.quantize_te", TEXT_ENCODERS_LEAVE),
    "model.low_vram": to("may.low_vram", flag),
    "model.layer_offloading": to("may.layer_offloading", flag),
    "model.layer_offloading_transformer_percent": only(1.0, "all layers are offloaded, or none"),
    "model.layer_offloading_text_encoder_percent": Beside("model.layer_offloading", TEXT_ENCODERS_LEAVE),
    "model.compute": to("memory.compute", one_of({name: name for name in get_args(Compute)})),
    "model.compile": to("memory.compile", flag),
    "model.block_compile": to("memory.compile", either(True, None)),
    "model.model_kwargs": refused("these are settings of ai-toolkit's own model classes"),
    "model.assistant_lora_path": to("assistant.lora_name", text),
    "model.unconditional_lora_path": refused("a LoRA for unconditional predictions was not tried"),
    "model.vae_path": to("base.vae", text),
    **{f"model.{key}": to(f"base.{key}", text) for key in TEXT_ENCODERS},
    "sample.sampler": to("sample.sampler", one_of(SAMPLER_NAMES)),
    "sample.sample_every": to("sample.every", whole),
    "sample.width": to("sample.width", whole),
    "sample.height": to("sample.height", whole),
    "sample.sample_start_step": only(0, "samples are drawn from the first step on"),
    "sample.prompts": to("sample.prompts", lines),
    "sample.samples": samples,
    "sample.num_frames": to("sample.frames", clip_frames),
    "sample.fps": Beside("sample.num_frames", CLIPS, to("sample.fps", number), off=1),
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
    "cache_latents_to_disk": only(True, "encoded images are cached on disk"),
    "resolution": to("dataset.resolution", sizes),
    "force_recache": to("encode.encode_again", either(True, None)),
    "num_repeats": to("dataset.repeats", whole),
    "flip_x": to("dataset.flip", flag),
    "is_reg": to("dataset_settings.regularisation", flag),
    "trigger_word": to("dataset.trigger", text),
    "default_caption": refused("write it into the caption file of each image that has none"),
    "mask_path": refused("put the mask of cat.png beside it, as cat-mask.png"),
    "mask_min_value": to("dataset_settings.outside_mask", number),
    "alpha_mask": to("dataset_settings.masks", either("alpha", None)),
    "invert_mask": only(False, "white is what counts"),
    "network_weight": only(1, ONE_SCALE),
    "flip_y": only(False, "images are not turned upside down"),
    "batch_size": refused("all datasets share train.batch_size"),
    "controls": refused(NO_CONTROLS),
    "control_path": to("dataset.references", lines),
    "control_path_1": to("may.references_1", text),
    "control_path_2": to("may.references_2", text),
    "control_path_3": to("may.references_3", text),
    "num_frames": to("dataset.frames", clip_frames),
    "do_i2v": Beside("num_frames", CLIPS, to("dataset_settings.first_frame", either(1.0, None)), off=1),
    "do_audio": only(False, NO_SOUND),
    "auto_frame_count": only(False, "every clip gives num_frames frames"),
    "shrink_video_to_frames": Beside(
        "num_frames", CLIPS, to("dataset_settings.clips", either("uniform", "head")), off=1
    ),
    "fps": Beside("num_frames", CLIPS, to("dataset_settings.fps", number), off=1),
    "audio_normalize": only(False, NO_SOUND),
    "audio_preserve_pitch": only(False, NO_SOUND),
}
"""Key of an entry of datasets[] -> what it sets."""
