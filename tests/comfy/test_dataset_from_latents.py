"""Dataset From Latents: stock LATENT and CONDITIONING lists are the dataset that Encode Dataset makes."""

from __future__ import annotations

from pathlib import Path

import comfy.sample
import folder_paths
import numpy as np
import pytest
import torch
from comfy_extras import nodes_dataset
from PIL import Image

from graft.nodes.base_model import LoadBaseModel
from graft.nodes.dataset import EncodeDataset, LoadDataset, SplitDataset
from graft.nodes.dataset_from_latents import DatasetFromLatents
from graft.nodes.lora import BuildLora
from graft.nodes.sockets import trained_clip
from graft.tests.support.first_lora import first_lora, lora
from graft.tests.support.tiny_edits import (
    EDITS,
    assert_seen,
    latents,
    sampled_arguments,
    stock_conditioning,
)
from graft.tests.support.tiny_models import TINY
from graft.tests.support.tiny_others import OTHERS
from graft.tests.support.two_steps import CONFIG, unmoved
from graft.training.comfy.files.initial_lora import save_initial_state
from graft.training.comfy.files.trained_lora import lora_model
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.run.notes import unseen_notes
from graft.training.config import AdapterConfig
from graft.training.family import family_of
from graft.training.loop import initial_state, train
from graft.training.user_error import UserError

WIDGETS = {"repeats": [1], "caption_dropout": [0.0], "weight": [1.0], "outside_mask": [0.0]}
TEXTS = ["a red square", "a green square", "a noisy square"]


@pytest.fixture(scope="module")
def loaded(graft_nodes):
    """MODEL, CLIP and VAE of the starter's base model."""
    return LoadBaseModel.execute("graft_tiny_sd3.safetensors").args


@pytest.fixture(scope="module")
def stock(loaded):
    """The lists of MakeTrainingDataset for three images."""
    _, clip, vae = loaded
    with torch.inference_mode():
        return nodes_dataset.MakeTrainingDataset.execute(images(), [vae], [clip], TEXTS).result


def images():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    colors = [np.full((64, 64, 3), color, np.uint8) for color in ((255, 0, 0), (0, 255, 0))]
    return [torch.from_numpy(each.astype(np.float32) / 255)[None] for each in (*colors, noise)]


def given(latents, conditioning, **inputs):
    return DatasetFromLatents.execute(latents, conditioning, **{**WIDGETS, **inputs}).result[0]


def losses(model, dataset, steps=3):
    return train(ComfyDenoiser(model), dataset, CONFIG, None, steps=steps).losses


