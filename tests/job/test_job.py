"""The job file: every key of the layout is honored, or refused by name with what to do."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml

import graft
from graft.tests.support.jobs import DDPM, ERIDIFFUSION, NEEDED, WORDS, document, put
from graft.training.config import ObjectiveConfig, from_dict
from graft.training.family import architectures
from graft.training.files.lora.diffusers import FILE_FORMATS
from graft.training.job.graph import NODES
from graft.training.job.keys import DATASET_KEYS, KEYS, ROOT_KEYS, Beside
from graft.training.job.read import compile_job, read_job
from graft.training.objective.sigmas import apply_bias, draw_sigmas

from ..support.tiny import Flow

JOBS = Path(graft.__file__).parent / "example_workflows" / "jobs"

SAME = "the graph is the one without the key"
"""Expected of a value that asks for what Graft does anyway; any other is then in REFUSED."""


DOG = {"dataset_settings.class_word": "dog"}
HONORED = {
    "job": ("extension", SAME),
    "meta.name": ("[name]", {"document.meta": {"name": "mine"}}),
    "meta.version": ("1.0", {"document.meta": {"version": "1.0"}}),
    "meta.flux_warmup_steps": (5, {"optimizer.warmup_steps": 5}),
    "meta.flux_max_grad_norm": (0.5, {"optimizer.max_grad_norm": 0.5}),
    "meta.flux_seed": (7, {"train.seed": 7}),
    "meta.flux_lora_zero_init": (True, SAME),
    "meta.flux_log_every": (9, {"job.log_every": 9}),
    "meta.flux_checkpoint_every": (50, {"checkpoints.steps": 50}),
    "config.name": ("other", {"train.name": "other", "save.name": "other"}),
    "type": ("flux_trainer", SAME),
    "training_folder": ("elsewhere", {"job.output.name": "elsewhere"}),
    "device": ("cuda:1", {"job.device": "cuda:1"}),
    "trigger_word": ("p3r5on", {"dataset.trigger": "p3r5on"}),
    "performance_log_every": (1000, {"job.log_every": 1000}),
    "force_recache": (True, {"encode.encode_again": True}),
    "sqlite_db_path": ("./aitk_db.db", {"checkpoints.sqlite": True}),
    "logging.log_every": (7, {"job.log_every": 7}),
    "logging.use_ui_logger": (True, {"checkpoints.sqlite": True}),
    "logging.verbose": (False, SAME),
    "logging.use_wandb": (False, SAME),
    "network.type": ("lokr_full_rank", {"lora.algorithm": "lokr", "lora_settings.full_matrix": True}),
    "network.linear": (8, {"lora.rank": 8}),
    "network.linear_alpha": (4, {"lora.alpha": 4.0}),
    "network.conv": (16, {"lora.targets": "all"}),
    "network.dropout": (0.1, {"lora_settings.dropout": 0.1}),
    "network.transformer_only": (True, SAME),
    "network.lokr_full_rank": (True, {"lora_settings.full_matrix": True}),
    "network.lokr_factor": (8, {"lora_settings.factor": 8}),
    "network.network_kwargs.lr_if_contains": (
        {"attn": 0.5, "mlp": 2},
        {"lora_settings.learning_rates": "*attn* = 0.5\n*mlp* = 2"},
    ),
    "network.network_kwargs.only_if_contains": (["attn"], {"lora.include": "*attn*"}),
    "network.network_kwargs.ignore_if_contains": (["a", "b"], {"lora.exclude": "*a*\n*b*"}),
    "network.ramp_double_blocks": (False, SAME),
    "save.dtype": ("float16", {"save.dtype": "fp16"}),
    "save.save_every": (250, {"checkpoints.steps": 250}),
    "save.max_step_saves_to_keep": (4, {"checkpoints.keep": 4}),
    "save.save_workflow": (False, {"save.save_workflow": False}),
    "save.save_format": ("diffusers", {"save.format": "diffusers (PEFT)"}),
    "save.push_to_hub": (False, SAME),
    "train.batch_size": (3, {"train.batch_size": 3}),
    "train.steps": (2000, {"train.steps": 2000}),
    "train.gradient_accumulation": (4, {"optimizer.gradient_accumulation": 4}),
    "train.gradient_accumulation_steps": (4, {"optimizer.gradient_accumulation": 4}),
    "train.train_unet": (True, SAME),
    "train.train_text_encoder": (True, {"lora.text_encoder": 1.0}),
    "train.gradient_checkpointing": (True, {"memory.checkpointing": "block"}),
    "train.noise_scheduler": ("flowmatch", {"objective.sigmas": "sigmoid"}),
    "train.optimizer": ("adamw8bit", {"optimizer.optimizer": "adamw8bit"}),
    "train.optimizer_params.arguments": (
        {"betas": [0.8, 0.9]},
        {"optimizer.package_class": "torch.optim.NAdam", "optimizer.arguments": '{"betas": [0.8, 0.9]}'},
    ),
    "train.optimizer_params.weight_decay": (0.1, {"optimizer.weight_decay": 0.1}),
    "train.optimizer_params.d_coef": (2, {"optimizer.d_coef": 2.0}),
    "train.optimizer_params.betas": ([0.8, "0.95"], {"optimizer.beta1": 0.8, "optimizer.beta2": 0.95}),
    "train.optimizer_params.eps": ("1e-6", {"optimizer.eps": 1e-6}),
    "train.lr": ("1e-4", {"train.learning_rate": 1e-4}),
    "train.lr_scheduler": ("cosine", {"optimizer.schedule": "cosine"}),
    "train.lr_scheduler_params.num_warmup_steps": (10, {"optimizer.warmup_steps": 10}),
    "train.lr_scheduler_params.num_cycles": (3, {"optimizer.cycles": 3}),
    "train.lr_scheduler_params.power": (2, {"optimizer.power": 2.0}),
    "train.max_grad_norm": (0.5, {"optimizer.max_grad_norm": 0.5}),
    "train.seed": (42, {"train.seed": 42}),
    "train.skip_first_sample": (True, {"sample.before_training": False}),
    "train.disable_sampling": (True, {"nodes.GraftSamplePrompts": 0}),
    "train.force_first_sample": (False, SAME),
    "train.unload_text_encoder": (False, SAME),
    "train.cache_text_embeddings": (True, SAME),
    "train.linear_timesteps": (False, SAME),
    "train.timestep_type": ("sigmoid", {"objective.sigmas": "sigmoid", "objective.shift": 1.0}),
    "train.content_or_style": ("style", {"objective.bias": -math.log2(3)}),
    "train.switch_boundary_every": (1, SAME),
    "train.diff_output_preservation": (True, {"objective.preservation": 1.0, **DOG}),
    "train.diff_output_preservation_multiplier": (0.5, {"objective.preservation": 0.5, **DOG}),
    "train.diff_output_preservation_class": ("wolf", {"dataset_settings.class_word": "wolf"}),
    "train.blank_prompt_preservation": (True, {"objective.preservation": 1.0}),
    "train.blank_prompt_preservation_multiplier": (0.5, {"objective.preservation": 0.5}),
    "train.do_differential_guidance": (True, {"objective.differential_guidance": 3.0}),
    "train.differential_guidance_scale": (2, {"objective.differential_guidance": 2.0}),
    "train.do_guidance_loss": (False, SAME),
    "train.audio_loss_multiplier": (1, SAME),
    "train.loss_type": ("mae", {"objective.loss": "l1"}),
    "train.noise_offset": (0.05, {"objective.noise_offset": 0.05}),
    "train.min_snr_gamma": (5, {"objective.weighting": "min-snr", "objective.min_snr_gamma": 5.0}),
    "train.ema_config.use_ema": (True, {"optimizer.ema_decay": 0.999}),
    "train.ema_config.ema_decay": (0.999, {"optimizer.ema_decay": 0.999}),
    "train.dtype": ("bf16", {"memory.precision": "bf16"}),
    "train.bypass_guidance_embedding": (False, SAME),
    "train.use_layer_streaming": (True, {"memory.base": "offload"}),
    "slider.positive_prompt": ("old", {"slider.positive": "old"}),
    "slider.negative_prompt": ("new", {"slider.negative": "new"}),
    "slider.target_class": ("a man", {"slider.neutral": "a man"}),
    "slider.guidance_strength": (2, {"slider.guidance": 2.0}),
    "slider.anchor_class": ("trees", {"slider.anchor": "trees", "objective.preservation": 1.0}),
    "slider.anchor_strength": (0.5, {"objective.preservation": 0.5}),
    "model.name_or_path": ("b.safetensors", {"base.model": "b.safetensors"}),
    "model.arch": ("flux", {"objective.sigmas": "sigmoid"}),
    **{
        f"model.is_{name}": (True, {"objective.sigmas": "sigmoid", "objective.shift": 1.0})
        for name in ("flux", "v3", "sd3", "lumina2")
    },
    **{f"model.is_{name}": (True, {"nodes.GraftObjectiveSettings": 0}) for name in DDPM},
    "model.is_auraflow": (False, SAME),
    "model.quantize": (True, {"memory.base": "fp8"}),
    "model.qtype": ("nf4", {"memory.base": "nf4"}),
    "model.compute": ("int8", {"memory.compute": "int8"}),
    "model.quantize_te": (False, SAME),
    "model.layer_offloading": (True, {"memory.base": "offload"}),
    "model.layer_offloading_transformer_percent": (1.0, SAME),
    "model.model_kwargs": ({}, SAME),
    "model.block_compile": (True, {"memory.compile": True}),
    "model.compile": (True, {"memory.compile": True}),
    "model.low_vram": (True, {"memory.base": "offload"}),
    "model.assistant_lora_path": ("turbo.safetensors", {"assistant.lora_name": "turbo.safetensors"}),
    "model.vae_path": ("ae.safetensors", {"base.vae": "ae.safetensors"}),
    **{
        f"model.{key}": ("clip.safetensors", {"base.text_encoder_1": "clip.safetensors"})
        for key in ("text_encoder_path", "clip_l_path", "text_encoder_2_path", "clip_g_path", "t5_path")
    },
    "sample.sampler": ("flowmatch", {"sample.sampler": "euler"}),
    "sample.sample_every": (250, {"sample.every": 250}),
    "sample.width": (512, {"sample.width": 512}),
    "sample.height": (768, {"sample.height": 768}),
    "sample.sample_start_step": (0, SAME),
    "sample.prompts": (["a", "b"], {"sample.prompts": "a\nb"}),
    "sample.samples": ([{"prompt": "a", "neg": ""}, {"prompt": "b"}], {"sample.prompts": "a\nb"}),
    "sample.num_frames": (9, {"sample.frames": 9}),
    "sample.fps": (8, {"sample.fps": 8.0}),
    "sample.neg": ("ugly", {"sample.negative": "ugly"}),
    "sample.seed": (42, {"sample.seed": 42}),
    "sample.walk_seed": (True, {"sample.walk_seed": True}),
    "sample.guidance_scale": (4, {"sample.cfg": 4.0}),
    "sample.sample_steps": (25, {"sample.steps": 25}),
    "tread.enabled": (False, SAME),
}
"""Key -> (value, what it sets)."""


HARMLESS = {
    "logging.project_name": ("x", {"logging.use_wandb": False}),
    "logging.run_name": ("x", {"logging.use_wandb": False}),
    "train.guidance_loss_target": (4, {"train.do_guidance_loss": False}),
    "model.qtype_te": ("qfloat8", {"model.quantize_te": False}),
    "model.layer_offloading_text_encoder_percent": (0.5, {"model.layer_offloading": True}),
    "sample.fps": (16, {"sample.num_frames": 1}),
}
"""Keys that change nothing -> (value, the switch that they belong to): where that is off, they say nothing in
ai-toolkit either, and where it is on it is refused. (Text encoders are on the host while Graft trains.)"""

REFUSED = {
    "job": "serve",
    "type": "slider",
    "logging.verbose": True,
    "train.switch_boundary_every": 10,
    "train.audio_loss_multiplier": 2,
    "meta.flux_clip_tokenizer": "x",
    "meta.flux_t5_tokenizer": "x",
    "meta.flux_lora_zero_init": False,
    "meta.flux_sigma_min": 0.01,
    "meta.flux_sigma_max": 50,
    "meta.flux_ckpt_dir": "x",
    "network.type": "ia3",
    "logging.use_wandb": True,
    "network.transformer_only": False,
    "network.conv_alpha": 3,
    "network.conv": "many",
    "network.ramp_double_blocks": True,
    "network.ramp_target_lr": 1.5e-6,
    "network.ramp_warmup_steps": 1000,
    "network.ramp_type": "linear",
    "save.push_to_hub": True,
    "save.hf_repo_id": "me/mine",
    "save.hf_private": True,
    "save.save_format": "pt",
    "train.train_unet": False,
    "train.force_first_sample": True,
    "train.unload_text_encoder": True,
    "train.cache_text_embeddings": False,
    "train.linear_timesteps": True,
    "train.timestep_type": "weighted",
    "train.content_or_style": "content",
    "train.do_guidance_loss": True,
    "train.max_loss": 1.0,
    "train.validation_config": {"resolution": 512},
    "train.bypass_guidance_embedding": True,
    "train.streaming_memory_limit_gb": 16,
    "train.optimizer": "adam8bit",
    "train.lr": "fast",
    "train.steps": 1.5,
    "train.dtype": "fp8",
    "device": "gpu",
    "model.name_or_path": "black-forest-labs/FLUX.1-dev",
    "model.is_auraflow": True,
    "model.arch": "fluxx",
    "model.quantize_te": True,
    "model.layer_offloading_transformer_percent": 0.5,
    "model.model_kwargs": {"match_target_res": True},
    "model.unconditional_lora_path": "x",
    "tread.enabled": True,
    "tread.mask": {"type": "random"},
    "tread.schedule": [{"out": 1, "in": 2}],
    "tread.reinject": {"mode": "residual"},
    "tread.loss": {"route_lambda": 0.1},
    "sample.prompts": [],
    "sample.samples": [{"prompt": "a", "width": 512}],
    "sample.sample_start_step": 100,
    "sample.num_frames": "all",
}

DATASET = {
    "folder_path": ("cats", {"dataset.folder": "cats"}),
    "caption_ext": ("txt", {"dataset_settings.captions_from": "txt"}),
    "caption_dropout_rate": (0.05, {"dataset.caption_dropout": 0.05}),
    "shuffle_tokens": (True, {"dataset_settings.shuffle_tags": True}),
    "cache_latents": (True, SAME),
    "cache_latents_to_disk": (True, SAME),
    "resolution": ([512, 768], {"dataset.resolution": "512, 768"}),
    "force_recache": (True, {"encode.encode_again": True}),
    "num_repeats": (3, {"dataset.repeats": 3}),
    "flip_x": (True, {"dataset.flip": True}),
    "is_reg": (True, {"dataset_settings.regularisation": True}),
    "trigger_word": ("xyz", {"dataset.trigger": "xyz"}),
    "default_caption": ("", SAME),
    "mask_path": ("", SAME),
    "mask_min_value": (0.1, {"dataset_settings.outside_mask": 0.1}),
    "alpha_mask": (True, {"dataset_settings.masks": "alpha"}),
    "invert_mask": (False, SAME),
    "network_weight": (1.0, SAME),
    "flip_y": (False, SAME),
    "batch_size": (None, SAME),
    "controls": ([], SAME),
    "control_path": (["cats", "cats"], {"dataset.references": "cats\ncats"}),
    "control_path_1": ("cats", {"dataset.references": "cats"}),
    "control_path_2": ("cats", {"dataset.references": "cats"}),
    "control_path_3": ("cats", {"dataset.references": "cats"}),
    "num_frames": (9, {"dataset.frames": 9}),
    "do_i2v": (True, {"dataset_settings.first_frame": 1.0}),
    "shrink_video_to_frames": (True, {"dataset_settings.clips": "uniform"}),
    "fps": (24, {"dataset_settings.fps": 24.0}),
    "do_audio": (False, SAME),
    "auto_frame_count": (False, SAME),
    "audio_normalize": (False, SAME),
    "audio_preserve_pitch": (False, SAME),
}

DATASET_HARMLESS = {
    key: (value, {"num_frames": 1})
    for key, value in {"shrink_video_to_frames": True, "fps": 24, "do_i2v": True}.items()
}
CLIPS = {"num_frames": 9}

DATASET_REFUSED = {
    "cache_latents": False,
    "cache_latents_to_disk": False,
    "default_caption": "a cat",
    "mask_path": "masks",
    "invert_mask": True,
    "network_weight": 0.5,
    "flip_y": True,
    "batch_size": 2,
    "controls": ["depth"],
    "num_frames": "all",
    "fps": "fast",
    "do_i2v": "often",
    "do_audio": True,
    "auto_frame_count": True,
    "audio_normalize": True,
    "audio_preserve_pitch": True,
}

AI_TOOLKIT = """
job: extension
config:
  name: my_first_lora_v1
  process:
    - type: diffusion_trainer
      training_folder: output
      sqlite_db_path: ./aitk_db.db
      device: cuda
      trigger_word: null
      performance_log_every: 10
      network:
        {type: lora, linear: 32, linear_alpha: 32, conv: 16, conv_alpha: 16, lokr_full_rank: true,
         lokr_factor: -1, network_kwargs: {ignore_if_contains: []}}
      save:
        {dtype: bf16, save_every: 250, max_step_saves_to_keep: 4, save_format: diffusers, push_to_hub: false}
      datasets:
        - {folder_path: cats, mask_path: null, mask_min_value: 0.1, default_caption: '',
           caption_ext: txt, caption_dropout_rate: 0.05, cache_latents_to_disk: false, is_reg: false,
           network_weight: 1, resolution: [512, 768, 1024], controls: [], shrink_video_to_frames: true,
           num_frames: 1, flip_x: false, flip_y: false, num_repeats: 1}
      train:
        {batch_size: 1, bypass_guidance_embedding: true, steps: 3000, gradient_accumulation: 1,
         train_unet: true, train_text_encoder: false, gradient_checkpointing: true,
         noise_scheduler: flowmatch, optimizer: adamw8bit, timestep_type: sigmoid, content_or_style: balanced,
         optimizer_params: {weight_decay: 0.0001}, unload_text_encoder: false, cache_text_embeddings: false,
         lr: 0.0001, ema_config: {use_ema: false, ema_decay: 0.99}, skip_first_sample: false,
         force_first_sample: false, disable_sampling: false, dtype: bf16, diff_output_preservation: false,
         diff_output_preservation_multiplier: 1.0, diff_output_preservation_class: person,
         switch_boundary_every: 1, loss_type: mse}
      logging: {log_every: 1, use_ui_logger: true}
      model:
        {name_or_path: ostris/Flex.1-alpha, quantize: true, qtype: qfloat8, quantize_te: true,
         qtype_te: qfloat8, arch: flex1, low_vram: false, model_kwargs: {}, compile: false}
      sample:
        {sampler: flowmatch, sample_every: 250, sample_start_step: 0, width: 1024, height: 1024,
         samples: [{prompt: a cat}], neg: '', seed: 42, walk_seed: true, guidance_scale: 4, sample_steps: 30,
         num_frames: 1, fps: 1}
