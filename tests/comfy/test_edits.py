"""Edit pairs and inpainting: trained is what a graph with the stock nodes samples."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from comfy_extras.nodes_edit_model import ReferenceLatent
from comfy_extras.nodes_flux import FluxKontextMultiReferenceLatentMethod
from comfy_extras.nodes_qwen import TextEncodeQwenImageEdit, TextEncodeQwenImageEditPlus
from PIL import Image
from torch.nn import functional as F

import nodes
from graft.tests.support.datasets import add, picture
from graft.tests.support.tiny_edits import (
    EDITS,
    assert_seen,
    latents,
    sampled_arguments,
    stock_conditioning,
)
from graft.tests.support.tiny_models import SIBLINGS, TINY
from graft.training.comfy.model.conditioning import read_conditioning
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.encoder import ComfyEncoder
from graft.training.comfy.run import samples as samples_module
from graft.training.comfy.run.notes import family_in
from graft.training.config import AdapterConfig, MemoryConfig, OptimizerConfig, TrainConfig
from graft.training.data import BucketConfig, DatasetConfig, MaskConfig, encode, scan
from graft.training.loop import initial_state, train
from graft.training.model import Batch
from graft.training.user_error import UserError
from graft.training.validation import validation_loss

EXACT = DatasetConfig(bucket=BucketConfig(resolutions=(64,)), dtype="fp32")
PAIRS = dataclasses.replace(EXACT, references=("sources",))


class FakeVae:
    """Averages 8 x 8 pixels into the channels of a tiny model."""

    def __init__(self, tiny):
        self.tiny = tiny
        self.first_stage_model = self.patcher = object()
        self.latent_channels, self.latent_dim = tiny.channels, 3 if tiny.frames else 2

    def spacial_compression_encode(self):
        return 8

    def encode(self, pixels):
        cells = F.avg_pool2d(pixels[..., :3].movedim(-1, 1), 8)
        cells = cells.repeat(1, -(-self.tiny.channels // 3), 1, 1)[:, : self.tiny.channels]
        return cells[:, :, None] if self.tiny.frames else cells


class FakeClip:
    """Encodes a text and the images that the Qwen nodes give it as numbers."""

    def __init__(self, tiny):
        self.tiny, self.cond_stage_model, self.layer_idx, self.tokenizer = tiny, object(), 0, object()
        self.patcher = type("Patcher", (), {"injections": {}, "forced_hooks": None, "patches": {}})()

    def tokenize(self, text, images=(), **options):
        return text + str(sorted(options)), [float(image.mean()) for image in images]

    def encode_from_tokens_scheduled(self, tokens):
        text, images = tokens
        values = self.tiny.conditioning(sum(map(ord, text)) % 1000 + sum(round(1e6 * i) for i in images))
        return [[values.pop("cross_attn"), {"pooled_output": None, **values}]]


class TinyEncoder(ComfyEncoder):
    """ComfyUI's encoder over these."""

    image_fingerprint, text_fingerprint = "vae", "clip"

    def __init__(self, tiny, denoiser):
        super().__init__(FakeVae(tiny), FakeClip(tiny), denoiser.family, denoiser)
        self.bucket_step = 16


@pytest.fixture
def pairs(tmp_path):
    """Two images of 64 x 64 pixels and what they were made from."""
    for index, name in enumerate(("a", "b")):
        add(tmp_path / "targets", f"{name}.png", f"caption {name}", picture(seed=index))
        add(tmp_path / "sources", f"{name}.png", None, picture(seed=10 + index))
    return tmp_path


def encoded(folder, tiny, denoiser, config=PAIRS):
    references = [folder / name for name in config.references]
    images = scan(folder / "targets", config, references=references)
    return encode(images, TinyEncoder(tiny, denoiser), folder / "cache")


def pixels_of(path):
    """Return an IMAGE as Load Image gives it."""
    return torch.from_numpy(np.array(Image.open(path)).astype(np.float32) / 255)[None]


def stock_reference(clip, vae, caption, image):
    conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(caption))
    return ReferenceLatent.execute(conditioning, {"samples": vae.encode(image)}).result[0]


def stock_krea(clip, vae, caption, image):
    method = FluxKontextMultiReferenceLatentMethod
    return method.execute(stock_reference(clip, vae, caption, image), "index").result[0]


def stock_qwen(clip, vae, caption, image):
    return TextEncodeQwenImageEditPlus.execute(clip, caption, vae, image).result[0]


def stock_first_qwen(clip, vae, caption, image):
    return TextEncodeQwenImageEdit.execute(clip, caption, vae, image).result[0]


def stock_z_image(clip, vae, caption, image):
    nodes_zimage = pytest.importorskip("comfy_extras.nodes_zimage", reason="newer than this ComfyUI")
    return nodes_zimage.TextEncodeZImageOmni.execute(clip, caption, vae=vae, image1=image).result[0]