@pytest.mark.feature(145)
def test_a_stock_training_dataset_trains_as_its_images_do_through_encode_dataset(loaded, stock, base):
    model, clip, vae = loaded
    folder = base / "input" / "squares"
    folder.mkdir()
    for index, (image, text) in enumerate(zip(images(), TEXTS, strict=True)):
        Image.fromarray((image[0].numpy() * 255).round().astype(np.uint8)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(text)
    widgets = {"resolution": "64", "trigger": "", "missing_captions": "error", "caption_dropout": 0.0}
    found = LoadDataset.execute("squares", repeats=1, flip=False, **widgets).args[0]
    (encoded,) = EncodeDataset.execute(found, model, clip, vae, False).args
    assert losses(model, given(*stock)) == losses(model, encoded)


def test_a_bucketed_and_a_saved_dataset_are_the_same_run(stock, base):
    nodes_dataset.SaveTrainingDataset.execute(*stock, ["squares"], [2])
    loaded = nodes_dataset.LoadTrainingDataset.execute("squares").result
    known = given(*stock).fingerprint
    assert given(*loaded).fingerprint == known
    assert given(*bucketed(stock)).fingerprint == known
    other = [{"samples": stock[0][0]["samples"] + 1}, *stock[0][1:]]
    assert given(other, stock[1]).fingerprint != known


def bucketed(stock):
    """The lists of ResolutionBucket, or, where ComfyUI is too old to have it, what it makes of them."""
    if hasattr(nodes_dataset, "ResolutionBucket"):
        return nodes_dataset.ResolutionBucket.execute(*stock).result
    whole = {"samples": torch.cat([each["samples"] for each in stock[0]])}
    return [whole], [[entry for [entry] in stock[1]]]


def test_one_conditioning_is_for_all_of_a_batch(stock):
    batch = {"samples": torch.cat([each["samples"] for each in stock[0]])}
    dataset = given([batch], stock[1][:1])
    assert len(dataset) == 3
    first, last = dataset.sample(0).conditioning[0], dataset.sample(2).conditioning[0]
    assert torch.equal(first["cross_attn"], last["cross_attn"])


def test_a_dropped_caption_loses_its_words_and_keeps_its_references(base):
    tiny = EDITS["flux"]
    lists = [{"samples": latents(tiny, seed)[None]} for seed in (1, 2)]
    pairs = [stock_conditioning(tiny, seed, [latents(tiny, seed + 10)]) for seed in (1, 2)]
    empty = stock_conditioning(tiny, 9, [])
    dataset = given(lists, pairs, empty_caption=[empty], caption_dropout=[1.0])
    batch = dataset.batch(2, seed=0, index=0)
    for name, conditioning in zip(batch.names, batch.conditioning, strict=True):
        reference = latents(tiny, int(name.removeprefix("latent-")) + 11).bfloat16().float()
        assert torch.equal(conditioning["cross_attn"], empty[0][0].bfloat16().float())
        assert torch.equal(conditioning["reference_latents"][0][0], reference)
    with pytest.raises(UserError, match="what a dropped caption is replaced by is missing"):
        given(lists, pairs, caption_dropout=[0.5])


def test_a_latents_own_mask_is_where_the_loss_counts(stock):
    mask = torch.zeros(1, 1, 64, 64)
    mask[..., :32] = 1
    masked = [{**stock[0][0], "noise_mask": mask}, *stock[0][1:]]
    sides = given(masked, stock[1]).sample(0).masks
    assert sides.shape[-2:] == stock[0][0]["samples"].shape[-2:]
    assert sides[..., :3].eq(1).all() and sides[..., -3:].eq(0).all()
    same = given(stock[0], stock[1], masks=[mask[0], torch.ones(2, 64, 64)])
    assert torch.equal(same.sample(0).masks, sides)
    with pytest.raises(UserError, match="masks of their own"):
        given(masked, stock[1], masks=[torch.ones(1, 64, 64)])
    with pytest.raises(UserError, match="latent-0: its mask is black"):
        given([{**stock[0][0], "noise_mask": torch.zeros(1, 1, 64, 64)}, *stock[0][1:]], stock[1])


def test_what_of_the_conditioning_the_model_does_not_look_at_is_said():
    for name, unseen in (("flux", ["concat_mask"]), ("sd15", ["concat_mask", "reference_latents"])):
        tiny = TINY[name]
        [[cross_attn, options]] = stock_conditioning(tiny, 1, [latents(tiny, 2)])
        pair = [[cross_attn, {**options, "concat_mask": torch.ones(1, 1, 64, 64)}]]
        dataset = given([{"samples": latents(tiny, 1)[None]}], [pair])
        [note] = unseen_notes(ComfyDenoiser(tiny()), dataset.sample(0))
        assert f"does not look at {', '.join(unseen)}, so" in note


def test_latents_are_held_out_like_images(stock):
    training, validation = SplitDataset.execute(given(*stock), fraction=0.3, names="").result
    assert (len(training), len(validation)) == (2, 1)


def test_a_reference_changes_what_is_learned(base):
    tiny = EDITS["flux"]
    target = [{"samples": latents(tiny, 1)[None]}]

    def loss_with(references):
        return losses(tiny(), given(target, [stock_conditioning(tiny, 1, references)]), steps=1)

    assert loss_with([latents(tiny, 2)]) != loss_with([]) != loss_with([latents(tiny, 3)])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"latents": ["no latent"]}, "latents, entry 0: a str, which is no batch of latents"),
        ({"latents": [{"data": 1}]}, "latents, entry 0: a dict"),
        ({"latents": [{"samples": torch.ones(4, 8)}]}, r"a LATENT of \(4, 8\)"),
        ({"conditioning": [{"pooled_output": 1}]}, "conditioning, entry 0: this is no CONDITIONING"),
        ({"conditioning": []}, "conditioning: 0 for 3 latents"),
        ({"captions": ["a", "b"]}, "captions: 2 for 3 samples"),
        ({"masks": [torch.ones(2, 8, 8)]}, "masks: 2 for 3 samples"),
    ],
)
def test_lists_that_are_no_dataset_are_refused_by_their_entry(stock, change, message):
    """A pickle in models/datasets that is no dataset gives such lists too."""
    inputs = {"latents": stock[0], "conditioning": stock[1], **change}
    with pytest.raises(UserError, match=message):
        given(**inputs)


