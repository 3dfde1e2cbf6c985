"""Whatever goes wrong inside ComfyUI, the next prompt runs, the base is whole and memory is given back."""

from __future__ import annotations

import gc

import comfy.model_management
import pytest
import torch

from graft.tests.support.first_lora import four_squares, sampled
from graft.training import loop, validation
from graft.training.comfy.model import encoder, loading
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.run import samples
from graft.training.data.batch import EncodedDataset
from graft.training.live_state import LiveState
from graft.training.run import execute as run
from graft.training.run import watch


@pytest.fixture(scope="module", autouse=True)
def images(base):
    four_squares(base)


PHASES = {
    "encoding an image": (encoder.ComfyEncoder, "encode_image"),
    "encoding a caption": (encoder.ComfyEncoder, "encode_text"),
    "drawing the adapter": (run, "initial_state"),
    "choosing a batch": (EncodedDataset, "batch"),
    "forward pass": (ComfyDenoiser, "denoise"),
    "clipping": (loop, "clip_gradients"),
    "optimizer step": (LiveState, "optimize"),
    "validation": (validation, "sample_loss"),
    "writing a checkpoint": (watch, "save_state"),
    "writing the LoRA beside it": (watch, "write_lora"),
    "drawing a sample": (samples, "_sample"),
    "writing a sample": (samples, "save_png"),
}
"""Where Cancel is pressed: while this function runs. Each run gets further than the one before it, so each
also shows that the server goes on."""


@pytest.fixture
def base_model(monkeypatch):
    """The MODEL that Load Base Model made, once a prompt has run."""
    loaded, load = [], loading.load_base
    monkeypatch.setattr(loading, "load_base", lambda *args: loaded.append(load(*args)) or loaded[-1])
    return loaded


def small(name, *, seed=0, again=False, outputs=("6",)):
    """Two steps with validation, samples and a checkpoint each; the graph ends with `outputs`."""
    prompt = sampled(name, train={"seed": seed}, every=1, before_training=False, steps=1, prompts="a square")
    prompt["5"]["inputs"] |= {
        "steps": 2,
        "batch_size": 1,
        "checkpoint_settings": ["50", 0],
        "validation_settings": ["51", 0],
    }
    prompt["3"]["inputs"]["encode_again"] = again
    prompt["50"] = {
        "class_type": "GraftCheckpointSettings",
        "inputs": {"minutes": 0.0, "steps": 0, "keep": 1, "tensorboard": False, "lora": True},
    }
    prompt["51"] = {
        "class_type": "GraftValidationSettings",
        "inputs": {"validation": ["3", 0], "every": 1, "patience": 0, "limit": 1, "result": "last"},
    }
    return {key: node for key, node in prompt.items() if int(key) not in range(7, 13)}


def live_bytes():
    """Bytes of every tensor that something still holds."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)  # others, as what torch.compile keeps, have no bytes
    held = (o for o in gc.get_objects() if type(o) in kinds and o.device.type != "meta")
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def traces(model):
    """Everything of a model that a run might leave changed: bytes, attributes, hooks."""
    network = model.model
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    attributes = {
        name: (sorted(vars(module)), module.training, len(module._forward_hooks), len(module._backward_hooks))
        for name, module in network.named_modules()
    }
    return weights, attributes


def assert_untouched(model, before):
    weights, attributes = before
    found, found_attributes = traces(model)
    assert found.keys() == weights.keys() and all(torch.equal(found[key], weights[key]) for key in weights)
    assert found_attributes == attributes


def kinds(executor):
    return [kind for kind, _ in executor.status_messages]


def whole(execute, base_model, name, **options):
    """Run a graph to its end, and free what ComfyUI keeps on the device; return (MODEL, its traces)."""
    assert "execution_success" in kinds(execute(small(name, **options)))
    comfy.model_management.unload_all_models()
    return base_model[-1][0], traces(base_model[-1][0])


def test_cancel_in_every_phase_leaves_a_server_that_trains_the_next_prompt(execute, base_model, monkeypatch):
    model, before = whole(execute, base_model, "first")
    memory = live_bytes()
    for seed, (phase, (owner, name)) in enumerate(PHASES.items(), 1):
        function = getattr(owner, name)
        pressed = []

        def cancelling(*args, function=function, pressed=pressed, **options):
            comfy.model_management.interrupt_current_processing(not pressed)
            pressed.append(1)
            return function(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, cancelling)
            ended = kinds(execute(small("cancelled", seed=seed, again=phase.startswith("encoding"))))
        assert pressed and "execution_interrupted" in ended, phase
        comfy.model_management.unload_all_models()
        assert len(base_model) == 1
        assert_untouched(model, before)
        assert live_bytes() <= 1.05 * memory, phase
    assert "execution_success" in kinds(execute(small("cancelled", seed=1)))


@pytest.mark.feature(102)
def test_an_image_that_is_no_number_is_named_and_the_next_prompt_runs(execute, base_model, monkeypatch):
    model, before = whole(execute, base_model, "sound")
    batch = EncodedDataset.batch

    def spoilt(self, size, *, seed, index):
        found = batch(self, size, seed=seed, index=index)
        found.latents[0, 0, 0, 0] = float("nan")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(EncodedDataset, "batch", spoilt)
        with pytest.raises(RuntimeError, match=r"not a number for .*(red|green|blue|white).png at sigma"):
            execute(small("spoilt", seed=99))
    assert "execution_success" in kinds(execute(small("spoilt", seed=99)))
    comfy.model_management.unload_all_models()
    assert_untouched(model, before)


def test_twenty_queued_runs_leave_no_memory_and_no_hooks_behind(execute, base_model):
    for seed in range(3):
        model, before = whole(execute, base_model, "queued", seed=seed)
    memory = live_bytes()
    for seed in range(3, 20):
        prompt = small("queued", seed=seed)
        prompt["5"]["inputs"] |= {"steps": 1}
        for name in ("sample_prompts", "validation_settings", "checkpoint_settings"):
            del prompt["5"]["inputs"][name]
        assert "execution_success" in kinds(execute(prompt))
    comfy.model_management.unload_all_models()
    assert len(base_model) == 1
    assert_untouched(model, before)
    assert live_bytes() <= 1.02 * memory
