"""The starter model's denoiser: ComfyUI's SD3.5 class, trained by rectified flow on encoded pictures.

The text encoder's outputs behind the 24th token are all zero, so their 53 tokens are one for the denoiser:
training computes that one and adds log(53) to its attention. What comes out is the same, in two thirds of
the time.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import names as name_lists
import numpy as np
import pictures as drawing
import torch
import torch.nn.functional as F
from autoencoder import DOWNSCALE, LATENT_CHANNELS, encode, load_taesd
from captions import Captions
from fit import Training, optimizers, save_atomically
from pictures import Picture
from shipped import clip_l
from torch import Tensor, nn

log = logging.getLogger("starter")

SHAPE = (LATENT_CHANNELS, drawing.SIZE // DOWNSCALE, drawing.SIZE // DOWNSCALE)
SHARD = 2048  # pictures in a file
FIRST_SHARDS, STEPS_PER_SHARD = 1, 200  # files there at the start; steps until there is one more
NO_CAPTION = 0.1  # share of the pictures, for guidance
DENOISER, VAE = "model.diffusion_model.", "first_stage_model."  # prefixes in a checkpoint for ComfyUI
PADDING = clip_l.POSITIONS - clip_l.PLACES


# --- pictures ---------------------------------------------------------------------------------------------


class Pictures:
    """Encoded pictures and what they show, drawn when first asked for and kept as files in work/latents."""

    def __init__(self, work: Path) -> None:
        self.folder = work / "latents"
        self.folder.mkdir(exist_ok=True)
        self.drawings = drawing.read_drawings(work)
        self.encoder = functools.cache(lambda: load_taesd(work / "vae.pt"))
        ids = list(self.drawings["noto"])
        self.trained = [n for n in ids if not name_lists.held_out(n)]
        self.held_out = [n for n in ids if name_lists.held_out(n)]
        self.shards: list[tuple[Tensor, list[Picture]]] = []

    def shard(self, index: int) -> tuple[Tensor, list[Picture]]:
        while len(self.shards) <= index:
            i = len(self.shards)
            self.shards.append(self.load(f"{i:03}", SHARD, self.trained, seed=i))
        return self.shards[index]

    def load(self, name: str, count: int, names: list[str], seed: int) -> tuple[Tensor, list[Picture]]:
        """Return ((count, 16, 16, 16) float16, pictures) from work/latents/`name`, first drawing it."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            rng = np.random.default_rng([7, seed])
            weights = drawing.name_weights(names)
            shown = [drawing.choose(rng, names, weights) for _ in range(count)]
            parts = []
            for at in range(0, count, 64):
                page = np.stack([drawing.draw(p, self.drawings) for p in shown[at : at + 64]])
                pixels = torch.from_numpy(page).permute(0, 3, 1, 2)
                parts.append(encode(self.encoder(), pixels).half())
            text = json.dumps([asdict(p) for p in shown])
            save_atomically({"latents": torch.cat(parts), "pictures": text}, path)
            log.info("drew %s", path)
        state = torch.load(path, mmap=True)
        fields = (p | {"shift": tuple(p["shift"])} for p in json.loads(state["pictures"]))
        return state["latents"], [Picture(**f) for f in fields]


# --- training ---------------------------------------------------------------------------------------------