@pytest.mark.feature(144)
@pytest.mark.parametrize(
    "name, node, file",
    [
        ("flux", stock_reference, "flux1-kontext-dev"),
        ("flux2", stock_reference, ""),
        ("qwen", stock_qwen, "qwen_image_edit_2511"),
        ("qwen", stock_first_qwen, "qwen_image_edit"),
        ("zimage", stock_z_image, ""),
        ("krea2", stock_krea, ""),
    ],
)
def test_a_step_on_a_pair_sees_what_the_stock_nodes_give_the_sampler(name, node, file, pairs):
    tiny = {**TINY, **EDITS}[name]
    if tiny.missing:
        pytest.skip(f"this ComfyUI has no {tiny.config}")
    denoiser = ComfyDenoiser(tiny())
    denoiser.family = family_in(file, denoiser.patcher)
    stock = node(FakeClip(tiny), FakeVae(tiny), "caption b", pixels_of(pairs / "sources" / "b.png"))
    batch = encoded(pairs, tiny, denoiser).sample(1)
    sampled = sampled_arguments(denoiser, stock, latents(tiny, 1)[None])
    assert "ref_latents" in sampled[2]
    assert_seen(denoiser, batch, sampled)


class Uncached:
    """A dataset whose batches have what the encoder makes of the files, there and then."""

    def __init__(self, dataset, encoder, folder):
        self.dataset, self.encoder, self.folder = dataset, encoder, folder

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def batch(self, size, **where):
        batch = self.dataset.batch(size, **where)
        files = [f"{caption.removeprefix('caption ')}.png" for caption in batch.captions]
        targets = [self.encoder.encode_image(pixels_of(self.folder / "targets" / file)) for file in files]
        conditioning = [
            self.encoder.encode_edit(caption, [pixels_of(self.folder / "sources" / file)])
            for caption, file in zip(batch.captions, files, strict=True)
        ]
        return dataclasses.replace(batch, latents=torch.cat(targets), conditioning=conditioning)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_pairs_from_the_cache_train_as_uncached_ones(dtype, pairs):
    tiny, denoiser = EDITS["flux"], ComfyDenoiser(EDITS["flux"]())
    config = TrainConfig(batch_size=2, adapter=AdapterConfig(rank=2), memory=MemoryConfig(dtype="fp32"))
    cached = encoded(pairs, tiny, denoiser, dataclasses.replace(PAIRS, dtype=dtype))
    fresh = Uncached(cached, TinyEncoder(tiny, denoiser), pairs)
    losses = [train(denoiser, data, config, None, steps=2).losses for data in (cached, fresh)]
    assert (losses[0] == losses[1]) == (dtype == "fp32")  # a cache in half precision rounds


def test_a_model_that_takes_no_references_refuses_them(pairs):
    tiny = TINY["sd15"]
    with pytest.raises(UserError, match="SD1.5 takes no reference images"):
        encoded(pairs, tiny, ComfyDenoiser(tiny()))


