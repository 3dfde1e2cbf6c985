"""What a LoRA file says about itself, key by key as sd-scripts, modelspec and ComfyUI read it."""

import base64
import hashlib
import io
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import save

from graft.tests.support.clips import moving, write_clip
from graft.tests.support.datasets import SMALL, FakeEncoder, add, picture
from graft.tests.support.sounds import wave, write_sound
from graft.tests.support.tiny import Flow
from graft.training.config import AdapterConfig, MemoryConfig, ObjectiveConfig, TrainConfig
from graft.training.data import encode, join, scan
from graft.training.data.slider_words import SliderWords
from graft.training.family import FAMILIES
from graft.training.files.lora.metadata import COVER_SIDE, lora_metadata, run_metadata, with_hashes
from graft.training.files.lora.write import lora_key
from graft.training.state import TrainState

CONFIG = TrainConfig(batch_size=2, seed=5, objective=ObjectiveConfig(noise_offset=0.05))


@pytest.fixture
def dataset(tmp_path):
    """Two folders: three images with a trigger word, one without."""
    folders = []
    for title, count in (("cat", 3), ("rest", 1)):
        (tmp_path / title).mkdir()
        for number in range(count):
            add(tmp_path / title, f"{title}{number}.png", "a picture, red")
        trigger = "zkw cat" if title == "cat" else ""
        config = replace(SMALL, caption=replace(SMALL.caption, trigger=trigger))
        folders.append(scan(tmp_path / title, config))
    return encode(join(folders), FakeEncoder(), tmp_path / "cache")


def state(notes=None, **adapter):
    return TrainState(7, AdapterConfig(rank=4, alpha=2.0, **adapter), "base", {}, notes=notes or {})


def test_the_run_is_described_as_sd_scripts_does(dataset):
    found = run_metadata(CONFIG, dataset, FAMILIES["SD35Medium"], Flow(), name="kitty")
    expected = {
        "ss_output_name": "kitty",
        "ss_seed": "5",
        "ss_learning_rate": "0.0001",
        "ss_batch_size_per_device": "2",
        "ss_num_train_images": "4",
        "ss_resolution": "(64, 64)",
        "modelspec.resolution": "64x64",
        "ss_noise_offset": "0.05",
        "ss_min_snr_gamma": "None",
        "ss_timestep_sampling": "logit-normal",
        "ss_discrete_flow_shift": "3.0",
        "ss_zero_terminal_snr": "False",
        "ss_loss_type": "l2",
    }
    assert {key: found[key] for key in expected} == expected
    assert json.loads(found["ss_dataset_dirs"])["cat"] == {"n_repeats": 1, "img_count": 3}
    assert json.loads(found["ss_bucket_info"])["buckets"]["0"] == {"resolution": [64, 64], "count": 4}
    assert json.loads(found["graft_config"])["seed"] == 5
    assert "modelspec.prediction_type" not in found


def test_the_texts_of_a_slider_are_written_down(dataset, monkeypatch):
    assert "graft_slider" not in run_metadata(CONFIG, dataset, FAMILIES["Flux"], Flow(), name="kitty")
    words = SliderWords(positive="old", negative="young")
    monkeypatch.setattr(dataset, "images", replace(dataset.images, words=words))
    found = run_metadata(CONFIG, dataset, FAMILIES["Flux"], Flow(), name="kitty")
    assert json.loads(found["graft_slider"]) == {
        **{"positive": "old", "negative": "young", "neutral": ""},
        **{"guidance": 3.0, "anchor": ""},
    }


def test_every_setting_that_is_not_the_default_is_written_down(dataset):
    config = replace(
        CONFIG,
        gradient_accumulation=3,
        adapter=AdapterConfig(dropout=0.1, max_norm=2.0, text_encoder=0.5),
        objective=ObjectiveConfig(
            loss="pseudo-huber", weighting="min-snr", guidance=3.5, min_noise=0.1, max_noise=0.9
        ),
        memory=MemoryConfig(dtype="fp32", checkpointing="none"),
    )
    found = run_metadata(config, dataset, FAMILIES["Flux"], Flow(), name="kitty")
    expected = {
        "ss_total_batch_size": "6",
        "ss_text_encoder_lr": "5e-05",
        "ss_network_dropout": "0.1",
        "ss_scale_weight_norms": "2.0",
        "ss_huber_c": "0.1",
        "ss_min_snr_gamma": "5.0",
        "ss_debiased_estimation": "False",
        "ss_guidance_scale": "3.5",
        "ss_mixed_precision": "no",
        "ss_gradient_checkpointing": "False",
        "modelspec.timestep_range": "100,900",
        "ss_v2": "False",
    }
    assert {key: found[key] for key in expected} == expected
    plain = run_metadata(CONFIG, dataset, FAMILIES["Flux"], Flow(), name="kitty")
    assert plain["ss_guidance_scale"] == "1.0" and "modelspec.timestep_range" not in plain
    debiased = replace(CONFIG, objective=ObjectiveConfig(weighting="debiased"))
    found = run_metadata(debiased, dataset, FAMILIES["Flux"], Flow(), name="kitty")
    assert found["ss_debiased_estimation"] == "True"