meta: {name: '[name]', version: '1.0'}
"""
"""What ai-toolkit's web page begins with (ui/src/app/jobs/new/jobConfig.ts)."""

AI_TOOLKIT_REFUSED = {
    "datasets[0].cache_latents_to_disk": True,
    "model.name_or_path": "flex.safetensors",
    "model.quantize_te": False,
    "train.bypass_guidance_embedding": False,
    "train.cache_text_embeddings": True,
}
"""Key -> what Graft can do, of those that have to be changed there."""


def setting(job, target):
    """What a job has under "node.input", "job.attribute", "document.key", or how many "nodes.Kind" it has."""
    node, _, name = target.partition(".")
    if node == "job":
        return attrgetter(name)(job)
    if node == "document":
        return job.document.get(name)
    return len(job.nodes(name)) if node == "nodes" else job.nodes(NODES[node].kind)[0]["inputs"][name]


def assert_honored(job, expected, without):
    """The job has all that is expected, of which the one without the key has at least something otherwise."""
    if expected is SAME:
        assert replace(job, document={}) == replace(without, document={})
        return
    assert {target: setting(job, target) for target in expected} == expected
    assert job != without


def test_the_tables_of_this_test_are_complete():
    known = HONORED.keys() | REFUSED.keys() | HARMLESS.keys() | {"config.process"}
    assert known == ROOT_KEYS.keys() | KEYS.keys()
    assert DATASET.keys() | DATASET_HARMLESS.keys() == DATASET_KEYS.keys()


