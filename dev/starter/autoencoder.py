"""The starter model's autoencoder: ComfyUI's TAESD with 16 channels, trained from nothing on the CPU.

Encoder and decoder first train together, with a whitened, slightly noisy latent between them; later the
decoder alone is sharpened, which leaves the latents, and so the denoiser, as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from fit import Training, optimizers, save_atomically
from pictures import SIZE
from torch import Tensor, nn

log = logging.getLogger("starter")

LATENT_CHANNELS, DOWNSCALE = 16, 8
SD3_SCALE, SD3_SHIFT = 1.5305, 0.0609  # comfy.latent_formats.SD3


def train_autoencoder(work: Path, pictures: Tensor, steps: int) -> None:
    """Train on (n, 3, 128, 128) uint8 `pictures`; write work/vae.pt.

    Noise (0.1 of a channel's deviation) keeps the latent smooth, so the denoiser's small errors stay small in
    the picture. Random 64 px crops cost a quarter; the last fifth of the steps sees whole pictures.
    """
    model = build_taesd()
    whiten = nn.BatchNorm2d(LATENT_CHANNELS, affine=False, momentum=0.02)

    def loss_at(step: int, g: torch.Generator) -> Tensor:
        crop, batch = (SIZE, 4) if step >= 0.8 * steps else (64, 16)
        x = draw_crops(pictures, batch, crop, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = whiten(model.taesd_encoder(x))
            y = model.taesd_decoder(z + 0.1 * torch.randn(z.shape, generator=g))
        return picture_loss(y.float(), x)

    run = Training("autoencoder", work, steps=steps, warmup=30, cooldown=0.5, seed=1)
    updates = optimizers(model.named_parameters(), muon_lr=2e-3, adam_lr=1e-3)
    run.go(loss_at, {"model": model, "whiten": whiten}, updates)
    fold_whitening(model, pictures[:1024])
    save_atomically(model.state_dict(), work / "vae.pt")


def finetune_decoder(work: Path, pictures: Tensor, steps: int) -> None:
    """Sharpen the decoder on whole pictures; write work/vae_final.pt."""
    model = load_taesd(work / "vae.pt")
    latents = encode(model, pictures)

    def loss_at(step: int, g: torch.Generator) -> Tensor:
        which = torch.randint(len(pictures), (8,), generator=g)
        noise = 0.05 * torch.randn(8, *latents.shape[1:], generator=g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model.taesd_decoder(latents[which] + noise)
        return picture_loss(y.float(), to_float(pictures[which]))

    decoder = model.taesd_decoder
    run = Training("decoder", work, steps=steps, warmup=10, cooldown=0.8, seed=3)
    run.go(loss_at, {"decoder": decoder}, optimizers(decoder.named_parameters(), muon_lr=1e-3, adam_lr=5e-4))
    save_atomically(model.state_dict(), work / "vae_final.pt")


def fold_whitening(model: nn.Module, pictures: Tensor) -> None:
    """Give `model`'s latents SD3's statistics: after process_latent_in about N(0, 1) in every channel.

    TAESD's vae_scale and vae_shift are scalars: the encoder's last convolution takes what differs by channel.
    """
    z = encode(model, pictures)
    mean, std = z.mean((0, 2, 3)), z.std((0, 2, 3))
    last = model.taesd_encoder[-1]
    with torch.no_grad():
        last.weight.div_(std.view(-1, 1, 1, 1))
        last.bias.sub_(mean).div_(std)
        model.vae_scale.fill_(SD3_SCALE)
        model.vae_shift.fill_(SD3_SHIFT)


def build_taesd() -> nn.Module:
    """Return ComfyUI's TAESD with 16 channels, initialized here because comfy.ops leaves that to a file."""
    from comfy.taesd.taesd import TAESD

    torch.manual_seed(0)
    model = TAESD(latent_channels=LATENT_CHANNELS)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.Conv2d.reset_parameters(module)
    return model.to(memory_format=torch.channels_last)


def load_taesd(*paths: Path) -> nn.Module:
    """Load the first of `paths` that exists."""
    model = build_taesd()
    model.load_state_dict(torch.load(next(p for p in paths if p.exists())))
    return model


@torch.no_grad()
def encode(model: nn.Module, pictures: Iterable[Tensor] | Tensor) -> Tensor:
    """(n, 3, 128, 128) uint8 -> (n, 16, 16, 16) latents as the denoiser sees them."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.cat([model.taesd_encoder(to_float(x)).float() for x in pictures.split(32)]).contiguous()


@torch.no_grad()
def decode(model: nn.Module, latents: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.cat([model.taesd_decoder(z).float() for z in latents.split(16)])


def to_float(pictures: Tensor) -> Tensor:
    return (pictures.float() / 255).contiguous(memory_format=torch.channels_last)


def draw_crops(pictures: Tensor, batch: int, crop: int, g: torch.Generator) -> Tensor:
    """Crops at random multiples of the latent's 8 px, half of them mirrored, as floats in [0, 1].

    Of crops smaller than a picture, three quarters are the one of three with the most edges: most of a
    picture is flat and soon learned.
    """
    tries = 3 if crop < SIZE else 1
    which = torch.randint(len(pictures), (tries, batch), generator=g)
    corners = torch.randint((SIZE - crop) // DOWNSCALE + 1, (tries, batch, 2), generator=g) * DOWNSCALE
    places = zip(which.flatten().tolist(), corners.flatten(0, 1).tolist())
    crops = torch.stack([pictures[i, :, y : y + crop, x : x + crop] for i, (y, x) in places])
    edges = crops[..., ::2, ::2].float().diff(dim=-1).abs().mean((1, 2, 3)).view(tries, batch)
    best = edges.argmax(0)
    best[: batch // 4] = 0
    crops = crops.view(tries, batch, *crops.shape[1:])[best, torch.arange(batch)]
    mirrored = torch.rand(batch, generator=g) < 0.5
    crops[mirrored] = crops[mirrored].flip(-1)
    return to_float(crops)


def picture_loss(y: Tensor, x: Tensor) -> Tensor:
    """L1 of the pixels plus L1 of their differences to the right and down: edges count as much as areas."""
    error = y - x
    return error.abs().mean() + error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