def test_what_one_of_several_folders_does_is_written_down(tmp_path):
    add(tmp_path / "a", "a.png", "a, b"), add(tmp_path / "b", "b.png", "a, b", picture(128, 64))
    caption = replace(SMALL.caption, shuffle=True, keep_tokens=2, dropout=0.1, tag_dropout=0.2)
    augment = replace(SMALL.augment, flip=True, brightness=0.1, crop="random", variations=2)
    bucket = replace(SMALL.bucket, resolutions=(64, 128))
    more = replace(SMALL, caption=caption, augment=augment, bucket=bucket, regularisation=True)
    dataset = encode(
        join([scan(tmp_path / "a", SMALL), scan(tmp_path / "b", more)]), FakeEncoder(), tmp_path / "cache"
    )
    found = run_metadata(CONFIG, dataset, FAMILIES["SDXL"], Flow(), name="x")
    expected = {
        "ss_num_train_images": "2",
        "ss_num_reg_images": "1",
        "ss_resolution": "(128, 128)",
        "ss_enable_bucket": "True",
        "ss_bucket_no_upscale": "False",
        "ss_flip_aug": "True",
        "ss_color_aug": "True",
        "ss_random_crop": "True",
        "ss_shuffle_caption": "True",
        "ss_keep_tokens": "2",
        "ss_caption_dropout_rate": "0.1",
        "ss_caption_tag_dropout_rate": "0.2",
    }
    assert {key: found[key] for key in expected} == expected
    sides = [side for size in dataset.index.buckets for side in size]
    assert (int(found["ss_min_bucket_reso"]), int(found["ss_max_bucket_reso"])) == (min(sides), max(sides))


def test_a_clips_frames_are_no_size_and_sounds_have_none(tmp_path):
    write_clip(tmp_path / "clips" / "a.mp4", moving(9))
    write_sound(tmp_path / "sounds" / "a.wav", wave(1.0))
    clips, sounds = (
        encode(scan(tmp_path / name, replace(SMALL, **settings)), FakeEncoder(), tmp_path / "cache")
        for name, settings in (("clips", {"frames": 9}), ("sounds", {"seconds": 0.5}))
    )
    found = run_metadata(CONFIG, clips, FAMILIES["WAN21_T2V"], Flow(), name="x")
    assert found["ss_min_bucket_reso"] == found["ss_max_bucket_reso"] == "64"
    assert json.loads(found["ss_bucket_info"])["buckets"]["0"]["resolution"] == [64, 64, 9]
    found = run_metadata(CONFIG, sounds, FAMILIES["ACEStep"], Flow(), name="x")
    assert not [key for key in found if "resolution" in key or "bucket" in key]


def test_layers_have_the_keys_of_sd_scripts_and_native_ones_where_it_has_none():
    path = "text_encoders.clip_g.transformer.text_model.encoder.layers.3.mlp.fc1"
    assert lora_key(path, FAMILIES["SDXL"]) == "lora_te2_text_model_encoder_layers_3_mlp_fc1"
    assert lora_key("input_blocks.4.1.proj_in", FAMILIES["SDXL"]) == "lora_unet_input_blocks_4_1_proj_in"
    native = replace(FAMILIES["SDXL"], key_prefix="")
    assert lora_key("input_blocks.4.1.proj_in", native) == "diffusion_model.input_blocks.4.1.proj_in"


def test_the_prediction_type_is_that_of_the_model_sampling_on_the_wire(dataset):
    class V_PREDICTION(Flow):  # noqa: N801 - ComfyUI's name
        pass

    for sampling, word in ((Flow(), "epsilon"), (V_PREDICTION(), "v")):
        found = run_metadata(CONFIG, dataset, FAMILIES["SDXL"], sampling, name="x")
        assert found["modelspec.prediction_type"] == word