def test_a_key_that_changes_nothing_is_refused_with_another_value_or_harmless_for_a_reason():
    for honored, refused in ((HONORED, REFUSED), (DATASET, DATASET_REFUSED)):
        assert {key for key, (_, expected) in honored.items() if expected is SAME} <= refused.keys()
    for table, harmless in ((KEYS, HARMLESS), (DATASET_KEYS, DATASET_HARMLESS)):
        reasons = {key: read for key, read in table.items() if isinstance(read, Beside)}
        assert reasons.keys() == harmless.keys() and all(read.why for read in reasons.values())
        assert all([read.switch] == list(harmless[key][1]) for key, read in reasons.items())


@pytest.mark.parametrize("key", HONORED)
def test_a_key_of_the_layout_is_honored(key, tmp_path):
    value, expected = HONORED[key]
    without = compile_job(put(document(), NEEDED.get(key, {})), tmp_path)
    assert_honored(compile_job(document(key, value), tmp_path), expected, without)


@pytest.mark.parametrize("key", HARMLESS)
def test_a_harmless_key_changes_nothing_beside_its_switch_and_is_refused_without(key, tmp_path):
    value, switch = HARMLESS[key]
    needed = NEEDED.get(key, {}) | switch
    both = compile_job(put(document(), needed | {key: value}), tmp_path)
    assert both.prompt == compile_job(put(document(), needed), tmp_path).prompt
    alone = {name: needed[name] for name in needed.keys() - switch.keys()} | {key: value}
    with pytest.raises(ValueError, match=rf"^{key}: .* has no effect without {next(iter(switch))}: "):
        compile_job(put(document(), alone), tmp_path)
    assert key in HONORED or switch == {"model.layer_offloading": True} or REFUSED.keys() >= switch.keys()


