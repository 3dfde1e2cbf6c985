"""The scripts in dev/starter: text encoder, captions, and trainings that go on where they stopped."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

STARTER = Path(__file__).parents[2] / "dev" / "starter"
PROMPT = "a small blue cat at the top left on a striped background, pixel art style"


@pytest.fixture(scope="module", autouse=True)
def starter():
    sys.path.insert(0, str(STARTER))
    yield
    sys.path.remove(str(STARTER))


@pytest.fixture(scope="module")
def vectors(starter):
    from shipped import clip_l

    return clip_l.token_vectors()


def test_token_vectors_are_the_same_bytes_on_every_machine(vectors):
    assert hashlib.sha256(vectors.numpy().tobytes()).hexdigest().startswith("a9e0c2fab20e2dc6")


def test_words_that_mean_related_things_are_near_each_other(vectors):
    from captions import Captions

    word = Captions().word

    def near(a, b):
        (a,), (b,) = word(a), word(b)
        return torch.cosine_similarity(vectors[a].float(), vectors[b].float(), 0).item()

    assert near("lion", "tiger") > 0.3
    assert near("car", "automobile") > 0.4
    assert abs(near("lion", "car")) < 0.15


def test_comfyui_encodes_a_prompt_as_the_training_does(tmp_path):
    import comfy.sd
    from captions import Captions

    from graft.starter.clip_l import PLACES, WIDTH, write_clip_l

    path = str(write_clip_l(tmp_path / "clip_l.safetensors"))
    clip = comfy.sd.load_clip([path], clip_type=comfy.sd.CLIPType.SD3)
    captions = Captions()
    for prompt in ("", "red apple", PROMPT):
        with torch.inference_mode():
            context, pooled = clip.encode_from_tokens(clip.tokenize(prompt), return_pooled=True)
        ours = captions([prompt])
        assert torch.equal(context[:, :PLACES, :WIDTH], ours["context"][:, :PLACES])
        assert not context[:, PLACES:].any() and not context[..., WIDTH:].any()
        torch.testing.assert_close(pooled[:, :WIDTH], ours["y"], rtol=1e-4, atol=1e-5)


def test_a_denoiser_sees_53_alike_padding_tokens_as_one(monkeypatch):
    import comfy.ldm.modules.diffusionmodules.mmdit as mmdit
    from denoiser import PADDING, SHAPE, build_denoiser, use_fast_cpu_kernels

    from graft.starter.clip_l import PLACES

    model = build_denoiser(64, 2)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x, t, y = torch.randn(2, *SHAPE), torch.tensor([100.0, 900.0]), torch.randn(2, 768)
    context = torch.randn(2, PLACES + 1, 768)
    context[:, -1] = 0
    whole = torch.cat([context, torch.zeros(2, PADDING - 1, 768)], 1)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x, t, context=whole, y=y)
        uncounted = model(x, t, context=context, y=y)
        monkeypatch.setattr(mmdit, "optimized_attention", mmdit.optimized_attention)
        use_fast_cpu_kernels(model)
        counted = model(x, t, context=context, y=y)

    def error(got):
        return ((got - expected).norm() / expected.norm()).item()

    assert error(counted) < 0.02 < 0.05 < error(uncounted)


def test_every_caption_fits_the_tokens_that_know_their_place():
    import names
    from captions import Captions
    from pictures import choose, describe

    from graft.starter.clip_l import END, PLACES

    rng, captions = np.random.default_rng(0), Captions()
    longest = ["smiling-face-with-heart-eyes", "smiling-face-with-sunglasses"]
    texts = [describe(choose(rng, longest), rng, complete=True) for _ in range(300)]
    ids = captions.ids(texts)
    assert (ids[:, PLACES - 1] == END).all()
    assert not any(names.held_out(n) for n in longest)


def test_a_training_stopped_and_started_ends_as_one_that_never_stopped(tmp_path, monkeypatch):
    import fit

    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)

    def train(folder, stop=None):
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"joint_blocks": torch.nn.Linear(4, 4), "rest": torch.nn.Linear(4, 1)})

        def loss_at(step, g):
            if step == stop:
                raise KeyboardInterrupt
            return model["rest"](model["joint_blocks"](torch.randn(8, 4, generator=g)).tanh()).square().mean()

        run = fit.Training("t", folder, steps=9, warmup=3, cooldown=0.3, seed=1)
        updates = fit.optimizers(model.named_parameters(), muon_lr=1e-2, adam_lr=1e-2)
        run.go(loss_at, {"model": model}, updates)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", stop=5)
    assert torch.load(tmp_path / "parts" / "t.pt")["step"] == 5
    assert torch.equal(train(tmp_path / "parts"), train(tmp_path / "whole"))
