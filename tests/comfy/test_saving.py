"""Save LoRA in ComfyUI's executor: formats, what a file says of itself, and files that cannot be written."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from graft.nodes import save_and_load as output
from graft.nodes import train
from graft.tests.support.first_lora import first_lora, four_squares
from graft.training.comfy import paths
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig
from graft.training.family import FAMILIES, family_named
from graft.training.files import whole_file
from graft.training.files.lora.read import read_lora
from graft.training.files.lora.write import lora_tensors
from graft.training.run.saved_state import open_state, save_state
from graft.training.state import TrainState


@pytest.fixture(scope="module", autouse=True)
def images(base):
    four_squares(base)


def saving(name, **inputs):
    """The shipped workflow, saved in another way, without the pictures at its end."""
    prompt = first_lora("saving", steps=1)
    prompt["2"]["inputs"] |= {"trigger": "zkw"}
    prompt["6"]["inputs"] |= {"name": name, **inputs}
    return {key: node for key, node in prompt.items() if int(key) <= 6}


def opened(base, name):
    with safe_open(base / "output" / "loras" / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()


def test_a_diffusers_file_and_a_comfyui_file_come_from_one_state(execute, base):
    execute(saving("kohya"))
    execute(saving("peft", format="diffusers (PEFT)"))
    kohya, peft = opened(base, "kohya")[0], opened(base, "peft")[0]
    assert all(key.startswith("lora_unet_") for key in kohya)
    assert all(key.startswith("transformer.") and ".lora_" in key for key in peft)
    assert not any(key.endswith("alpha") for key in peft)


def test_replacing_another_lora_is_told_and_a_name_may_hold_the_step(execute, base):
    """Load LoRA reads a file once and does not notice that it changed."""

    def text(name, seed=0):
        prompt = saving(name)
        prompt["5"]["inputs"]["seed"] = seed
        return execute(prompt).history_result["outputs"]["6"]["text"][0]

    assert "replaced" not in text("twice") + text("twice-{step}") and "replaced" in text("twice", seed=1)
    assert "step 1, " in text("twice-{step}") and opened(base, "twice-1")[1]["modelspec.title"] == "twice-1"


def test_pictures_that_are_not_encoded_are_refused(execute):
    prompt = saving("raw")
    prompt["5"]["inputs"]["dataset"] = ["2", 0]
    with pytest.raises(RuntimeError, match="these images are not encoded yet; put Encode Dataset in between"):
        execute(prompt)


@pytest.mark.feature(43, 44, 134)
def test_the_file_says_what_it_is(execute, base):
    prompt = saving("named", dtype="fp16")
    prompt["50"] = {
        "class_type": "EmptyImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0},
    }
    prompt["6"]["inputs"]["cover"] = ["50", 0]
    execute(prompt)
    tensors, metadata = opened(base, "named")
    assert {str(t.dtype) for key, t in tensors.items() if not key.endswith("alpha")} == {"torch.float16"}
    assert metadata["modelspec.title"] == "named" and metadata["ss_output_name"] == "saving"
    assert json.loads(metadata["trained_words"]) == ["zkw"]
    assert len(json.loads(metadata["ssmd_cover_images"])) == 1
    assert metadata["ss_num_train_images"] == str(len(list((base / "input" / "four_squares").glob("*.png"))))
    assert float(metadata["ss_training_finished_at"]) > float(metadata["ss_training_started_at"]) > 1e9
    assert len(metadata["sshs_model_hash"]) == 64


def test_text_encoders_are_trained_and_saved_in_the_same_file(execute, base, monkeypatch):
    def with_a_first_token(model, clip):
        """The demo's encoder is zero at the first token, where no norm has a finite slope."""
        with torch.inference_mode():
            clip.cond_stage_model.clip_l.transformer.text_model.embeddings.position_embedding.weight[0] += 1
            clip.cond_stage_model.clip_l.transformer.text_model.embeddings.position_embedding.weight[0, 0] = 0
        return ComfyDenoiser(model, clip)

    monkeypatch.setattr(train, "ComfyDenoiser", with_a_first_token)
    prompt = saving("words")
    prompt["4"]["inputs"]["text_encoder"] = 0.5
    prompt["5"]["inputs"] |= {"steps": 2, "clip": ["1", 1]}
    prompt["51"] = {"class_type": "CLIPTextEncode", "inputs": {"clip": ["5", 1], "text": "a zkw"}}
    execute(prompt)
    tensors, metadata = opened(base, "words")
    trained = {key.split("_")[1] for key, tensor in tensors.items() if key.endswith("lora_up.weight")}
    assert trained == {"unet", "te1"}
    assert float(metadata["ss_text_encoder_lr"]) == prompt["5"]["inputs"]["learning_rate"] / 2
    assert all(tensor.any() for key, tensor in tensors.items() if "lora_te1" in key)


def test_the_workflow_is_in_the_file_unless_switched_off(execute, base):
    workflow = {"nodes": [], "id": "a"}
    execute(saving("open"), extra_data={"extra_pnginfo": {"workflow": workflow}})
    execute(saving("closed", save_workflow=False), extra_data={"extra_pnginfo": {"workflow": workflow}})
    assert json.loads(opened(base, "open")[1]["workflow"]) == workflow
    assert "workflow" not in opened(base, "closed")[1]


