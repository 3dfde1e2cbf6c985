"""The shipped workflow, in ComfyUI's own executor: run again, run longer, run shorter, cancelled, finished
early.
"""

from __future__ import annotations

import copy

import comfy.model_management
import pytest

from graft.tests.support.first_lora import assert_same_lora, first_lora, four_squares, lora
from graft.training.run import execute as runs


@pytest.fixture(scope="module", autouse=True)
def images(base):
    return four_squares(base)


@pytest.fixture
def steps(monkeypatch):
    """Count the optimizer steps really done."""
    done = []
    train = runs.train

    def counted(*args, on_step, **kwargs):
        return train(
            *args,
            on_step=lambda progress, handles: done.append(progress.step) or on_step(progress, handles),
            **kwargs,
        )

    monkeypatch.setattr(runs, "train", counted)
    return done


@pytest.mark.feature(19, 46, 118)
def test_the_workflow_trains_saves_and_samples(execute, base):
    execute(first_lora("whole"))
    tensors, metadata = lora(base, "whole")
    assert all(key.startswith("lora_unet_joint_blocks_") for key in tensors)
    assert tensors["lora_unet_joint_blocks_0_x_block_attn_qkv.alpha"].shape == ()
    assert metadata["ss_network_dim"] == "2" and metadata["ss_steps"] == "3"
    assert list((base / "output" / "graft").glob("first_lora*.png"))


@pytest.mark.feature(116)
def test_a_finished_run_is_loaded_not_trained_again_even_by_a_new_executor(execute, base, steps):
    execute(first_lora("whole"))
    assert steps == []


def test_more_steps_continue_and_fewer_equal_a_fresh_run(execute, base, steps):
    execute(first_lora("grown"))
    execute(first_lora("grown", steps=5))
    assert steps == [1, 2, 3, 4, 5]
    execute(first_lora("fresh", steps=5))
    assert_same_lora(base, "grown", "fresh")
    execute(first_lora("grown", steps=2))
    execute(first_lora("fresh2", steps=2))
    assert_same_lora(base, "grown", "fresh2")


@pytest.mark.feature(111)
def test_cancel_and_queue_again_equals_an_undisturbed_run(execute, base, monkeypatch):
    steps = []
    interrupt = comfy.model_management.throw_exception_if_processing_interrupted

    def cancel_in_step_three():
        if len(steps) == 2:
            raise comfy.model_management.InterruptProcessingException
        interrupt()

    with monkeypatch.context() as patch:
        train = runs.train
        patch.setattr(
            runs,
            "train",
            lambda *a, on_step, **k: train(
                *a, on_step=lambda p, handles: steps.append(p.step) or on_step(p, handles), **k
            ),
        )
        patch.setattr(
            comfy.model_management, "throw_exception_if_processing_interrupted", cancel_in_step_three
        )
        execute(first_lora("cancelled_once", steps=4, seed=5))
    assert steps == [1, 2] and not (base / "output" / "loras" / "cancelled_once.safetensors").exists()
    execute(first_lora("cancelled_once", steps=4, seed=5))
    execute(first_lora("undisturbed", steps=4, seed=5))
    assert_same_lora(base, "cancelled_once", "undisturbed")


@pytest.mark.feature(139)
def test_an_edited_caption_trains_anew_and_encodes_only_itself(execute, base, images, steps):
    execute(first_lora("edited"))
    (images / "red.txt").write_text("a scarlet square")
    before = len(list((base / "output" / "graft" / "cache").rglob("*.safetensors")))
    execute(first_lora("edited"))
    after = len(list((base / "output" / "graft" / "cache").rglob("*.safetensors")))
    assert after == before + 1 and steps == [1, 2, 3] * 2


@pytest.mark.feature(116)
def test_training_goes_on_from_a_state_on_the_wire_as_in_one_node(execute, base):
    prompt = first_lora("chained", steps=2)
    prompt["20"] = copy.deepcopy(prompt["5"])
    prompt["20"]["inputs"] |= {"start": ["5", 2], "steps": 3}
    prompt["6"]["inputs"]["state"] = ["20", 2]
    execute(prompt)
    execute(first_lora("at_once", steps=5))
    assert_same_lora(base, "chained", "at_once")


def test_a_saved_state_is_loaded_and_continued(execute, base):
    prompt = first_lora("stored", steps=2)
    prompt["30"] = {"class_type": "GraftSaveTrainingState", "inputs": {"state": ["5", 2], "name": "stored"}}
    execute(prompt)
    prompt = first_lora("continued", steps=3)
    prompt["31"] = {"class_type": "GraftLoadTrainingState", "inputs": {"name": "stored"}}
    prompt["5"]["inputs"]["start"] = ["31", 0]
    execute(prompt)
    assert_same_lora(base, "continued", "at_once")


@pytest.mark.parametrize(
    ("node", "values", "message"),
    [
        ("5", {"learning_rate": 0.0}, "learning rate must be above 0"),
        ("5", {"name": "../out"}, "run name: '../out"),
        ("6", {"name": "../out"}, "file name: '../out"),
        ("6", {"name": "/etc/x"}, "file name: '/etc/x"),
        ("2", {"folder": "../four_squares"}, "graft_datasets"),
        ("2", {"folder": "nothing here"}, "not found"),
        ("2", {"resolution": "big"}, "resolution: 'big'"),
        ("4", {"include": "no_such_layer*"}, "Layers are named like joint_blocks"),
    ],
)
def test_bad_input_is_a_clear_error(execute, node, values, message):
    prompt = first_lora("bad")
    prompt[node]["inputs"] |= values
    with pytest.raises(RuntimeError, match=message.replace("(", r"\(")):
        execute(prompt)