@pytest.mark.feature(34, 77)
@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_cannot_be_honored_is_refused_by_name(key, tmp_path):
    with pytest.raises(ValueError, match=key.replace("[", r"\[")):
        compile_job(document(key, REFUSED[key]), tmp_path)


@pytest.mark.parametrize("key", DATASET)
def test_a_key_of_a_dataset_is_honored(key, tmp_path):
    value, expected = DATASET[key]
    needed = CLIPS if key in DATASET_HARMLESS else {}
    without = compile_job(document(**needed), tmp_path)
    assert_honored(compile_job(document(**needed | {key: value}), tmp_path), expected, without)


@pytest.mark.parametrize("key", DATASET_HARMLESS)
def test_a_harmless_key_of_a_dataset_is_refused_without_its_switch(key, tmp_path):
    value, switch = DATASET_HARMLESS[key]
    assert (
        compile_job(document(**switch, **{key: value}), tmp_path).prompt
        == compile_job(document(), tmp_path).prompt
    )
    with pytest.raises(ValueError, match=rf"datasets\[0\].{key}: .* has no effect without datasets"):
        compile_job(document(**{key: value}), tmp_path)


@pytest.mark.parametrize("key", DATASET_REFUSED)
def test_a_key_of_a_dataset_that_cannot_be_honored_is_refused_by_name(key, tmp_path):
    needed = CLIPS if key in DATASET_HARMLESS else {}
    expected = r"Remove the key|Set it to|expected"
    with pytest.raises(ValueError, match=rf"datasets\[0\].{key}: .*({expected})"):
        compile_job(document(**needed | {key: DATASET_REFUSED[key]}), tmp_path)


def test_samples_are_drawn_without_the_assistant_lora_which_is_for_training(tmp_path):
    job = compile_job(document("model.assistant_lora_path", "turbo.safetensors"), tmp_path)
    drawn = compile_job(
        put(document("model.assistant_lora_path", "turbo.safetensors"), {"sample.prompts": ["a cat"]}),
        tmp_path,
    )
    assert not job.nodes("GraftSamplePrompts")
    [prompts], [train] = drawn.nodes("GraftSamplePrompts"), drawn.nodes("GraftTrainSteps")
    assert prompts["inputs"]["model"] == [drawn.node("GraftLoadBaseModel"), 0] != train["inputs"]["model"]


def test_folders_of_references_are_named_in_the_order_of_their_keys(tmp_path):
    (tmp_path / "depth").mkdir()
    job = compile_job(document(control_path_2="depth", control_path_1="cats"), tmp_path)
    [loaded] = [node for node in job.prompt.values() if node["class_type"] == "GraftLoadDataset"]
    assert loaded["inputs"]["references"] == "cats\ndepth"
    assert tmp_path / "depth" in job.folders["graft_datasets"]
    with pytest.raises(ValueError, match=r"datasets\[0\].control_path_1: .*x does not exist"):
        compile_job(document(control_path_1="./x"), tmp_path)


