"""Job files as they are read: Graft's, EriDiffusion's, and one small enough to be trained in a test."""

from __future__ import annotations

from PIL import Image

from graft.training.job.keys import KEYS, ROOT_KEYS

DDPM = ("sdxl", "xl", "v2", "ssd", "vega")


"""model.is_...: whose noise levels ai-toolkit's timestep_type says nothing about."""


WORDS = {"type": "concept_slider", "slider.positive_prompt": "big", "slider.negative_prompt": "small"}
CLASS = {
    "trigger_word": "sks",
    "train.diff_output_preservation": True,
    "train.diff_output_preservation_class": "dog",
}
NEEDED = {
    "network.lokr_full_rank": {"network.type": "lokr"},
    "network.lokr_factor": {"network.type": "lokr"},
    "train.disable_sampling": {"sample.prompts": ["a cat"]},
    "train.skip_first_sample": {"sample.prompts": ["a cat"]},
    "train.optimizer_params.d_coef": {"train.optimizer": "prodigy"},
    "train.optimizer_params.arguments": {"train.optimizer": "torch.optim.NAdam"},
    "train.lr_scheduler_params.num_cycles": {"train.lr_scheduler": "cosine_with_restarts"},
    "train.lr_scheduler_params.power": {"train.lr_scheduler": "polynomial"},
    "train.differential_guidance_scale": {"train.do_differential_guidance": True},
    "train.diff_output_preservation": CLASS | {"train.diff_output_preservation": False},
    "train.diff_output_preservation_multiplier": CLASS,
    "train.diff_output_preservation_class": CLASS,
    "train.blank_prompt_preservation_multiplier": {"train.blank_prompt_preservation": True},
    **{f"slider.{key}": WORDS for key in ("target_class", "guidance_strength", "anchor_class")},
    **{f"slider.{end}_prompt": WORDS for end in ("positive", "negative")},
    "slider.anchor_strength": WORDS | {"slider.anchor_class": "trees"},
    "model.qtype": {"model.quantize": True},
    **{f"model.is_{name}": {"train.timestep_type": "linear"} for name in DDPM},
    **{key: {"sample.prompts": ["a cat"]} for key in KEYS if key.startswith("sample.")},
    "sample.fps": {"sample.prompts": ["a cat"], "sample.num_frames": 9},
    "sample.prompts": {},
    "sample.samples": {},
}


"""Key -> others that it has an effect beside."""


def document(key="", value=None, **dataset):
    """The least that a job needs, and one key more with those that it has an effect beside."""
    process = {
        "type": "sd_trainer",
        "datasets": [{"folder_path": "images", **dataset}],
        "model": {"name_or_path": "base.safetensors"},
    }
    whole = {"config": {"name": "mine", "process": [process]}}
    return put(whole, NEEDED.get(key, {}) | ({key: value} if key and value is not None else {}))


def put(whole, values):
    """The document with these keys set."""
    for key, value in values.items():
        *path, last = key.split(".")
        place = whole if key in ROOT_KEYS else whole["config"]["process"][0]
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return whole


ERIDIFFUSION = """
model:
  name_or_path: "base.safetensors"
  is_sdxl: true

network:
  type: "lora"
  linear: 16  # LoRA rank
  linear_alpha: 16

train:
  batch_size: 1
  steps: 2000
  gradient_accumulation: 4
  lr: 1e-4
  optimizer: "adamw8bit"
  gradient_checkpointing: true
"""


"""The example of EriDiffusion's README."""


def images(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for color in ("red", "blue"):
        Image.new("RGB", (64, 64), color).save(folder / f"{color}.png")
        (folder / f"{color}.txt").write_text(f"a {color} square, plain")


def small(folder, **process):
    """A job of two steps on two squares."""
    images(folder)
    values = {
        "type": "sd_trainer",
        "datasets": [{"folder_path": folder.name, "resolution": 64, "shuffle_tokens": True}],
        "model": {"name_or_path": "graft_tiny_sd3.safetensors"},
        "network": {"type": "lokr", "linear": 2, "network_kwargs": {"lr_if_contains": {"mlp": 0.5}}},
        "train": {"steps": 2, "lr": "1e-3", "optimizer": "adamw", "ema_config": {"use_ema": True}},
        "save": {"dtype": "float32"},
        **process,
    }
    return {"config": {"name": "job", "process": [values]}}