def test_every_sample_that_cannot_be_trained_is_named(stock):
    wrong = [{"samples": torch.full_like(stock[0][0]["samples"], torch.nan)}, *stock[0][:1]]
    wrong.append({"samples": torch.ones(1, 4, 8, 8)})
    with pytest.raises(UserError, match=r"(?s)latent-0: its latents have NaN.*latent-2: .*of another VAE"):
        given(wrong, stock[1])


def test_latents_and_conditioning_of_another_model_end_the_run_before_its_first_step(loaded, stock):
    model, _, _ = loaded
    state = initial_state(ComfyDenoiser(model), CONFIG)
    with pytest.raises(
        UserError, match="it has 16 channels: encode the dataset with the VAE that belongs to the model"
    ):
        losses(model, given([{"samples": torch.ones(1, 4, 8, 8)}], stock[1][:1]))
    other = [[torch.ones(1, 77, 768), {"pooled_output": torch.ones(1, 2048)}]]
    with pytest.raises(
        UserError, match=r"cannot take this conditioning \(cross_attn \(1, 77, 768\).*text encoders"
    ):
        losses(model, given(stock[0], [other]))
    assert all(
        torch.equal(w, state.weights[n])
        for n, w in initial_state(ComfyDenoiser(model), CONFIG).weights.items()
    )


def test_text_encoders_are_not_trained_without_the_texts(loaded, stock):
    _, clip, _ = loaded
    adapter = AdapterConfig(rank=2, text_encoder=1.0)
    with pytest.raises(UserError, match="captions: missing"):
        trained_clip(adapter, clip, given(*stock))
    captioned = given(*stock, captions=TEXTS)
    assert trained_clip(adapter, clip, captioned) is clip and captioned.sample(1).captions == [TEXTS[1]]


@pytest.mark.feature(145)
def test_a_lora_model_of_the_graph_starts_a_run(loaded, stock):
    model, _, _ = loaded
    denoiser = ComfyDenoiser(model)
    trained = train(denoiser, given(*stock), CONFIG, None, steps=2)
    lora = lora_model(trained, family_of("SD3", model.model.model_config.unet_config))
    widgets = {"algorithm": "lora", "rank": 8, "alpha": 0.0, "targets": "attn"}
    (config,) = BuildLora.execute(**widgets, lora_model=lora).result
    again = BuildLora.execute(**widgets, lora_model={key: t.clone() for key, t in lora.items()}).result[0]
    assert config == again and config.start_from.startswith("output/graft/starts/")
    handle, _ = save_initial_state(denoiser, config, 0)
    begun = handle.load()
    assert begun.adapter.rank == CONFIG.adapter.rank and begun.weights.keys() == trained.weights.keys()
    assert all(torch.equal(begun.weights[name], trained.weights[name]) for name in trained.weights)
    with pytest.raises(UserError, match="this is no LORA_MODEL"):
        BuildLora.execute(**widgets, lora_model=["x"])
    with pytest.raises(UserError, match="choose one of the two"):
        BuildLora.execute(**widgets, lora_model=lora, start_from="a.safetensors")