def test_one_attempt_names_all_that_has_to_be_changed(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(AI_TOOLKIT)
    with pytest.raises(ValueError, match=r"job\.yaml: 5 problems:") as error:
        read_job(file)
    assert sorted(line.split(": ")[0] for line in str(error.value).splitlines()[1:]) == [*AI_TOOLKIT_REFUSED]
    whole = yaml.safe_load(AI_TOOLKIT)
    for key, value in AI_TOOLKIT_REFUSED.items():
        place = whole["config"]["process"][0]
        *path, last = key.replace("[0]", ".0").split(".")
        for part in path:
            place = place[int(part) if part.isdigit() else part]
        place[last] = value
    compile_job(whole, tmp_path)


def test_errors_of_one_key_do_not_hide_those_of_several(tmp_path):
    both = document("train.learning_rate", 1e-4)
    both["config"]["process"][0] |= {"sampel": {}, "network": {"conv_alpha": 1}, "type": "x"}
    del both["config"]["name"], both["config"]["process"][0]["datasets"][0]["folder_path"]
    with pytest.raises(ValueError, match="6 problems:") as error:
        compile_job(both, tmp_path)
    for line in ("train.learning_rate", "sampel", "type", "config.name", "network.conv_alpha", "datasets"):
        assert f"\n{line}" in str(error.value)


@pytest.mark.feature(103)
@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("train.gradient_acumulation", 4, "gradient_accumulation"),
        ("train.learning_rate", 1e-4, "lr"),
        ("network.liner", 4, "linear"),
        ("sampel", {"prompts": []}, "sample"),
        ("train.ema_config.use_emma", True, "use_ema"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(key, value, near, tmp_path):
    with pytest.raises(ValueError) as error:
        compile_job(document(key, value), tmp_path)
    assert str(error.value).startswith(f"{key}: unknown") and near in str(error.value)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("low_vram", "'model.low_vram'"),
        ("model.max_grad_norm", "'train.max_grad_norm'"),
        ("train.lr_warmup_steps", "'train.lr_scheduler_params.num_warmup_steps'"),
        ("model.clip_path", "'clip_l_path'"),
        ("network.rank", "'linear'"),
    ],
)
def test_a_refusal_names_the_nearest_keys_in_place_or_elsewhere_and_not_all(key, near, tmp_path):
    with pytest.raises(ValueError) as error:
        compile_job(document(key, 5), tmp_path)
    hint = str(error.value).removeprefix(f"{key}: unknown setting. Did you mean ")
    assert near in hint and len(hint.split(" or ")) <= 3 and "known:" not in hint


@pytest.mark.parametrize("value", [False, None, "", [], {}, {"enabled": False, "project": None}])
@pytest.mark.parametrize("key", ["train.xformers", "model.cpu_offload", "advanced", "logging.wandb_project"])
def test_an_unknown_key_that_asks_for_nothing_is_harmless(key, value, tmp_path):
    whole = put(document(), {key: value})
    assert compile_job(whole, tmp_path).prompt == compile_job(document(), tmp_path).prompt
    with pytest.raises(ValueError, match=f"{key}: unknown setting"):
        compile_job(document(key, {"enabled": True}), tmp_path)


@pytest.mark.parametrize("key", ["train.gradient_chekpointing", "save.save_workflw", "trian"])
def test_a_misspelt_key_is_refused_also_where_it_is_off(key, tmp_path):
    with pytest.raises(ValueError, match=rf"^{key}: unknown setting\. Did you mean"):
        compile_job(put(document(), {key: False}), tmp_path)


def test_an_unknown_key_of_a_dataset_says_which_dataset(tmp_path):
    with pytest.raises(ValueError, match=r"datasets\[0\]\.caption_extt: .* Did you mean 'caption_ext'"):
        compile_job(document(caption_extt="txt"), tmp_path)


def test_keys_that_contradict_one_another_are_refused(tmp_path):
    both = document("train.gradient_accumulation_steps", 2)
    both["config"]["process"][0]["train"]["gradient_accumulation"] = 3
    with pytest.raises(
        ValueError, match="accumulation and train.gradient_accumulation_steps ask for different"
    ):
        compile_job(both, tmp_path)
    flux = document("train.noise_scheduler", "ddpm")
    flux["config"]["process"][0]["model"]["arch"] = "flux"
    with pytest.raises(ValueError, match="noise_scheduler: 'ddpm' does not go with"):
        compile_job(flux, tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"train.optimizer": "adafactor", "train.optimizer_params.betas": [0.8, 0.99]},
            "train.optimizer_params.betas: beta1 0.8 has no effect with optimizer adafactor. Remove the key.",
        ),
        (
            {"train.optimizer": "lion", "train.optimizer_params.eps": "1e-6"},
            "train.optimizer_params.eps: eps 1e-06 has no effect with optimizer lion. Remove the key.",
        ),
        (
            {"train.lr_scheduler": "cosine", "train.lr_scheduler_params.num_cycles": 3},
            "train.lr_scheduler_params.num_cycles: cycles 3 has no effect with schedule cosine; it is for "
            "restarts. Remove the key.",
        ),
        (
            {"network.lokr_factor": 8},
            "network.lokr_factor: factor 8 has no effect with algorithm lora; it is for lokr. Remove the "
            "key.",
        ),
        ({"model.qtype": "nf4"}, "model.qtype: needs model.quantize: true."),
        (
            {"train.diff_output_preservation_class": "dog"},
            "train.diff_output_preservation_class: needs train.diff_output_preservation: true.",
        ),
        (
            {"train.blank_prompt_preservation_multiplier": 2},
            "train.blank_prompt_preservation_multiplier: needs train.blank_prompt_preservation: true.",
        ),
        (
            {"train.blank_prompt_preservation": True, "train.diff_output_preservation": True},
            "train.diff_output_preservation and train.blank_prompt_preservation are both true; keep one.",
        ),
        (
            {"train.diff_output_preservation": True, "trigger_word": "sks"},
            "train.diff_output_preservation_class: missing; it is the word for what the trigger word is an "
            "instance of, such as person. Without one, set train.blank_prompt_preservation: true instead.",
        ),
        (
            {"train.diff_output_preservation": True, "train.diff_output_preservation_class": "dog"},
            "datasets[0].folder_path: train.diff_output_preservation replaces the trigger word in captions, "
            "and these images have none; add trigger_word.",
        ),
        (
            {"train.differential_guidance_scale": 2},
            "train.differential_guidance_scale: needs train.do_differential_guidance: true.",
        ),
        (
            {"save.save_format": "diffusers", "network.type": "lokr"},
            "save.save_format: 'diffusers' is not possible: diffusers knows plain LoRA only, and "
            "network.type is lokr. Set it to safetensors.",
        ),
        (
            {"slider.target_class": "a man"},
            "slider: has no effect without type: concept_slider. Set it, or remove slider.",
        ),
        (
            {"type": "concept_slider", "slider.target_class": "a man"},
            "slider.positive_prompt, slider.negative_prompt: missing or equal; they are what the LoRA brings "
            "at strength 1 and at -1.",
        ),
        ({**WORDS, "slider.anchor_strength": 2}, "slider.anchor_strength: needs slider.anchor_class."),
        (
            {**WORDS, "slider.anchor_class": "trees", "train.blank_prompt_preservation": True},
            "slider.anchor_class: other captions are preserved already; keep one of them.",
        ),
        (
            {"logging.log_every": 5, "performance_log_every": 10},
            "logging.log_every: 5 and performance_log_every: 10 ask for different things; keep one. The log "
            "files have every step.",
        ),
    ],
)
def test_a_key_without_effect_beside_the_others_is_refused(keys, message, tmp_path):
    with pytest.raises(ValueError) as error:
        compile_job(put(document(), keys), tmp_path)
    assert str(error.value) == message


