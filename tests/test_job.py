"""The job file: every key of the layout is honoured, or refused by name with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import graft
from graft.training.job import compile_job, read_job
from graft.training.job_graph import NODES
from graft.training.job_keys import DATASET_KEYS, KEYS, ROOT_KEYS

JOBS = Path(graft.__file__).parent / "example_workflows" / "jobs"

HONOURED = {
    "job": ("extension", {}),
    "meta.name": ("[name]", {}),
    "meta.version": ("1.0", {}),
    "meta.flux_warmup_steps": (5, {"optimizer.warmup_steps": 5}),
    "meta.flux_max_grad_norm": (0.5, {"optimizer.max_grad_norm": 0.5}),
    "meta.flux_seed": (7, {"train.seed": 7}),
    "meta.flux_lora_zero_init": (True, {}),
    "meta.flux_log_every": (9, {}),
    "meta.flux_checkpoint_every": (50, {"checkpoints.steps": 50}),
    "config.name": ("other", {"train.name": "other", "save.name": "other"}),
    "config.process": (None, {}),
    "type": ("flux_trainer", {}),
    "training_folder": ("elsewhere", {}),
    "device": ("cuda:1", {}),
    "trigger_word": ("p3r5on", {"dataset.trigger": "p3r5on"}),
    "performance_log_every": (1000, {}),
    "network.type": ("lokr_full_rank", {"lora.algorithm": "lokr", "lora_settings.full_matrix": True}),
    "network.linear": (8, {"lora.rank": 8}),
    "network.linear_alpha": (4, {"lora.alpha": 4.0}),
    "network.conv": (16, {"lora.targets": "all"}),
    "network.dropout": (0.1, {"lora_settings.dropout": 0.1}),
    "network.lokr_factor": (-1, {"lora_settings.factor": -1}),
    "network.network_kwargs.lr_if_contains": (
        {"attn": 0.5, "mlp": 2},
        {"lora_settings.learning_rates": "*attn* = 0.5\n*mlp* = 2"},
    ),
    "network.network_kwargs.only_if_contains": (["attn"], {"lora.include": "*attn*"}),
    "network.network_kwargs.ignore_if_contains": (["a", "b"], {"lora.exclude": "*a*\n*b*"}),
    "network.ramp_double_blocks": (False, {}),
    "save.dtype": ("float16", {"save.dtype": "fp16"}),
    "save.save_every": (250, {"checkpoints.steps": 250}),
    "save.max_step_saves_to_keep": (4, {"checkpoints.keep": 4}),
    "save.push_to_hub": (False, {}),
    "train.batch_size": (3, {"train.batch_size": 3}),
    "train.steps": (2000, {"train.steps": 2000}),
    "train.gradient_accumulation_steps": (4, {"optimizer.gradient_accumulation": 4}),
    "train.train_unet": (True, {}),
    "train.train_text_encoder": (True, {"lora.text_encoder": 1.0}),
    "train.gradient_checkpointing": (True, {"memory.checkpointing": "block"}),
    "train.noise_scheduler": ("flowmatch", {}),
    "train.optimizer": ("adamw8bit", {"optimizer.optimizer": "adamw8bit"}),
    "train.optimizer_params.weight_decay": (0.1, {"optimizer.weight_decay": 0.1}),
    "train.optimizer_params.d_coef": (2, {"optimizer.d_coef": 2.0}),
    "train.lr": ("1e-4", {"train.learning_rate": 1e-4}),
    "train.lr_scheduler": ("cosine", {"optimizer.schedule": "cosine"}),
    "train.lr_scheduler_params.num_warmup_steps": (10, {"optimizer.warmup_steps": 10}),
    "train.lr_scheduler_params.num_cycles": (3, {"optimizer.cycles": 3}),
    "train.lr_scheduler_params.power": (2, {"optimizer.power": 2.0}),
    "train.max_grad_norm": (0.5, {"optimizer.max_grad_norm": 0.5}),
    "train.seed": (42, {"train.seed": 42}),
    "train.skip_first_sample": (True, {"sample.before_training": False}),
    "train.disable_sampling": (False, {}),
    "train.linear_timesteps": (True, {"objective.sigmas": "uniform"}),
    "train.timestep_type": ("sigmoid", {"objective.sigmas": "sigmoid"}),
    "train.loss_type": ("mae", {"objective.loss": "l1"}),
    "train.noise_offset": (0.05, {"objective.noise_offset": 0.05}),
    "train.min_snr_gamma": (5, {"objective.weighting": "min-snr", "objective.min_snr_gamma": 5.0}),
    "train.ema_config.use_ema": (True, {"optimizer.ema_decay": 0.99}),
    "train.ema_config.ema_decay": (0.999, {"optimizer.ema_decay": 0.999}),
    "train.dtype": ("bf16", {"memory.precision": "bf16"}),
    "train.bypass_guidance_embedding": (False, {}),
    "train.use_layer_streaming": (True, {"memory.base": "offload"}),
    "model.name_or_path": ("b.safetensors", {"base.model": "b.safetensors"}),
    "model.arch": ("flux", {}),
    "model.is_flux": (True, {}),
    "model.is_v3": (True, {}),
    "model.is_sd3": (True, {}),
    "model.is_sdxl": (True, {}),
    "model.is_xl": (True, {}),
    "model.is_auraflow": (False, {}),
    "model.quantize": (True, {"memory.base": "fp8"}),
    "model.compile": (True, {"memory.compile": True}),
    "model.low_vram": (True, {"memory.base": "offload"}),
    "model.vae_path": ("ae.safetensors", {"base.vae": "ae.safetensors"}),
    **{
        f"model.{key}": ("clip.safetensors", {"base.text_encoder_1": "clip.safetensors"})
        for key in ("text_encoder_path", "clip_l_path", "text_encoder_2_path", "clip_g_path", "t5_path")
    },
    "sample.sampler": ("flowmatch", {"sample.sampler": "euler"}),
    "sample.sample_every": (250, {"sample.every": 250}),
    "sample.width": (512, {"sample.width": 512}),
    "sample.height": (768, {"sample.height": 768}),
    "sample.prompts": (["a", "b"], {"sample.prompts": "a\nb"}),
    "sample.neg": ("ugly", {"sample.negative": "ugly"}),
    "sample.seed": (42, {"sample.seed": 42}),
    "sample.walk_seed": (True, {"sample.walk_seed": True}),
    "sample.guidance_scale": (4, {"sample.cfg": 4.0}),
    "sample.sample_steps": (25, {"sample.steps": 25}),
    "tread.enabled": (False, {}),
}
"""Key -> (value, what it sets)."""

REFUSED = {
    "meta.flux_clip_tokenizer": "x",
    "meta.flux_t5_tokenizer": "x",
    "meta.flux_lora_zero_init": False,
    "meta.flux_sigma_min": 0.01,
    "meta.flux_sigma_max": 50,
    "meta.flux_ckpt_dir": "x",
    "network.type": "oft",
    "network.conv_alpha": 3,
    "network.conv": "many",
    "network.ramp_double_blocks": True,
    "network.ramp_target_lr": 1.5e-6,
    "network.ramp_warmup_steps": 1000,
    "network.ramp_type": "linear",
    "save.push_to_hub": True,
    "save.hf_repo_id": "me/mine",
    "save.hf_private": True,
    "train.train_unet": False,
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
    "tread.enabled": True,
    "tread.mask": {"type": "random"},
    "tread.schedule": [{"out": 1, "in": 2}],
    "tread.reinject": {"mode": "residual"},
    "tread.loss": {"route_lambda": 0.1},
    "sample.prompts": [],
}

DATASET = {
    "folder_path": ("cats", {"dataset.folder": "cats"}),
    "caption_ext": ("txt", {"dataset_settings.captions_from": "txt"}),
    "caption_dropout_rate": (0.05, {"dataset.caption_dropout": 0.05}),
    "shuffle_tokens": (True, {"dataset_settings.shuffle_tags": True}),
    "cache_latents": (True, {}),
    "cache_latents_to_disk": (True, {}),
    "resolution": ([512, 768], {"dataset.resolution": "512, 768"}),
    "force_recache": (True, {}),
    "num_repeats": (3, {"dataset.repeats": 3}),
    "flip_x": (True, {"dataset.flip": True}),
    "is_reg": (True, {"dataset_settings.regularisation": True}),
    "trigger_word": ("xyz", {"dataset.trigger": "xyz"}),
}


def document(key="", value=None, **dataset):
    """The least that a job needs, and one key more."""
    process = {
        "type": "sd_trainer",
        "datasets": [{"folder_path": "images", **dataset}],
        "model": {"name_or_path": "base.safetensors"},
    }
    whole = {"config": {"name": "mine", "process": [process]}}
    if key.startswith("sample.") or key == "train.skip_first_sample":
        process["sample"] = {"prompts": ["a cat"]}
    if key and value is not None:
        *path, last = key.split(".")
        place = whole if key in ROOT_KEYS else process
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return whole


def setting(job, target):
    node, _, name = target.partition(".")
    return job.nodes(NODES[node].kind)[0]["inputs"][name]


def test_the_tables_of_this_test_are_complete():
    assert HONOURED.keys() | REFUSED.keys() == ROOT_KEYS.keys() | KEYS.keys()
    assert DATASET.keys() == DATASET_KEYS.keys()


@pytest.mark.parametrize("key", HONOURED)
def test_a_key_of_the_layout_is_honoured(key, tmp_path):
    value, expected = HONOURED[key]
    job = compile_job(document(key, value), tmp_path)
    assert {target: setting(job, target) for target in expected} == expected


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_cannot_be_honoured_is_refused_by_name(key, tmp_path):
    with pytest.raises(ValueError, match=key.replace("[", r"\[")):
        compile_job(document(key, REFUSED[key]), tmp_path)


@pytest.mark.parametrize("key", DATASET)
def test_a_key_of_a_dataset_is_honoured(key, tmp_path):
    value, expected = DATASET[key]
    job = compile_job(document(**{key: value}), tmp_path)
    assert {target: setting(job, target) for target in expected} == expected


@pytest.mark.parametrize("key", ["cache_latents", "cache_latents_to_disk"])
def test_a_dataset_is_always_encoded_once_and_kept(key, tmp_path):
    with pytest.raises(ValueError, match=rf"datasets\[0\].{key}: False is not possible"):
        compile_job(document(**{key: False}), tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("train.gradient_accumulation", 4, "gradient_accumulation_steps"),
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


def test_an_unknown_key_of_a_dataset_says_which_dataset(tmp_path):
    with pytest.raises(ValueError, match=r"datasets\[0\]\.caption_extt: .* Did you mean 'caption_ext'"):
        compile_job(document(caption_extt="txt"), tmp_path)


@pytest.mark.parametrize("name", ["device", "performance_log_every", "training_folder", "meta.version"])
def test_what_concerns_no_node_is_kept_for_the_command_line(name, tmp_path):
    job = compile_job(document(name, HONOURED[name][0]), tmp_path)
    found = {
        "device": job.device == "cuda:1",
        "performance_log_every": job.log_every == 1000,
        "training_folder": job.output == tmp_path / "elsewhere",
        "meta.version": job.document.get("meta") == {"version": "1.0"},
    }
    assert found[name]


def test_keys_that_contradict_one_another_are_refused(tmp_path):
    both = document("train.linear_timesteps", True)
    both["config"]["process"][0]["train"]["timestep_type"] = "sigmoid"
    with pytest.raises(ValueError, match="timestep_type and train.linear_timesteps ask for different"):
        compile_job(both, tmp_path)
    flux = document("train.noise_scheduler", "ddpm")
    flux["config"]["process"][0]["model"]["arch"] = "flux"
    with pytest.raises(ValueError, match="noise_scheduler: 'ddpm' does not go with"):
        compile_job(flux, tmp_path)


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