def test_without_an_editor_the_queued_graph_is_in_the_file_unless_switched_off(execute, base):
    execute(saving("queued"))
    execute(saving("queued_closed", save_workflow=False))
    found = json.loads(opened(base, "queued")[1]["prompt"])
    assert {key: node["class_type"] for key, node in found.items()} == {
        key: node["class_type"] for key, node in saving("queued").items()
    }
    assert "prompt" not in opened(base, "queued_closed")[1]


@pytest.mark.parametrize(
    "error, text",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_clear_error(execute, monkeypatch, error, text):
    def refuse(*args):
        raise error

    monkeypatch.setattr(output, "write_lora", refuse)
    with pytest.raises(RuntimeError, match=f"refused.safetensors: the LoRA could not be saved .{text}"):
        execute(saving("refused"))


def test_a_file_that_windows_does_not_let_go_of_is_one_clear_error(execute, monkeypatch):
    execute(saving("held"))
    monkeypatch.setattr(output, "WINDOWS", True)
    monkeypatch.setattr(whole_file, "_replace", refusing(PermissionError(errno.EACCES, "Access is denied")))
    with pytest.raises(RuntimeError, match="Load LoRA node .* choose another name, or restart"):
        execute(saving("held", dtype="fp16"))


def refusing(error):
    def refuse(*args):
        raise error

    return refuse


def test_a_folder_in_the_files_place_is_one_clear_error(execute, base):
    (base / "output" / "loras" / "folder.safetensors").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="folder.safetensors: the LoRA could not be saved"):
        execute(saving("folder"))


AVERAGED = {
    "optimizer": "adamw",
    "schedule": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "gradient_accumulation": 1,
    "floor": 0.0,
    "cycles": 1,
    "power": 1.0,
    "ema_decay": 0.9,
    "weights": "fp32",
    "d_coef": 1.0,
}


@pytest.mark.feature(124)
def test_either_the_average_or_the_last_steps_weights_are_saved(execute, base):
    for name, weights in (("averaged", "average"), ("last", "last step")):
        prompt = saving(name, weights=weights, dtype="fp32")
        prompt["5"]["inputs"] |= {"optimizer_settings": ["60", 0], "steps": 3, "name": "ema"}
        prompt["60"] = {"class_type": "GraftOptimizerSettings", "inputs": AVERAGED}
        execute(prompt)
    run = next((base / "output" / "graft").glob("ema-*"))
    state = open_state(run / "checkpoints" / "step-00000003").load()
    for name, weights in (("averaged", state.ema), ("last", state.weights)):
        found = lora_tensors(replace(state, weights=weights), family_named(state.family))
        saved = opened(base, name)[0]
        assert found.keys() == saved.keys() and all(torch.equal(found[key], saved[key]) for key in found)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("con", "is not a file name on Windows"),
        ("people/NUL.v2", "is not a file name on Windows"),
        ("lpt1 /anna", "is not a file name on Windows"),
        ("\u00e9" * 121, "is too long; 240 bytes are the most"),
        ("a/" * 600 + "a", "is too long; 1024 bytes are the most"),
        ("\ud83d", "holds half of a letter"),
    ],
)
def test_a_name_that_no_file_can_have_is_refused_on_every_system(name, reason):
    with pytest.raises(ValueError, match=reason):
        paths.lora_path(name)
    with pytest.raises(ValueError, match=reason):
        paths.state_folder(name)


def test_names_of_just_the_longest_length_and_those_that_only_look_reserved_are_taken():
    for name in ("\u00e9" * 120, "console", "com10", "a con"):
        assert paths.lora_path(name).name == f"{name}.safetensors"


def test_half_a_letter_in_the_trigger_is_refused(execute):
    with pytest.raises(RuntimeError, match=r"trigger: '\\ud83d' holds half of a letter"):
        execute(saving("half", trigger="\ud83d"))


@pytest.mark.parametrize(
    "row, folder",
    [
        ("SDXL", "diffusers"),
        ("Lumina2", "diffusers"),
        ("ZImage", "loras"),
        ("Flux", "loras"),
        ("Flux2", "diffusers"),
        ("Chroma", "diffusers"),
    ],
)
def test_a_diffusers_file_lies_where_load_lora_lists_it_only_if_comfyui_reads_its_names(base, row, folder):
    family = FAMILIES[row]
    path = {
        "SDXL": "middle_block.1.transformer_blocks.0.attn1.to_q",
        "Lumina2": "layers.0.attention.out",
        "ZImage": "layers.0.attention.out",
    }.get(row, "double_blocks.0.img_attn.proj")
    weights = {f"{path}.down": torch.ones(2, 8), f"{path}.up": torch.ones(8, 2)}
    state = TrainState(1, AdapterConfig(rank=2), "", weights, family=family.name)
    handle = save_state(state, paths.state_folder(f"diffusers {row}"))
    shown = output.SaveLora.execute(handle, f"as {row}", "fp32", False, format="diffusers (PEFT)")
    saved = base / "output" / folder / f"as {row}.safetensors"
    assert shown.result[0] == str(saved) and saved.is_file()
    assert ("Load LoRA does not read these names" in shown.ui["text"][0]) == (folder == "diffusers")
    assert read_lora(saved).layers
