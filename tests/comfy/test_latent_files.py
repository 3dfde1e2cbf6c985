"""Latents that ComfyUI's VAE made, in files as sd-scripts writes them, are what their pictures are."""

import numpy as np
import pytest
import torch

from graft.nodes.base_model import LoadBaseModel
from graft.nodes.dataset import EncodeDataset, LoadDataset
from graft.tests.support.first_lora import four_squares
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.encoder import ComfyEncoder


@pytest.fixture(scope="module")
def loaded(graft_nodes):
    """MODEL, CLIP and VAE of the demo's base model."""
    return LoadBaseModel.execute("graft_tiny_sd3.safetensors").args


@pytest.mark.feature(108)
def test_a_folder_of_latents_gives_the_batches_of_its_pictures(loaded, base, monkeypatch):
    model, clip, vae = loaded
    widgets = {"resolution": "64", "trigger": "", "missing_captions": "error", "repeats": 1}
    widgets |= {"caption_dropout": 0.0, "flip": False}

    def batches(folder):
        images = LoadDataset.execute(folder, **widgets).args[0]
        (dataset,) = EncodeDataset.execute(images, model, clip, vae, False).args
        return [dataset.sample(index) for index in range(len(dataset))]

    pictures = batches(four_squares(base).name)
    folder = base / "input" / "four_latents"
    folder.mkdir()
    for batch in pictures:
        stem, (extras,) = batch.names[0].removesuffix(".png"), batch.extras
        size = (extras["width"], extras["height"])
        arrays = {"latents": batch.latents[0].numpy(), "original_size": np.array(size)}
        ending = "_{}x{}".format(*batch.latents.shape[-2:])
        name = "{}_{:04d}x{:04d}_sd3.npz".format(stem, *size)
        np.savez(folder / name, **{key + ending: array for key, array in arrays.items()})
        (folder / f"{stem}.txt").write_text(f"a {stem} square")
    monkeypatch.setattr(vae, "encode", None)
    for picture, found in zip(pictures, batches(folder.name), strict=True):
        assert torch.equal(found.latents, picture.latents) and found.extras == picture.extras
        assert found.captions == picture.captions


def test_the_foretold_shape_of_latents_is_the_one_that_the_vae_makes(loaded):
    model, clip, vae = loaded
    encoder = ComfyEncoder(vae, clip, ComfyDenoiser(model).family)
    assert encoder.latent_shape(64, 96) == encoder.encode_image(torch.zeros(1, 96, 64, 3)).shape[1:]