@pytest.mark.parametrize(
    "family, architecture, base, module",
    [
        ("SDXL", "stable-diffusion-xl-v1-base/lora", "sdxl_base_v1-0", "networks.lora"),
        ("SD35Large", "stable-diffusion-3-5-large/lora", "5-large", "networks.lora_sd3"),
        ("GraftStarter", "graft-starter/lora", "graft_starter", "networks.lora_sd3"),
        ("SD35Medium", "stable-diffusion-3-5-medium/lora", "5-medium", "networks.lora_sd3"),
        ("Flux", "flux-1-dev/lora", "flux1", "networks.lora_flux"),
        ("FluxSchnell", "flux-1-schnell/lora", "flux1", "networks.lora_flux"),
    ],
)
def test_every_family_is_named_as_loaders_and_sites_know_it(family, architecture, base, module):
    found = lora_metadata(state(), FAMILIES[family], title="kitty")
    assert found["modelspec.architecture"] == architecture
    assert found["ss_base_model_version"] == base
    assert found["ss_network_module"] == module
    assert (found["ss_network_dim"], found["ss_network_alpha"]) == ("4", "2.0")
    assert {"modelspec.sai_model_spec", "modelspec.implementation", "modelspec.title"} <= set(found)
    lycoris = lora_metadata(state(algorithm="loha"), FAMILIES[family], title="kitty")
    assert lycoris["ss_network_module"] == "lycoris.kohya"
    assert json.loads(lycoris["ss_network_args"]) == {"algo": "loha"}


def test_the_trigger_word_is_the_only_tag_that_model_browsers_find(dataset):
    notes = run_metadata(CONFIG, dataset, FAMILIES["SDXL"], Flow(), name="x")
    found = lora_metadata(state(notes), FAMILIES["SDXL"], title="x")
    assert found["modelspec.trigger_phrase"] == "zkw cat"
    assert json.loads(found["trained_words"]) == ["zkw cat"]
    assert json.loads(found["ss_tag_frequency"]) == {"cat": {"zkw cat": 3}, "rest": {"zkw cat": 1}}
    other = lora_metadata(state(notes), FAMILIES["SDXL"], title="x", trigger="other")
    assert json.loads(other["trained_words"]) == ["other"]
    without = lora_metadata(state(), FAMILIES["SDXL"], title="x")
    assert "trained_words" not in without and "ss_tag_frequency" not in without


@pytest.mark.parametrize("said", ["[" * 100_000, "{", "1", '{"cat": 3}', '{"cat": {}}'])
def test_a_state_with_an_unreadable_note_on_its_folders_is_saved_with_its_trigger_words(said):
    found = lora_metadata(state({"ss_dataset_dirs": said}), FAMILIES["SD3"], title="cat", trigger="zkw cat")
    assert json.loads(found["ss_tag_frequency"]) == {"images": {"zkw cat": 1}}
    assert found["ss_dataset_dirs"] == said


def test_epochs_count_the_batches_of_accumulated_steps():
    notes = {"ss_num_batches_per_epoch": "10", "ss_gradient_accumulation_steps": "4"}
    trained = replace(state(notes), step=100)
    assert lora_metadata(trained, FAMILIES["SDXL"], title="x")["ss_epoch"] == "40"


def test_dates_are_those_of_the_training_not_of_the_saving():
    found = lora_metadata(state(), FAMILIES["SDXL"], title="x", finished=86400.0, seconds=100.0)
    assert found["modelspec.date"] == "1970-01-02T00:00:00+00:00"
    assert float(found["ss_training_finished_at"]) - float(found["ss_training_started_at"]) == 100.0


@pytest.mark.feature(134)
def test_the_cover_is_a_small_picture_that_both_readers_can_open():
    found = lora_metadata(state(), FAMILIES["SDXL"], title="x", cover=torch.rand(1024, 768, 3))
    [picture] = json.loads(found["ssmd_cover_images"])
    opened = Image.open(io.BytesIO(base64.b64decode(picture)))
    assert opened.size == (COVER_SIDE * 3 // 4, COVER_SIDE)
    assert found["modelspec.thumbnail"] == f"data:image/jpeg;base64,{picture}"
    assert sum(map(len, found.values())) < 8 << 20


def test_hashes_are_of_the_tensors_and_not_of_title_or_cover():
    tensors = {"a": torch.arange(4.0)}
    one, two = (with_hashes(tensors, {"ss_seed": "1", "modelspec.title": title}) for title in "xy")
    assert one["sshs_model_hash"] == two["sshs_model_hash"]
    file = save(tensors)
    body = file[8 + int.from_bytes(file[:8], "little") :]
    assert one["sshs_model_hash"] == hashlib.sha256(body).hexdigest()
    assert one["modelspec.hash_sha256"] == f"0x{one['sshs_model_hash']}"
    assert len(one["sshs_legacy_hash"]) == 8
