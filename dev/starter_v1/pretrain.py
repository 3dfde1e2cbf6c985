"""The first starter model, trained on a CPU: a small SD3-class text-to-image model that draws emoji.

    python dev/starter_v1/pretrain.py --comfyui PATH --work DIR [stage ...]

Stages, in order, all by default: data, autoencoder, latents, captions, denoiser, decoder, export, samples.
Each reads what the earlier ones left in DIR; the three trainings checkpoint there every three minutes and go
on when started again. The rule: every random number depends on the seed and the step alone, so an interrupted
training ends where an undisturbed one would. starter/README.md says what came out and what was tried.

The architectures are ComfyUI's own classes and the files its own formats; training follows SD3 (Esser et al.
2024, arXiv:2403.03206), with Muon (Jordan 2024, kellerjordan.github.io/posts/muon) for hidden matrices.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "starter"), str(HERE.parents[1] / "starter")]  # fit, clip_l

import icons  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from clip_l import WIDTH as TEXT_WIDTH  # noqa: E402
from clip_l import write_clip_l  # noqa: E402
from fit import Training, optimizers, save_atomically  # noqa: E402
from torch import Tensor, nn  # noqa: E402

log = logging.getLogger("pretrain")

MODEL_FILE = "graft_tiny_sd3.safetensors"
LATENT_CHANNELS, DOWNSCALE = 16, 8
SD3_SCALE, SD3_SHIFT = 1.5305, 0.0609  # comfy.latent_formats.SD3
VARIANT_SHARES = [0.7, 0.1, 0.05, 0.05, 0.05, 0.05]  # as drawn, mirrored, four times posed
CONTEXT_WIDTH, POOLED_WIDTH = 4096, 2048  # what an SD3 model is given; beyond CLIP-L's columns all zero here


def main() -> None:
    settings = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    start_comfyui(settings.comfyui)
    torch.set_num_threads(settings.threads)
    settings.work.mkdir(parents=True, exist_ok=True)
    for stage in settings.stages or STAGES:
        log.info("stage %s", stage)
        STAGES[stage](settings)


def start_comfyui(path: Path) -> None:
    """Make ComfyUI's modules importable, on the CPU."""
    sys.path.insert(0, str(path))
    sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()


# --- stage: data ------------------------------------------------------------------------------------------


def make_data(settings: argparse.Namespace) -> None:
    """Draw the autoencoder's pictures, and the folders dataset, validation and base_style of starter/."""
    noto, fluent = packages(settings)
    names = icons.BASE_SET + icons.AUTOENCODER_EXTRA
    pictures = [*icons.read_svgs(noto, names).values(), *icons.read_svgs(fluent, names).values()]
    torch.save(torch.stack([icons.render(svg) for svg in pictures]), settings.work / "pictures.pt")
    demo = settings.out.parent
    icons.write_captioned(icons.read_svgs(fluent, icons.LORA_SET), demo / "dataset")
    icons.write_captioned(icons.read_svgs(fluent, icons.LORA_HELD_OUT), demo / "validation")
    icons.write_captioned(icons.read_svgs(noto, icons.BASE_HELD_OUT), demo / "base_style")


def packages(settings: argparse.Namespace) -> tuple[Path, Path]:
    return (
        settings.noto or icons.fetch_package(icons.NOTO, settings.work),
        settings.fluent or icons.fetch_package(icons.FLUENT, settings.work),
    )


# --- stages: autoencoder, decoder -------------------------------------------------------------------------