@pytest.mark.parametrize("arch", architectures())
def test_diffusers_names_are_refused_before_training_for_a_family_without_any(arch, tmp_path):
    job = put(document(), {"save.save_format": "diffusers", "model.arch": arch})
    if architectures()[arch].export:
        assert setting(compile_job(job, tmp_path), "save.format") in FILE_FORMATS
    else:
        with pytest.raises(ValueError, match="no diffusers names for .*[.] Set it to safetensors"):
            compile_job(job, tmp_path)


def test_what_ai_toolkit_writes_beside_every_type_of_network_is_no_error(tmp_path):
    network = {"linear": 32, "linear_alpha": 32, "lokr_full_rank": True, "lokr_factor": -1}
    for kind in ("lora", "lokr"):
        job = compile_job(put(document(), {"network": {"type": kind, **network}}), tmp_path)
        assert setting(job, "lora.rank") == 32


def test_the_log_of_every_step_is_printed_as_often_as_performance_log_every_says(tmp_path):
    both = put(document(), {"logging.log_every": 1, "performance_log_every": 10})
    assert compile_job(both, tmp_path).log_every == 10


def test_one_dataset_that_is_to_be_encoded_again_is(tmp_path):
    sets = [{"folder_path": "a"}, {"folder_path": "b", "force_recache": True}]
    job = document()
    job["config"]["process"][0]["datasets"] = sets
    assert setting(compile_job(job, tmp_path), "encode.encode_again") is True
    sets[1]["force_recache"] = False
    assert setting(compile_job(job, tmp_path), "encode.encode_again") is False


def test_a_file_in_the_layout_of_eridiffusions_readme_is_the_same_job(tmp_path):
    file = tmp_path / "sdxl_lora.yaml"
    file.write_text(ERIDIFFUSION)
    with pytest.raises(ValueError, match=r"sdxl_lora\.yaml: datasets: expected a list with at least one"):
        read_job(file)
    file.write_text(ERIDIFFUSION.replace("base.safetensors", "/path/to/sdxl_model.safetensors"))
    with pytest.raises(ValueError, match=r"2 problems:\ndatasets: .*\nmodel\.name_or_path: there is no file"):
        read_job(file)
    file.write_text(ERIDIFFUSION + "datasets: [{folder_path: images}]\nmeta: {version: '1.0'}\n")
    values = yaml.safe_load(file.read_text())
    del values["meta"]
    process = {"type": "sd_trainer", **values}
    same = {"config": {"name": "sdxl_lora", "process": [process]}, "meta": {"version": "1.0"}}
    assert read_job(file).prompt == compile_job(same, tmp_path).prompt
    named = compile_job({**yaml.safe_load(file.read_text()), "name": "cats"}, tmp_path)
    assert named.name == "cats" and setting(named, "optimizer.gradient_accumulation") == 4
    with pytest.raises(ValueError, match=r"network\.liner: unknown setting\. Did you mean 'linear'"):
        compile_job(values | {"network": {"liner": 4}}, tmp_path, name="x")


@pytest.mark.parametrize("name", ["/path/to/images/folder", "./pictures", "~/no such folder"])
def test_a_folder_that_is_not_there_is_named_with_all_other_errors(name, tmp_path):
    with pytest.raises(ValueError, match="2 problems:") as error:
        compile_job(document("train.steps", "many", folder_path=name), tmp_path)
    assert "train.steps: expected a number" in str(error.value)
    assert "does not exist; give the folder of your images" in str(error.value)


def test_a_dataset_that_comfyui_may_have_is_asked_for(tmp_path):
    asked = []

    def has_dataset(name):
        asked.append(name)
        return name == "cats"

    compile_job(document(folder_path="cats"), tmp_path, has_dataset=has_dataset)
    with pytest.raises(ValueError, match=r"datasets\[0\]\.folder_path: dogs does not exist, neither beside"):
        compile_job(document(folder_path="dogs"), tmp_path, has_dataset=has_dataset)
    (tmp_path / "dogs").mkdir()
    compile_job(document(folder_path="dogs"), tmp_path, has_dataset=has_dataset)
    assert asked == ["cats", "dogs"]
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; give the folder that it lies in"):
        compile_job(document(folder_path="file"), tmp_path)


def test_the_guidance_scale_of_flux_is_its_distilled_one(tmp_path):
    flux = document("sample.guidance_scale", 4)
    assert setting(compile_job(flux, tmp_path), "sample.guidance") == -1.0
    flux["config"]["process"][0]["model"]["is_flux"] = True
    job = compile_job(flux, tmp_path)
    assert (setting(job, "sample.cfg"), setting(job, "sample.guidance")) == (1.0, 4.0)
    del flux["config"]["process"][0]["sample"]["guidance_scale"]
    job = compile_job(flux, tmp_path)
    assert (setting(job, "sample.cfg"), setting(job, "sample.guidance")) == (1.0, -1.0)


def test_convolutions_get_a_rank_and_an_alpha_of_their_own(tmp_path):
    network = {"linear": 16, "linear_alpha": 8, "conv": 4, "conv_alpha": 2}
    job = compile_job(document("network", network), tmp_path)
    assert setting(job, "lora.rank") == 16 and setting(job, "lora.alpha") == 8.0
    assert "*.in_layers.2 = 4\n" in setting(job, "lora_settings.ranks")
    assert "*.in_layers.2 = 2\n" in setting(job, "lora_settings.alphas")
    same = compile_job(document("network", {"linear": 16, "conv": 16}), tmp_path)
    assert not same.nodes("GraftLoraSettings")