def train_denoiser(
    work: Path, *, width: int, blocks: int, batch: int, steps: int, cooldown: int, shards: int, shift: float,
    compiled: bool,
) -> None:  # fmt: skip
    """Train until `steps`, which may change until the last `cooldown` steps begin: work/denoiser.pt."""
    pictures, captions = Pictures(work), Captions()
    model, average = build_denoiser(width, blocks), build_denoiser(width, blocks)
    use_fast_cpu_kernels(model)
    if compiled:
        model.compile(dynamic=False)

    def loss_at(step: int, g: torch.Generator) -> Tensor:
        there = min(shards, FIRST_SHARDS + step // STEPS_PER_SHARD)
        rng = np.random.default_rng([5, step])
        places = zip(rng.integers(there, size=batch), rng.integers(SHARD, size=batch))
        drawn = [(pictures.shard(i), j) for i, j in places]
        x0 = torch.stack([latents[j] for (latents, _), j in drawn]).float()
        text = [
            "" if rng.random() < NO_CAPTION else drawing.describe(shown[j], rng) for (_, shown), j in drawn
        ]
        sigma = draw_sigmas(batch, shift=shift, generator=g)
        noise = torch.randn(x0.shape, generator=g)
        return flow_losses(model, x0, noise, sigma, captions(text)).mean()

    def update_average(step: int) -> None:
        decay = min(0.9995, (1 + step) / (10 + step))
        mean, now = ([p.data for p in m.parameters()] for m in (average, model))
        torch._foreach_lerp_(mean, now, 1 - decay)

    run = Training("denoiser", work, steps=steps, warmup=100, cooldown=cooldown / steps, seed=2)
    updates = optimizers(model.named_parameters(), muon_lr=2e-3, adam_lr=1e-3, weight_decay=0.01)
    run.go(loss_at, {"model": model, "average": average}, updates, after_step=update_average)


def flow_losses(
    model: nn.Module, x0: Tensor, noise: Tensor, sigma: Tensor, text: dict[str, Tensor]
) -> Tensor:
    """(b,) squared error of the velocity noise - x0, predicted from sigma * noise + (1 - sigma) * x0."""
    s = sigma.view(-1, 1, 1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = model(s * noise + (1 - s) * x0, sigma * 1000, **text)
    return (v.float() - (noise - x0)).square().mean((1, 2, 3))


def draw_sigmas(count: int, *, shift: float, generator: torch.Generator) -> Tensor:
    """Logit-normal sigmas with SD3's shift, one from each of `count` equal slices of the distribution.

    Slicing leaves the distribution as it is and makes the loss of a batch less noisy.
    """
    u = (torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)) / count
    u = torch.sigmoid(torch.special.ndtri(u.clamp(1e-4, 1 - 1e-4)))
    return shift * u / (1 + (shift - 1) * u)


# --- model ------------------------------------------------------------------------------------------------


def build_denoiser(width: int, blocks: int) -> nn.Module:
    """Return ComfyUI's SD3.5 class, initialized; positions are computed, not stored.

    Its text inputs have CLIP-L's 768 columns, the only ones that are not zero; export adds the others.
    """
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    embedder = {"in_features": clip_l.WIDTH, "out_features": width}
    model = OpenAISignatureMMDITWrapper(
        input_size=None, patch_size=2, in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS,
        depth=width // 64, num_blocks=blocks, adm_in_channels=clip_l.WIDTH,
        context_embedder_config={"target": "torch.nn.Linear", "params": embedder},
        qk_norm="rms", num_patches=None, pos_embed_max_size=None, pos_embed_scaling_factor=None,
        dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("ln_q.weight", "ln_k.weight")):
                p.fill_(1)
            elif p.ndim == 1 or "adaLN_modulation" in name or name.startswith("final_layer.linear"):
                p.zero_()  # every block starts as the identity (Peebles and Xie 2022, arXiv:2212.09748)
            elif name in ("context_embedder.weight", "y_embedder.mlp.0.weight"):
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
            else:
                nn.init.xavier_uniform_(p.view(p.shape[0], -1))
    return model


def use_fast_cpu_kernels(model: nn.Module) -> None:
    """Compute the same function in less time, and count the last text token 53 times.

    Backward through oneDNN's 2x2 convolution and through CPU flash attention took 18 % of a step each (torch
    2.11, AVX-512, bf16); plain matrix products take almost nothing at this size.
    """
    import comfy.ldm.modules.diffusionmodules.mmdit as mmdit

    projection = model.x_embedder.proj

    def embed(x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        patches = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, c * 4)
        return F.linear(patches, projection.weight.flatten(1), projection.bias)

    count = torch.zeros(clip_l.PLACES + 1 + SHAPE[1] * SHAPE[2] // 4)
    count[clip_l.PLACES] = math.log(PADDING)

    theirs = mmdit.optimized_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, **rest: Any) -> Tensor:
        b, n, _width = q.shape
        if n != len(count):  # with all 77 tokens: ComfyUI itself is drawing
            return theirs(q, k, v, heads, **rest)
        q, k, v = (t.reshape(b, n, heads, -1).transpose(1, 2).to(torch.bfloat16) for t in (q, k, v))
        weights = ((q * q.shape[-1] ** -0.5) @ k.mT + count.to(q.dtype)).softmax(-1, dtype=torch.float32)
        return (weights.to(torch.bfloat16) @ v).transpose(1, 2).reshape(b, n, -1)

    model.x_embedder.forward = embed
    mmdit.optimized_attention = attention


def unpack(weights: Mapping[str, Tensor], work: Path) -> None:
    """Write a checkpoint for ComfyUI as work/denoiser.pt and work/vae.pt; its step is unknown."""
    average = {k.removeprefix(DENOISER): w.float() for k, w in weights.items() if k.startswith(DENOISER)}
    for key in ("context_embedder.weight", "y_embedder.mlp.0.weight"):
        average[key] = average[key][:, : clip_l.WIDTH].contiguous()
    autoencoder = {k.removeprefix(VAE): w.float() for k, w in weights.items() if k.startswith(VAE)}
    save_atomically({"step": -1, "modules": {"average": average}}, work / "denoiser.pt")
    save_atomically(autoencoder, work / "vae.pt")


def load_average(work: Path) -> tuple[nn.Module, int]:
    """Return the running mean of the denoiser's weights, ready to draw, and its step."""
    state = torch.load(work / "denoiser.pt", mmap=True)
    weights = state["modules"]["average"]
    blocks = 1 + max(int(k.split(".")[1]) for k in weights if k.startswith("joint_blocks."))
    model = build_denoiser(weights["x_embedder.proj.weight"].shape[0], blocks)
    model.load_state_dict(weights)
    use_fast_cpu_kernels(model)
    return model.requires_grad_(False), state["step"]


@torch.no_grad()
def sample(
    model: nn.Module, read: Callable[[list[str]], dict[str, Tensor]], prompts: list[str], *,
    steps: int = 24, cfg: float = 4.0, seed: int = 1,
) -> Tensor:  # fmt: skip
    """Draw latents by Euler's method with ComfyUI's "simple" sigmas for SD3 (shift 3); all from one noise."""
    noise = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(seed))
    text = read(prompts + [""] * len(prompts))
    u = torch.linspace(1, 0, steps + 1)
    sigmas = (3 * u / (1 + 2 * u)).tolist()
    x = noise.repeat(len(prompts), 1, 1, 1)
    for now, then in zip(sigmas, sigmas[1:]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            v = model(x.repeat(2, 1, 1, 1), torch.full((2 * len(x),), now * 1000), **text).float()
        right, none = v.chunk(2)
        x = x + (then - now) * (none + cfg * (right - none))
    return x