@pytest.mark.feature(141)
def test_a_graph_of_stock_nodes_trains_and_saves_a_lora(execute, base):
    prompt = first_lora("stock")
    gray = {"width": 64, "height": 64, "batch_size": 1, "color": 0x808080}
    wires = {"images": ["20", 0], "vae": ["1", 2], "clip": ["1", 1], "texts": "a square"}
    prompt["20"] = {"class_type": "EmptyImage", "inputs": gray}
    prompt["21"] = {"class_type": "MakeTrainingDataset", "inputs": wires}
    inputs = {name: values[0] for name, values in WIDGETS.items()}
    inputs |= {"latents": ["21", 0], "conditioning": ["21", 1]}
    prompt["22"] = {"class_type": "GraftDatasetFromLatents", "inputs": inputs}
    prompt["5"]["inputs"]["dataset"] = ["22", 0]
    shown = execute(prompt).history_result["outputs"]["22"]["text"][0]
    assert "Bucket 8 x 8 cells: 1 images" in shown
    tensors, metadata = lora(base, "stock")
    assert tensors and metadata["ss_num_train_images"] == "1" and "ss_resolution" not in metadata


@pytest.fixture
def with_sound():
    """A LATENT of video and sound, and a CONDITIONING, for tiny LTX-2."""
    tiny = OTHERS["ltxav"]
    if tiny.missing:
        pytest.skip("this ComfyUI has no LTX-2 with sound")
    from comfy.nested_tensor import NestedTensor

    parts = torch.randn(1, 128, 2, 4, 4), torch.randn(1, 8, 5, 16)
    [[cross_attn, options]] = stock_conditioning(tiny, 1, [])
    stored = cross_attn.bfloat16().float()  # as a dataset stores it
    return {"samples": NestedTensor(parts)}, [[stored, options]]


def test_video_with_its_sound_is_trained_as_the_sampler_gives_both_to_the_model(with_sound):
    latent, conditioning = with_sound
    denoiser = ComfyDenoiser(OTHERS["ltxav"]())
    dataset = given([latent], [conditioning])
    noise = comfy.sample.prepare_noise(latent["samples"], 1)
    assert_seen(
        denoiser, dataset.sample(0), sampled_arguments(denoiser, conditioning, noise, latent["samples"])
    )
    trained = train(denoiser, dataset, CONFIG, initial_state(denoiser, CONFIG), steps=2)
    of_sound = [name for name in unmoved(denoiser, trained) if "audio" in name]
    still = [name for name in of_sound if "connector" not in name]  # which are for other text
    assert any("audio_attn1" in name for name in trained.weights) and not still


def test_video_with_sound_is_refused_by_a_model_of_video_alone(with_sound):
    denoiser = ComfyDenoiser(OTHERS["ltxv"]())
    with pytest.raises(UserError, match="LTXV takes latents of"):
        train(denoiser, given([with_sound[0]], [with_sound[1]]), CONFIG, None, steps=1)


def test_a_pickle_that_is_no_dataset_is_an_error_and_runs_no_code(base, graft_nodes):
    newer = "datasets" in folder_paths.folder_names_and_paths
    root = folder_paths.get_folder_paths("datasets")[0] if newer else folder_paths.get_output_directory()
    folder = Path(root) / "evil"
    folder.mkdir(parents=True)
    load = graft_nodes["LoadTrainingDataset"].execute
    torch.save(Touch(base / "touched"), folder / "shard_0000.pkl")
    with pytest.raises(Exception, match="(?i)weights.only"):
        load("evil")
    assert not (base / "touched").exists()
    torch.save({"latents": [1.0], "conditioning": ["text"]}, folder / "shard_0000.pkl")
    with pytest.raises(UserError, match="which is no batch of latents; connect what VAE Encode"):
        given(*load("evil").result)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return self.path.touch, ()