def train_autoencoder(settings: argparse.Namespace) -> None:
    """Train encoder and decoder together with a whitened, slightly noisy latent between them.

    Noise (0.1 of a channel's deviation) keeps the latent smooth, so the denoiser's small errors stay small in
    the picture. Random 64 px crops cost a quarter; the last fifth of the steps sees whole pictures.
    """
    pictures = torch.load(settings.work / "pictures.pt")
    model = build_taesd()
    whiten = nn.BatchNorm2d(LATENT_CHANNELS, affine=False, momentum=0.02)
    steps = settings.autoencoder_steps

    def loss_at(step: int, g: torch.Generator) -> Tensor:
        crop, batch = (icons.SIZE, 4) if step >= 0.8 * steps else (64, 16)
        x = draw_crops(pictures, batch, crop, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = whiten(model.taesd_encoder(x))
            y = model.taesd_decoder(z + 0.1 * torch.randn(z.shape, generator=g))
        return picture_loss(y.float(), x)

    run = Training("autoencoder", settings.work, steps=steps, warmup=30, cooldown=0.5, seed=1)
    updates = optimizers(model.named_parameters(), muon_lr=2e-3, adam_lr=1e-3)
    run.go(loss_at, {"model": model, "whiten": whiten}, updates)
    fold_whitening(model, pictures[: len(pictures) // 2])
    save_atomically(model.state_dict(), settings.work / "vae.pt")


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


def finetune_decoder(settings: argparse.Namespace) -> None:
    """Sharpen the decoder on whole pictures; the latents, and so the denoiser, stay as they are."""
    pictures = torch.load(settings.work / "pictures.pt")
    model = load_taesd(settings)
    latents = encode(model, pictures)

    def loss_at(step: int, g: torch.Generator) -> Tensor:
        which = torch.randint(len(pictures), (8,), generator=g)
        noise = 0.05 * torch.randn(8, *latents.shape[1:], generator=g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model.taesd_decoder(latents[which] + noise)
        return picture_loss(y.float(), to_float(pictures[which]))

    decoder = model.taesd_decoder
    run = Training("decoder", settings.work, steps=settings.decoder_steps, warmup=10, cooldown=0.8, seed=3)
    run.go(loss_at, {"decoder": decoder}, optimizers(decoder.named_parameters(), muon_lr=1e-3, adam_lr=5e-4))
    drawn = torch.cat([decode(model, z) for z in latents.split(32)])
    error = (drawn - to_float(pictures)).square()
    log.info("reconstruction MSE: noto %.5f, fluent %.5f", *(half.mean() for half in error.chunk(2)))
    save_atomically(model.state_dict(), settings.work / "vae_final.pt")


def build_taesd() -> nn.Module:
    """Return ComfyUI's TAESD with 16 channels, initialized here as comfy.ops leaves that to a file."""
    from comfy.taesd.taesd import TAESD

    torch.manual_seed(0)
    model = TAESD(latent_channels=LATENT_CHANNELS)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.Conv2d.reset_parameters(module)
    return model.to(memory_format=torch.channels_last)


def load_taesd(settings: argparse.Namespace) -> nn.Module:
    model = build_taesd()
    final = settings.work / "vae_final.pt"
    model.load_state_dict(torch.load(final if final.exists() else settings.work / "vae.pt"))
    return model


@torch.no_grad()
def encode(model: nn.Module, pictures: Tensor) -> Tensor:
    """(n, 3, 128, 128) uint8 -> (n, 16, 16, 16) latents as the denoiser sees them."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.cat([model.taesd_encoder(to_float(x)).float() for x in pictures.split(50)]).contiguous()


@torch.no_grad()
def decode(model: nn.Module, latents: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.taesd_decoder(latents).float()


def to_float(pictures: Tensor) -> Tensor:
    return (pictures.float() / 255).contiguous(memory_format=torch.channels_last)


def draw_crops(pictures: Tensor, batch: int, crop: int, g: torch.Generator) -> Tensor:
    """Crops at random multiples of the latent's 8 px, half of them mirrored, as floats in [0, 1]."""
    which = torch.randint(len(pictures), (batch,), generator=g)
    corners = torch.randint((icons.SIZE - crop) // DOWNSCALE + 1, (batch, 2), generator=g) * DOWNSCALE
    places = zip(which.tolist(), corners.tolist())
    crops = torch.stack([pictures[i, :, y : y + crop, x : x + crop] for i, (y, x) in places])
    mirrored = torch.rand(batch, generator=g) < 0.5
    crops[mirrored] = crops[mirrored].flip(-1)
    return to_float(crops)


def picture_loss(y: Tensor, x: Tensor) -> Tensor:
    """L1 of the pixels plus L1 of their differences to the right and down: edges count as much as areas."""
    error = y - x
    return error.abs().mean() + error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()


# --- stages: latents, captions ----------------------------------------------------------------------------


def make_latents(settings: argparse.Namespace) -> None:
    """Encode six pictures of each object: as drawn, mirrored, and four a little smaller, turned and moved."""
    svgs = icons.read_svgs(packages(settings)[0], icons.BASE_SET)
    rng = np.random.default_rng(1)
    plain, posed = [], []
    for name, svg in svgs.items():
        flips = (False, False) if name in icons.ONE_WAY else (False, True)
        plain += [icons.render(icons.pose(svg, None, flip=flip)) for flip in flips]
        posed += [icons.render(icons.pose(svg, rng, flip=flip)) for flip in flips * 2]
    model, shape = load_taesd(settings), (LATENT_CHANNELS, icons.SIZE // DOWNSCALE, icons.SIZE // DOWNSCALE)
    latents = [encode(model, torch.stack(p)).view(len(svgs), -1, *shape) for p in (plain, posed)]
    save_atomically(torch.cat(latents, 1).half(), settings.work / "latents.pt")


def encode_captions(settings: argparse.Namespace) -> None:
    """Encode "" and every caption once with ComfyUI's own SD3 text encoder, over the CLIP-L alone."""
    clip = load_clip(settings)
    context, pooled = [], []
    with torch.inference_mode():
        for text in ["", *(icons.caption(name) for name in icons.BASE_SET)]:
            c, y = clip.encode_from_tokens(clip.tokenize(text), return_pooled=True)
            assert not c[..., TEXT_WIDTH:].any() and not y[..., TEXT_WIDTH:].any()
            context.append(c[0, :, :TEXT_WIDTH])
            pooled.append(y[0, :TEXT_WIDTH])
        captions = {"context": torch.stack(context).half(), "pooled": torch.stack(pooled).half()}
    save_atomically(captions, settings.work / "captions.pt")


def load_clip(settings: argparse.Namespace) -> Any:
    import comfy.sd

    path = settings.work / "clip_l.safetensors"
    if not path.exists():
        write_clip_l(path)
    return comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.SD3)


# --- stage: denoiser --------------------------------------------------------------------------------------


def train_denoiser(settings: argparse.Namespace) -> None:
    """Train the MMDiT by rectified flow: from sigma * noise + (1 - sigma) * x0 it predicts noise - x0."""
    latents = torch.load(settings.work / "latents.pt").float()
    captions = torch.load(settings.work / "captions.pt")
    context, pooled = captions["context"].float(), captions["pooled"].float()
    model = build_denoiser(settings.depth, context, pooled)
    average = copy.deepcopy(model)
    use_fast_cpu_kernels(model)
    batch = settings.batch
    shares = torch.tensor(VARIANT_SHARES)

    def loss_at(step: int, g: torch.Generator) -> Tensor:
        which = torch.randint(len(latents), (batch,), generator=g)
        variant = torch.multinomial(shares, batch, replacement=True, generator=g)
        x0 = latents[which, variant]
        text = torch.where(torch.rand(batch, generator=g) < 0.1, 0, which + 1)  # 0 is "", for guidance
        sigma = draw_sigmas(batch, shift=settings.shift, generator=g)
        noise = torch.randn(x0.shape, generator=g)
        s = sigma.view(-1, 1, 1, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            v = model(s * noise + (1 - s) * x0, sigma * 1000, context=context[text], y=pooled[text])
        return (v.float() - (noise - x0)).square().mean()

    def update_average(step: int) -> None:
        decay = min(0.999, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            [p.data for p in average.parameters()], [p.data for p in model.parameters()], 1 - decay
        )

    run = Training(
        "denoiser",
        settings.work,
        steps=settings.steps,
        warmup=100,
        cooldown=settings.cooldown / settings.steps,
        seed=2,
    )
    updates = optimizers(model.named_parameters(), muon_lr=2e-3, adam_lr=1e-3, weight_decay=0.01)
    run.go(loss_at, {"model": model, "average": average}, updates, after_step=update_average)


def draw_sigmas(count: int, *, shift: float, generator: torch.Generator) -> Tensor:
    """Logit-normal sigmas with SD3's shift, one from each of `count` equal slices of the distribution.

    Slicing leaves the distribution as it is and makes the loss of a batch less noisy.
    """
    u = (torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)) / count
    u = torch.sigmoid(torch.special.ndtri(u.clamp(1e-4, 1 - 1e-4)))
    return shift * u / (1 + (shift - 1) * u)


def build_denoiser(depth: int, context: Tensor, pooled: Tensor) -> nn.Module:
    """Return ComfyUI's SD3.5 class (hidden = 64 * depth), initialized; positions are computed, not stored.

    Its text inputs have CLIP-L's 768 columns, the only non-zero ones; export adds the others. Their first
    matrix starts whitened by the captions' mean and deviation: random encoders have large constant parts.
    """
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    embedder = {"in_features": TEXT_WIDTH, "out_features": 64 * depth}
    model = OpenAISignatureMMDITWrapper(
        input_size=None, patch_size=2, in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS, depth=depth,
        adm_in_channels=TEXT_WIDTH, context_embedder_config={"target": "torch.nn.Linear", "params": embedder},
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
            else:
                nn.init.xavier_uniform_(p.view(p.shape[0], -1))
        for linear, seen in (
            (model.context_embedder, context.flatten(0, 1)),
            (model.y_embedder.mlp[0], pooled),
        ):
            mean = seen.mean(0)
            nn.init.normal_(linear.weight, std=1 / (TEXT_WIDTH**0.5 * (seen - mean).std().item()))
            linear.bias.copy_(-linear.weight @ mean)
    return model


def use_fast_cpu_kernels(model: nn.Module) -> None:
    """Compute the same function in two thirds of the time.

    Backward through oneDNN's 2x2 convolution and through CPU flash attention took 18 % of a step each (torch
    2.11, AVX-512, bf16); plain matrix products take almost nothing at this size.
    """
    import comfy.ldm.modules.diffusionmodules.mmdit as mmdit

    projection = model.x_embedder.proj

    def embed(x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        patches = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, c * 4)
        return F.linear(patches, projection.weight.flatten(1), projection.bias)

    def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, **_: Any) -> Tensor:
        b, n, _width = q.shape
        q, k, v = (t.reshape(b, n, heads, -1).transpose(1, 2).to(torch.bfloat16) for t in (q, k, v))
        weights = ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(-1, dtype=torch.float32)
        return (weights.to(torch.bfloat16) @ v).transpose(1, 2).reshape(b, n, -1)

    model.x_embedder.forward = embed
    mmdit.optimized_attention = attention


# --- stages: export, samples ------------------------------------------------------------------------------


def export(settings: argparse.Namespace) -> None:
    """Write one half-precision checkpoint that CheckpointLoaderSimple reads: denoiser and autoencoder."""
    from safetensors.torch import save_file

    state = torch.load(settings.work / "denoiser.pt")
    denoiser = state["modules"]["average"]
    for key, width in (("context_embedder.weight", CONTEXT_WIDTH), ("y_embedder.mlp.0.weight", POOLED_WIDTH)):
        denoiser[key] = F.pad(denoiser[key], (0, width - TEXT_WIDTH))
    weights = {f"model.diffusion_model.{k}": v.half() for k, v in denoiser.items()}
    for key, value in load_taesd(settings).state_dict().items():
        scalar = value.ndim == 0  # vae_scale and vae_shift: half precision would shift every latent a little
        weights[f"first_stage_model.{key}"] = value.clone() if scalar else value.half().contiguous()
    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.out / MODEL_FILE
    part = path.with_name(f"{path.name}.part")
    save_file({k: v.contiguous() for k, v in weights.items()}, part, metadata={"format": "pt"})
    part.chmod(0o644)
    os.replace(part, path)
    log.info("%s: %.1f MB, trained for %d steps", path, path.stat().st_size / 1e6, state["step"])


def draw_samples(settings: argparse.Namespace) -> None:
    """Draw a labeled grid with ComfyUI's loader and sampler: work/samples.png."""
    import comfy.sample
    import comfy.sd
    from PIL import Image, ImageDraw

    model, _, vae, _ = comfy.sd.load_checkpoint_guess_config(
        str(settings.out / MODEL_FILE), output_clip=False
    )
    clip = load_clip(settings)

    def condition(text: str) -> list[Any]:
        context, pooled = clip.encode_from_tokens(clip.tokenize(text), return_pooled=True)
        return [[context, {"pooled_output": pooled}]]

    prompts = settings.prompts or SHOWN
    columns, width, height = 8, icons.SIZE + 4, icons.SIZE + 18
    page = Image.new("RGB", (columns * width, -(-len(prompts) // columns) * height), "white")
    latent = torch.zeros(1, LATENT_CHANNELS, icons.SIZE // DOWNSCALE, icons.SIZE // DOWNSCALE)
    with torch.inference_mode():
        noise = comfy.sample.prepare_noise(latent, settings.seed)
        for i, prompt in enumerate(prompts):
            z = comfy.sample.sample(
                model, noise, settings.sample_steps, settings.cfg, "euler", settings.scheduler,
                condition(prompt), condition(""), latent, disable_pbar=True, seed=settings.seed,
            )  # fmt: skip
            picture = (vae.decode(z)[0].clamp(0, 1) * 255).round().byte().numpy()
            x, y = i % columns * width, i // columns * height
            page.paste(Image.fromarray(picture), (x, y))
            ImageDraw.Draw(page).text((x + 2, y + icons.SIZE + 2), prompt[:24], fill="black")
    page.save(settings.work / settings.sheet)
    log.info("%s", settings.work / settings.sheet)


# --- command line -----------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI folder")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and everything temporary")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "base")
    parser.add_argument("--noto", type=Path, help=f"unpacked {icons.NOTO}; npm pack fetches it otherwise")
    parser.add_argument("--fluent", type=Path, help=f"unpacked {icons.FLUENT}; npm pack fetches it otherwise")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--autoencoder-steps", type=int, default=780)
    parser.add_argument("--decoder-steps", type=int, default=200)
    parser.add_argument("--depth", type=int, default=4, help="blocks; the width is 64 times this")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5000, help="of the denoiser")
    parser.add_argument(
        "--cooldown", type=int, default=1200, help="steps at the end with falling learning rate"
    )
    parser.add_argument("--shift", type=float, default=1.5, help="above 1 favors high noise in training")
    parser.add_argument("--prompts", nargs="*", help="of the samples")
    parser.add_argument("--sheet", default="samples.png", help="file name of the samples")
    parser.add_argument("--seed", type=int, default=1, help="of the samples")
    parser.add_argument("--sample-steps", type=int, default=24)
    parser.add_argument("--cfg", type=float, default=4.0)
    parser.add_argument("--scheduler", default="simple")
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"of {', '.join(STAGES)}")
    settings = parser.parse_intermixed_args()
    if unknown := set(settings.stages) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))}; stages are {', '.join(STAGES)}")
    return settings


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "data": make_data,
    "autoencoder": train_autoencoder,
    "latents": make_latents,
    "captions": encode_captions,
    "denoiser": train_denoiser,
    "decoder": finetune_decoder,
    "export": export,
    "samples": draw_samples,
}

SHOWN = [
    "red apple", "cat face", "dog face", "fish", "penguin", "butterfly", "elephant", "rose",
    "sunflower", "cactus", "banana", "strawberry", "hamburger", "pizza", "birthday cake", "house",
    "automobile", "rocket", "umbrella", "guitar", "smiling face with sunglasses", "ghost", "robot", "rainbow",
]  # fmt: skip


if __name__ == "__main__":
    main()