@pytest.mark.parametrize("name", ["flux", "qwen"])
def test_samples_are_drawn_from_the_references_as_they_are_trained(name, pairs, monkeypatch):
    tiny, denoiser = EDITS[name], ComfyDenoiser(EDITS[name]())
    image = pixels_of(pairs / "sources" / "b.png")
    plan = samples_module.SamplePrompts(
        *(FakeClip(tiny), FakeVae(tiny), ("x", "caption b")),
        images=(torch.cat([image * 0, image]),), steps=1, cfg=1.0, sampler="euler", scheduler="normal",
    )  # fmt: skip
    [references] = plan.chosen([1]).references
    prompt = samples_module.Prompt("caption b", references, denoiser.family)
    batch = encoded(pairs, tiny, denoiser).sample(1)
    conditioning = read_conditioning(prompt.encode(plan, plan.clip, "caption b", (64, 64)))
    trained = batch.conditioning[0]
    for one, other in zip(trained["reference_latents"], conditioning["reference_latents"], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(trained["cross_attn"], conditioning["cross_attn"])
    with pytest.raises(UserError, match="image1 has 3 images for 2 prompts"):
        dataclasses.replace(plan, images=(torch.zeros(3, 64, 64, 3),))


def test_what_an_edit_is_made_from_lies_beside_its_samples(monkeypatch, tmp_path):
    """Two references of a prompt side by side, at one height."""
    drawn = Image.new("RGB", (8, 8))
    monkeypatch.setattr(samples_module, "draw_samples", lambda *_, **__: iter([[drawn], [drawn]]))
    images = (torch.stack([torch.zeros(32, 32, 3), torch.ones(32, 32, 3)]), torch.zeros(1, 64, 32, 4))
    plan = samples_module.SamplePrompts("clip", "vae", ("a", "b"), images=images)
    family = ComfyDenoiser(EDITS["flux"]()).family
    samples_module.SampleWriter(plan, None, family, tmp_path, 0, 9).draw(SimpleNamespace(step=4), [0, 1])
    names = [f"{kind}-{index}.png" for kind in ("input", "step-00000004") for index in (0, 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with Image.open(tmp_path / "input-1.png") as joined:
        assert joined.size == (512 + 256, 512)
        assert [joined.getpixel((x, 256)) for x in (10, 600)] == [(255, 255, 255), (0, 0, 0)]


INPAINTING = {
    "sd15": dataclasses.replace(TINY["sd15"], unet={**TINY["sd15"].unet, "in_channels": 9}),
    "fill": SIBLINGS["fill"],
}


@pytest.mark.feature(146)
@pytest.mark.parametrize("name", INPAINTING)
def test_an_inpainting_model_is_given_the_masked_image_and_its_mask(name, pairs):
    tiny, denoiser = INPAINTING[name], ComfyDenoiser(INPAINTING[name]())
    mask = torch.zeros(64, 64)
    mask[8:40, 16:64] = 1
    add(pairs / "targets", "b-mask.png", None, nodes_image(mask))
    config = dataclasses.replace(EXACT, mask=MaskConfig(outside=0.2))
    dataset = encoded(pairs, tiny, denoiser, config)
    clip, vae = FakeClip(tiny), FakeVae(tiny)
    stock = clip.encode_from_tokens_scheduled(clip.tokenize("caption b"))
    pixels = pixels_of(pairs / "targets" / "b.png")
    stock = nodes.InpaintModelConditioning().encode(stock, stock, pixels, vae, mask[None], False)[0]
    batch = dataset.sample(1)
    assert_seen(denoiser, batch, sampled_arguments(denoiser, stock, latents(tiny, 1)[None]))
    assert batch.masks.min() == pytest.approx(0.2) and batch.masks.max() == 1
    plain = dataset.sample(0)
    assert "concat_mask" not in plain.conditioning[0] and "concat_mask" in batch.conditioning[0]
    other = encoded(pairs, TINY["sd15"], ComfyDenoiser(TINY["sd15"]()), config).sample(1)
    assert "concat_mask" not in other.conditioning[0]


def nodes_image(mask):
    return Image.fromarray((mask.numpy() * 255).astype("uint8"))


def test_load_dataset_and_dataset_from_images_take_references(graft_nodes, base):
    for name in ("a", "b"):
        add(base / "input" / "targets", f"{name}.png", name)
        add(base / "input" / "sources", f"{name}.png", None, picture(seed=1))
    load = graft_nodes["GraftLoadDataset"]
    widgets = {"resolution": "64", "trigger": "", "missing_captions": "error", "caption_dropout": 0.0}
    widgets |= {"repeats": 1, "flip": False}
    images = load.execute(folder="targets", references="sources", **widgets).result[0]
    assert [sample.references[0].name for sample in images.samples] == ["a.png", "b.png"]
    known = load.fingerprint_inputs(folder="targets", references="sources")
    add(base / "input" / "sources", "b.png", None, picture(seed=2))
    assert load.fingerprint_inputs(folder="targets", references="sources") != known
    with pytest.raises(UserError, match="'nowhere' not found"):
        load.execute(folder="targets", references="nowhere", **widgets)
    only = {name: [value] for name, value in widgets.items()}
    given = {
        "images": [torch.rand(1, 64, 64, 3)],
        "captions": ["a"],
        "reference1": [torch.rand(1, 64, 64, 3)],
    }
    [sample] = graft_nodes["GraftDatasetFromImages"].execute(**given, **only).result[0].samples
    assert len(sample.references) == 1


class Copies:
    """Images of one color in many strengths, each of which is its own reference, or that of another image."""

    fingerprint = "copies"

    def __init__(self, name, first, apart=0):
        self.tiny, self.first, self.apart = EDITS[name], first, apart
        self.color = latents(self.tiny, 0, (1, 1))

    def __len__(self):
        return 16

    def image(self, number):
        strength = 4 * torch.randn(1, generator=torch.Generator().manual_seed(number))
        return (strength * self.color).expand(*self.color.shape[:-2], 4, 4).clone()

    def batch(self, size, *, seed, index):
        numbers = range(self.first + index * size, self.first + (index + 1) * size)
        stock = [stock_conditioning(self.tiny, 0, [self.image(each + self.apart)]) for each in numbers]
        return Batch(
            torch.stack([self.image(each) for each in numbers]), [read_conditioning(c) for c in stock]
        )

    def sample(self, index):
        return self.batch(1, seed=0, index=index)


@pytest.mark.feature(144)
@pytest.mark.parametrize("name", ["flux", "qwen"])
def test_a_lora_learns_to_copy_its_reference_and_not_to_ignore_it(name):
    denoiser = ComfyDenoiser(EDITS[name]())
    config = TrainConfig(
        batch_size=4,
        adapter=AdapterConfig(rank=16, targets="all"),
        optimizer=OptimizerConfig(lr=3e-3),
        memory=MemoryConfig(dtype="fp32"),
    )

    def held_out(state):
        """The loss with the right references, and with exchanged ones."""
        return [
            validation_loss(denoiser, Copies(name, 10, apart), config.memory, state) for apart in (0, 500)
        ]

    right, exchanged = held_out(initial_state(denoiser, config))
    assert right == pytest.approx(exchanged, rel=0.01)
    right, exchanged = held_out(train(denoiser, Copies(name, 1000), config, None, steps=200))
    assert right <= 0.5 * exchanged
