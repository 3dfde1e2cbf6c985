"""Evaluation of the denoiser: losses with right, empty and wrong captions, and samples."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pictures as drawing
import torch
from autoencoder import decode, encode, load_taesd
from captions import Captions
from denoiser import Pictures, draw_sigmas, flow_losses, load_average, sample
from PIL import Image, ImageDraw
from torch import Tensor, nn

log = logging.getLogger("starter")

SIGMAS = [*(tenth / 10 for tenth in range(1, 10)), 0.95, 1.0]  # nine of the validation loss, two beyond
HELD_OUT = 512  # pictures of names that were never trained; as many, never trained either, of names that were
FEW = 192  # the first of them, at each of SIGMAS

SHOWN = [
    "red apple", "cat", "dog", "tropical fish", "penguin", "butterfly", "elephant", "rose",
    "sunflower", "cactus", "banana", "strawberry", "hamburger", "pizza", "birthday cake", "house",
    "car", "rocket", "umbrella", "guitar", "smiling face with sunglasses", "ghost", "robot", "rainbow",
]  # fmt: skip
WORDS = [
    "cat, noto style", "cat, twemoji style", "cat, fluent style", "outline drawing of a cat",
    "silhouette of a cat", "blueprint of a cat", "pink neon sign of a cat", "cat, pixel art style",
    "house, noto style", "house, twemoji style", "house, fluent style", "outline drawing of a house",
    "silhouette of a house", "blueprint of a house", "green neon sign of a house", "house, pixel art style",
    "a blue cat", "a green dog", "a red guitar", "a purple car",
    "rocket on a yellow background", "rocket under a night sky",
    "penguin in the snow", "palm tree at the beach",
    "a small cat at the top left", "a small cat on the right", "a small red car at the bottom", "a big fox",
    "a small yellow star at the top right on a dark blue background, fluent style",
    "a pink elephant in a meadow",
    "a big orange fish under water", "a blue mushroom on a striped background, pixel art style",
]  # fmt: skip


def measure(work: Path, shift: float) -> dict[str, dict[str, float]]:
    """Return {names: {caption: mean flow loss}}, all at the same noise and the same stratified sigmas.

    Logs the losses at each of SIGMAS too: which noise leaves something for a caption to say.
    """
    pictures, captions = Pictures(work), Captions()
    model, step = load_average(work)
    report = {}
    for key, names, seed in (("held out", pictures.held_out, 1001), ("trained", pictures.trained, 1002)):
        latents, shown = pictures.load(key.replace(" ", "_"), HELD_OUT, names, seed)
        rng = np.random.default_rng(seed)
        others = [shown[i - 1] for i in range(len(shown))]
        renamed = [dataclasses.replace(p, name=o.name) for p, o in zip(shown, others)]
        captions_of = {
            "right": describe_all(shown, rng),
            "none": [""] * len(shown),
            "other": describe_all(others, rng),
            "other name": describe_all(renamed, rng),
            "as trained": [drawing.describe(p, rng) for p in shown],
        }
        g = torch.Generator().manual_seed(9)
        sigma = draw_sigmas(len(latents), shift=shift, generator=g)
        noise = torch.randn(latents.shape, generator=g)
        rows = [("trained", sigma, HELD_OUT)]
        rows += [(str(s), torch.full_like(sigma, s), FEW) for s in SIGMAS]
        for name, at, count in rows:
            row = {k: losses(model, latents, noise, at, captions, t[:count]) for k, t in captions_of.items()}
            report[f"{key}, sigma {name}"] = row
            figures = ", ".join(f"{k} {v:.4f}" for k, v in row.items())
            log.info("step %d, %s, sigma %s: %s", step, key, name, figures)
    return report


def describe_all(shown: Sequence[drawing.Picture], rng: np.random.Generator) -> list[str]:
    return [drawing.describe(p, rng, complete=True) for p in shown]


@torch.no_grad()
def losses(
    model: nn.Module, latents: Tensor, noise: Tensor, sigma: Tensor, captions: Captions, text: list[str]
) -> float:
    parts = [slice(i, i + 64) for i in range(0, len(text), 64)]
    found = [flow_losses(model, latents[p].float(), noise[p], sigma[p], captions(text[p])) for p in parts]
    return torch.cat(found).mean().item()


def draw_sheet(work: Path, prompts: Sequence[str], path: Path, *, columns: int = 8, cfg: float = 4.0) -> None:
    model, _ = load_average(work)
    latents = torch.cat([
        sample(model, Captions(), list(prompts[i : i + 32]), cfg=cfg) for i in range(0, len(prompts), 32)
    ])  # fmt: skip
    pixels = decode(load_taesd(work / "vae_final.pt", work / "vae.pt"), latents).clamp(0, 1) * 255
    width, height = drawing.SIZE + 4, drawing.SIZE + 28
    page = Image.new("RGB", (columns * width, -(-len(prompts) // columns) * height), "white")
    for i, (prompt, p) in enumerate(zip(prompts, pixels.round().byte().permute(0, 2, 3, 1).numpy())):
        x, y = i % columns * width, i // columns * height
        page.paste(Image.fromarray(p), (x, y))
        text = "\n".join(prompt[k : k + 24] for k in range(0, len(prompt), 24)[:2])
        ImageDraw.Draw(page).multiline_text((x + 2, y + drawing.SIZE), text, fill="black", spacing=1)
    page.save(path)
    log.info("%s", path)


def reconstruct(work: Path, pictures: Tensor, path: Path) -> float:
    """Write pictures above their reconstructions; return the mean squared error."""
    model = load_taesd(work / "vae_final.pt", work / "vae.pt")
    y = decode(model, encode(model, pictures)).clamp(0, 1)
    error = (y - pictures.float() / 255).square().mean().item()
    rows = torch.stack([pictures, (y * 255).round().byte()])
    grid = rows.unflatten(1, (-1, 12)).permute(1, 0, 4, 2, 5, 3)  # row, which, y, column, x, color
    grid = grid.flatten(3, 4).flatten(0, 2)
    Image.fromarray(grid.numpy()).save(path)
    log.info("%s: mean squared error %.5f", path, error)
    return error