@pytest.mark.parametrize(
    ("model", "targets"), [({"arch": "flux"}, "attn-mlp"), ({"arch": "sdxl"}, "all"), ({}, "all")]
)
def test_a_rank_of_convolutions_changes_nothing_in_a_model_without_any(model, targets, tmp_path):
    whole = document("network", {"linear": 16, "conv": 4})
    whole["config"]["process"][0]["model"] |= model
    job = compile_job(whole, tmp_path)
    assert setting(job, "lora.targets") == targets
    assert bool(job.nodes("GraftLoraSettings")) is (targets == "all")


def objective(tmp_path, arch, **train):
    whole = document("train", train)
    whole["config"]["process"][0]["model"]["arch"] = arch
    found = compile_job(whole, tmp_path).nodes("GraftObjectiveSettings")
    return from_dict(ObjectiveConfig, found[0]["inputs"]) if found else ObjectiveConfig()


def ai_toolkit_levels(name, arch, u):
    """Noise levels at the quantiles u for 1024 pixels (toolkit/samplers/custom_flowmatch_sampler.py)."""
    if name in ("linear", "sigmoid"):
        return {"linear": u, "sigmoid": torch.sigmoid(torch.special.ndtri(u))}[name]
    if arch == "flux":
        return math.exp(1.15) / (math.exp(1.15) + (1 / u - 1))  # dynamic shifting by mu, 1.15 at 4096 tokens
    shift = {"sd3": 3.0, "zimage": 3.0, "hidream": 3.0, "lumina2": 6.0}[arch]
    return shift * u / (1 + (shift - 1) * u)


@pytest.mark.parametrize("arch", ["flux", "sd3", "zimage", "hidream", "lumina2"])
@pytest.mark.parametrize("name", ["linear", "sigmoid", "shift", "flux_shift"])
def test_timestep_types_draw_the_levels_that_ai_toolkit_draws(name, arch, tmp_path):
    config, generator = objective(tmp_path, arch, timestep_type=name), torch.Generator().manual_seed(0)
    sampling, family = Flow(), architectures()[arch]
    drawn = draw_sigmas(4000, config, family, sampling, generator=generator, tokens=4096).sort().values
    u = (torch.arange(4000) + 0.5) / 4000
    torch.testing.assert_close(drawn, ai_toolkit_levels(name, arch, u), atol=5e-3, rtol=0)


@pytest.mark.parametrize("arch", ["chroma", "qwen_image"])
def test_a_shift_that_ai_toolkit_has_otherwise_is_refused(arch, tmp_path):
    with pytest.raises(ValueError, match=rf"timestep_type: Graft shifts {arch} otherwise"):
        objective(tmp_path, arch, timestep_type="shift")
    assert objective(tmp_path, arch, timestep_type="linear").shift == 1.0


def test_a_timestep_type_says_nothing_about_a_model_that_is_no_flow(tmp_path):
    assert objective(tmp_path, "sdxl", timestep_type="sigmoid") == ObjectiveConfig()


def test_style_takes_the_levels_at_the_cube_of_their_quantile(tmp_path):
    config, u = objective(tmp_path, "flux", content_or_style="style"), torch.linspace(0.01, 0.99, 9)
    torch.testing.assert_close(apply_bias(u, config.bias), u**3)


@pytest.mark.parametrize("arch", [*architectures(), "zimage:turbo", "qwen_image:2512"])
def test_an_architecture_that_has_a_family_is_accepted(arch, tmp_path):
    compile_job(document("model.arch", arch), tmp_path)


@pytest.mark.parametrize("arch", ["wan22_14b:t2v", "hidream_e1", "omnigen2", "mageflow_edit"])
def test_an_architecture_without_a_family_is_refused_by_name(arch, tmp_path):
    with pytest.raises(ValueError, match=rf"model\.arch: '{arch.partition(':')[0]}' is not one of"):
        compile_job(document("model.arch", arch), tmp_path)


def rounded(qtype):
    return document("model", {"name_or_path": "base.safetensors", "quantize": True, "qtype": qtype})


@pytest.mark.parametrize(("qtype", "base"), [("float8", "fp8"), ("int8", "int8"), ("nf4", "nf4")])
def test_the_format_of_a_rounded_base_is_honored(qtype, base, tmp_path):
    assert setting(compile_job(rounded(qtype), tmp_path), "memory.base") == base


def test_a_format_that_graft_does_not_round_to_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.qtype: 'uint4' is not one of .* 4 bits are nf4"):
        compile_job(rounded("uint4"), tmp_path)


@pytest.mark.parametrize(("kind", "nodes"), [("lora", 0), ("lokr", 1)])
def test_a_full_rank_is_lokrs_alone(kind, nodes, tmp_path):
    job = compile_job(document("network", {"type": kind, "lokr_full_rank": True}), tmp_path)
    assert len(job.nodes("GraftLoraSettings")) == nodes


def test_a_guidance_embedding_can_be_bypassed_only_where_there_is_none(tmp_path):
    whole = document("train.bypass_guidance_embedding", True)
    whole["config"]["process"][0]["model"]["arch"] = "zimage"
    compile_job(whole, tmp_path)


def test_what_goes_into_the_lora_names_no_folder(tmp_path):
    (tmp_path / "anna" / "cats").mkdir(parents=True)
    whole = document("save", {"save_workflow": True}, folder_path=f"{tmp_path}/anna/cats/")
    (tmp_path / "b.safetensors").touch()
    process = whole["config"]["process"][0]
    process |= {"training_folder": r"C:\Users\anna\out", "sqlite_db_path": "/home/anna/x.db"}
    files = ("name_or_path", "vae_path", "clip_l_path", "t5_path", "text_encoder_path")
    process["model"] = dict.fromkeys(files, f"{tmp_path}/b.safetensors")
    process["sample"] = {"prompts": ["a/b"]}
    kept = compile_job(whole, tmp_path).document["config"]["process"][0]
    assert kept["datasets"] == [{"folder_path": "cats"}] and kept["sample"] == {"prompts": ["a/b"]}
    assert kept["training_folder"] == "out" and set(kept["model"].values()) == {"b.safetensors"}
    assert "anna" not in str(kept) and tmp_path.name not in str(kept)


def test_sampling_can_be_switched_off(tmp_path):
    off = document("sample.guidance_scale", 4)
    off["config"]["process"][0]["train"] = {"disable_sampling": True}
    assert not compile_job(off, tmp_path).nodes("GraftSamplePrompts")


