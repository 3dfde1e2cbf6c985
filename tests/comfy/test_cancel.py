"""Cancel while a dataset is read and encoded: it is answered within each step, not only between them."""

from __future__ import annotations

import comfy.model_management as management
import pytest
import torch

from graft.nodes import dataset
from graft.nodes.base_model import LoadBaseModel
from graft.tests.support.first_lora import first_lora, four_squares
from graft.training.comfy import progress
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.encoder import ComfyEncoder
from graft.training.comfy.run.samples import SamplePrompts
from graft.training.data.caption import LONGEST


@pytest.fixture(autouse=True)
def released():
    yield
    management.interrupt_current_processing(False)


@pytest.fixture(scope="module")
def encoder(graft_nodes):
    model, clip, vae = LoadBaseModel.execute("graft_tiny_sd3.safetensors").args
    return ComfyEncoder(vae, clip, ComfyDenoiser(model).family)


@pytest.fixture
def layers(encoder):
    """How often a layer of the VAE or the text encoder has run; each may press Cancel."""
    calls, press_at = [], []

    def count(*_):
        calls.append(1)
        if len(calls) in press_at:
            management.interrupt_current_processing()

    networks = (encoder.vae.first_stage_model, encoder.clip.cond_stage_model)
    leaves = [leaf for network in networks for leaf in network.modules() if not list(leaf.children())]
    hooks = [leaf.register_forward_hook(count) for leaf in leaves]
    yield calls, press_at
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("what", ["image", "text"])
def test_comfyui_answers_cancel_at_the_next_layer_and_encodes_again(encoder, layers, what):
    calls, press_at = layers
    encode = {
        "image": lambda: encoder.encode_image(torch.zeros(1, 64, 64, 3)),
        "text": lambda: encoder.encode_text("a red square")["cross_attn"],
    }[what]
    before, whole = encode(), len(calls)
    press_at.append(len(calls) + 5)
    with pytest.raises(management.InterruptProcessingException):
        encode()
    assert len(calls) == whole + 5 < 2 * whole
    assert torch.equal(encode(), before)


def test_cancel_before_the_first_node_ends_the_prompt_and_not_the_queue(execute, base, monkeypatch):
    folder, asked = four_squares(base).name, []

    def press():
        asked.append(1)
        if len(asked) == 2:
            management.interrupt_current_processing()
        progress.raise_if_cancelled()

    monkeypatch.setattr(dataset, "raise_if_cancelled", press)
    prompt = first_lora("cancelled")
    prompt["2"]["inputs"]["folder"] = folder
    kinds = [kind for kind, _ in execute(prompt).status_messages]
    assert len(asked) == 2 and "execution_interrupted" in kinds
    monkeypatch.undo()
    assert "execution_success" in [kind for kind, _ in execute(prompt).status_messages]


def test_a_nodes_bar_moves_a_few_times_a_second_and_cancel_is_asked_for_each_time(monkeypatch):
    moves, now = [], [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        progress.comfy.utils.ProgressBar, "update_absolute", lambda self, *at: moves.append(at[:2])
    )
    with progress.progress_bar() as on_progress:
        for done in range(1000):
            now[0] += 0.001
            on_progress(done, 1000, "")
        on_progress(1000, 1000, "")
        management.interrupt_current_processing()
        with pytest.raises(management.InterruptProcessingException):
            on_progress(1000, 1000, "")
    assert 4 <= len(moves) <= 8 and (1000, 1000) in moves


def test_a_prompt_is_no_longer_than_a_caption():
    assert SamplePrompts(object(), object(), ("x" * LONGEST,))
    for texts in ({"prompts": ("x" * (LONGEST + 1),)}, {"prompts": ("x",), "negative": "x" * (LONGEST + 1)}):
        with pytest.raises(ValueError, match=f"a prompt has {LONGEST + 1} letters; at most {LONGEST} are"):
            SamplePrompts(object(), object(), **texts)