def test_several_datasets_are_joined_with_their_own_settings(tmp_path):
    whole = document()
    sets = [{"folder_path": f"set{i}", "num_repeats": i + 1} for i in range(6)]
    whole["config"]["process"][0]["datasets"] = sets
    job = compile_job(whole, tmp_path)
    assert [node["inputs"]["repeats"] for node in job.nodes("GraftLoadDataset")] == [1, 2, 3, 4, 5, 6]
    wired = {wire[0] for node in job.nodes("GraftJoinDatasets") for wire in node["inputs"].values()}
    assert len(job.nodes("GraftJoinDatasets")) == 2
    assert {job_key for job_key, n in job.prompt.items() if n["class_type"] == "GraftLoadDataset"} <= wired


def test_files_beside_the_job_are_registered_and_others_are_comfyuis(tmp_path):
    (tmp_path / "base.safetensors").touch()
    (tmp_path / "images").mkdir()
    job = compile_job(document(), tmp_path)
    assert job.folders["checkpoints"] == job.folders["diffusion_models"] == (tmp_path.resolve(),)
    assert job.folders["graft_datasets"] == ((tmp_path / "images").resolve(),)
    assert compile_job(document(), tmp_path / "images").folders == {}


def test_two_files_of_one_name_are_refused_as_only_one_would_be_found(tmp_path):
    whole = document()
    for folder, key in (("te1", "clip_l_path"), ("te2", "t5_path")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").touch()
        whole["config"]["process"][0]["model"][key] = f"{folder}/model.safetensors"
    with pytest.raises(
        ValueError, match="t5_path: two files or folders are named 'model.safetensors'; rename one of them"
    ):
        compile_job(whole, tmp_path)


@pytest.mark.parametrize("missing", ["name", "process"])
def test_what_a_job_needs_is_named_when_it_is_missing(missing, tmp_path):
    whole = document()
    del whole["config"][missing]
    with pytest.raises(ValueError, match=f"config.{missing}"):
        compile_job(whole, tmp_path)


def test_a_file_that_runs_code_or_is_no_yaml_is_refused(tmp_path):
    file = tmp_path / "job.yaml"
    for text in ("!!python/object/apply:os.system ['true']", "a: [", "- 1"):
        file.write_text(text)
        with pytest.raises(ValueError, match="job.yaml"):
            read_job(file)


@pytest.mark.parametrize("file", sorted(JOBS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_example_jobs_compile(file):
    job = read_job(file)
    assert job.nodes("GraftTrainSteps") and yaml.safe_load(file.read_text(encoding="utf-8"))


def test_what_a_file_leaves_out_is_as_ai_toolkit_has_it(tmp_path):
    job = document("train.optimizer", "prodigy")
    assert setting(compile_job(job, tmp_path), "train.learning_rate") == 1.0
    assert not compile_job(job, tmp_path).nodes("GraftObjectiveSettings")
    job["config"]["process"][0]["model"]["arch"] = "flux"
    assert setting(compile_job(job, tmp_path), "objective.sigmas") == "sigmoid"


def test_every_other_picture_is_a_regularisation_image_where_there_are_any(tmp_path):
    sets = [{"folder_path": "a"}, {"folder_path": "b", "is_reg": True}, {"folder_path": "c"}]
    job = document()
    job["config"]["process"][0]["datasets"] = sets
    joins = [node["inputs"] for node in compile_job(job, tmp_path).nodes("GraftJoinDatasets")]
    assert [inputs.get("shares", "") for inputs in joins] == ["", "1, 1"]


def test_a_file_without_an_end_to_its_lists_is_refused(tmp_path):
    file = tmp_path / "deep.yaml"
    file.write_text("[" * 20_000)
    with pytest.raises(ValueError, match=r"deep\.yaml: its lists are nested too deep"):
        read_job(file)


ODD = {
    "aliases of aliases": (
        "job: extension\nconfig: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij")),
        "its aliases",
    ),
    "an alias of itself": ("a: &a [*a]", "its aliases"),
    "merged aliases": (
        "a: &a {k: 1}\n"
        + "".join(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n" for a, b in pairwise("abcdefghij")),
        "its aliases",
    ),
    "a day that there is not": ("job: extension\nconfig: 2020-99-99", r"line 2: '2020-99-99' is not what"),
    "a number of 9,999 digits": ("job: " + "9" * 9999, r"line 1: '9+\.\.\.9+' is not what"),
    "a truth that is none": ("job: !!bool perhaps", "line 1: 'perhaps' is not what"),
    "half a letter": ('job: "\\ud83d"', r"line 1: '\\ud83d' holds half of a letter"),
    "a megabyte": ("job: " + "x" * 2**20, "more than 256 KB"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_file_that_does_harm_is_refused_by_its_name(case, tmp_path):
    text, reason = ODD[case]
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"^odd\.yaml: {reason}") as raised:
        read_job(tmp_path / "odd.yaml")
    assert len(str(raised.value)) < 1000


def test_aliases_and_merged_keys_that_people_write_are_read(tmp_path):
    job = document()
    job["config"]["process"][0]["datasets"] = [{"folder_path": "a"}] * 3
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))  # writes aliases for what is there again
    assert "&id001" in (tmp_path / "job.yaml").read_text()
    assert len(read_job(tmp_path / "job.yaml").nodes("GraftLoadDataset")) == 3


def test_a_refusal_shows_little_of_a_large_value_and_of_many(tmp_path):
    large = document("train.lr", ["x" * 1000] * 100)
    with pytest.raises(ValueError, match=r"train\.lr: expected a number") as raised:
        compile_job(large, tmp_path)
    assert len(str(raised.value)) < 1000
    many = document() | {f"key{i}": 1 for i in range(1000)}
    with pytest.raises(ValueError, match=r"^1000 problems:\n(.*\n){50}\.\.\. and 950 more$"):
        compile_job(many, tmp_path)


def test_what_is_not_a_number_is_refused_as_such(tmp_path):
    with pytest.raises(ValueError, match=r"train\.lr: expected a number, found nan"):
        compile_job(document("train.lr", float("nan")), tmp_path)


def test_a_path_that_no_system_takes_is_refused_by_the_files_name(tmp_path):
    job = document()
    job["config"]["process"][0]["datasets"] = [{"folder_path": "x" * 5000}]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(ValueError, match=r"^job\.yaml: .*name too long"):
        read_job(tmp_path / "job.yaml")


@pytest.mark.parametrize("name", ["oft", "boft", "glora", "full", "diag-oft"])
def test_methods_beside_lora_have_their_names(name, tmp_path):
    job = compile_job(document("network.type", name), tmp_path)
    assert setting(job, "lora.algorithm") == name.removeprefix("diag-")
