"""The starter model, trained from nothing on a CPU: a small SD3-class text-to-image model that draws emoji.

    python dev/starter/train.py --comfyui PATH --work DIR [stage ...]

Stages, in order, all but `unpack` by default: see STAGES at the end. Each reads what the earlier ones left in
DIR. The trainings checkpoint there every three minutes and continue when started again. Every random number
depends on the seed and the step alone, so an interrupted training ends where an undisturbed one would.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autoencoder
import denoiser
import evaluate
import names as name_lists
import numpy as np
import pictures as drawing
import torch
import torch.nn.functional as F
from captions import Captions
from fit import save_atomically
from safetensors.torch import load_file, save_file
from shipped import clip_l
from torch import Tensor

log = logging.getLogger("starter")

SHIPPED = Path(__file__).resolve().parents[2] / "starter" / "base" / "graft_tiny_sd3.safetensors"
MODEL_FILE = "graft_starter_sd3.safetensors"
CONTEXT_WIDTH, POOLED_WIDTH = 4096, 2048  # what an SD3 model is given; all zero behind CLIP-L's columns


def main() -> None:
    settings = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    start_comfyui(settings.comfyui)
    torch.set_num_threads(settings.threads)
    settings.work.mkdir(parents=True, exist_ok=True)
    for stage in settings.stages or [name for name in STAGES if name != "unpack"]:
        log.info("stage %s", stage)
        STAGES[stage](settings)


def start_comfyui(path: Path) -> None:
    """Make ComfyUI's modules importable, on the CPU."""
    sys.path.insert(0, str(path))
    sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()


# --- stages -----------------------------------------------------------------------------------------------


def train_autoencoder(settings: argparse.Namespace) -> None:
    if not (settings.work / "vae.pt").exists():
        pictures = autoencoder_pictures(settings)
        autoencoder.train_autoencoder(settings.work, pictures, settings.autoencoder_steps)


def autoencoder_pictures(settings: argparse.Namespace) -> Tensor:
    """Draw 6000 pictures of trained names, or read them: (6000, 3, 128, 128) uint8."""
    path = settings.work / "pictures.pt"
    if not path.exists():
        drawings = drawing.read_drawings(settings.work)
        trained = [n for n in drawings["noto"] if not name_lists.held_out(n)]
        rng = np.random.default_rng(11)
        drawn = np.stack([drawing.draw(drawing.choose(rng, trained), drawings) for _ in range(6000)])
        save_atomically(torch.from_numpy(drawn).permute(0, 3, 1, 2).contiguous(), path)
    return torch.load(path, mmap=True)


def unpack(settings: argparse.Namespace) -> None:
    """Write the shipped model where the trainings leave theirs, for `measure` and `samples` without them."""
    denoiser.unpack(load_file(SHIPPED), settings.work)


def train_denoiser(settings: argparse.Namespace) -> None:
    denoiser.train_denoiser(
        settings.work, width=settings.width, blocks=settings.blocks, batch=settings.batch,
        steps=settings.steps, cooldown=settings.cooldown, shards=settings.shards, shift=settings.shift,
        compiled=settings.compile,
    )  # fmt: skip


def finetune_decoder(settings: argparse.Namespace) -> None:
    autoencoder.finetune_decoder(settings.work, autoencoder_pictures(settings), settings.decoder_steps)


def export(settings: argparse.Namespace) -> None:
    """Write one half-precision checkpoint that CheckpointLoaderSimple reads, and the text encoder."""
    state = torch.load(settings.work / "denoiser.pt", mmap=True)
    average = state["modules"]["average"]
    for key, width in (("context_embedder.weight", CONTEXT_WIDTH), ("y_embedder.mlp.0.weight", POOLED_WIDTH)):
        average[key] = F.pad(average[key], (0, width - clip_l.WIDTH))
    weights = {f"{denoiser.DENOISER}{k}": v.half() for k, v in average.items()}
    vae = autoencoder.load_taesd(settings.work / "vae_final.pt", settings.work / "vae.pt")
    for key, value in vae.state_dict().items():
        scalar = value.ndim == 0  # vae_scale and vae_shift: half precision would shift every latent a little
        weights[f"{denoiser.VAE}{key}"] = value.clone() if scalar else value.half()
    path = settings.work / MODEL_FILE
    part = path.with_name(f"{path.name}.part")
    save_file({k: v.contiguous() for k, v in weights.items()}, part, metadata={"format": "pt"})
    part.chmod(0o644)
    os.replace(part, path)
    log.info("%s: %.1f MB, trained for %d steps", path, path.stat().st_size / 1e6, state["step"])
    clip_l.write_clip_l(settings.work / "clip_l.safetensors")


def check(settings: argparse.Namespace) -> None:
    """Draw one prompt with ComfyUI's loaders and sampler and with ours; fail if they differ visibly."""
    import comfy.sample
    import comfy.sd

    loaded = comfy.sd.load_checkpoint_guess_config(str(settings.work / MODEL_FILE), output_clip=False)
    model, vae = loaded[0], loaded[2]
    text = comfy.sd.load_clip([str(settings.work / "clip_l.safetensors")], clip_type=comfy.sd.CLIPType.SD3)

    def condition(prompt: str) -> list[Any]:
        context, pooled = text.encode_from_tokens(text.tokenize(prompt), return_pooled=True)
        return [[context, {"pooled_output": pooled}]]

    prompt = "a small red apple on the left on a blue background"
    noise = torch.randn(1, *denoiser.SHAPE, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        z = comfy.sample.sample(
            model, noise, 24, 4.0, "euler", "simple", condition(prompt), condition(""),
            torch.zeros_like(noise), disable_pbar=True, seed=1,
        )  # fmt: skip
        theirs = vae.decode(z)[0]
    average, _ = denoiser.load_average(settings.work)
    latents = denoiser.sample(average, Captions(), [prompt])
    decoder = autoencoder.load_taesd(settings.work / "vae_final.pt", settings.work / "vae.pt")
    ours = autoencoder.decode(decoder, latents)[0].permute(1, 2, 0).clamp(0, 1)
    error = (theirs - ours).abs().mean().item()
    log.info("ComfyUI's picture and ours differ by %.4f on average", error)
    if error > 0.03:
        raise SystemExit("the exported file does not draw what was trained")


def measure(settings: argparse.Namespace) -> None:
    evaluate.measure(settings.work, settings.shift)


def draw_samples(settings: argparse.Namespace) -> None:
    """Write samples.png (24 objects) and words.png (styles, colors, backgrounds, places), or --prompts."""
    if settings.prompts:
        evaluate.draw_sheet(settings.work, settings.prompts, settings.work / "prompts.png")
        return
    evaluate.draw_sheet(settings.work, evaluate.SHOWN, settings.work / "samples.png")
    evaluate.draw_sheet(settings.work, evaluate.WORDS, settings.work / "words.png")


def reconstruct(settings: argparse.Namespace) -> None:
    pictures = autoencoder_pictures(settings)[:48]
    evaluate.reconstruct(settings.work, pictures, settings.work / "reconstructed.png")


# --- command line -----------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI folder")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and everything temporary")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--autoencoder-steps", type=int, default=3200)
    parser.add_argument("--decoder-steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=384, help="of the denoiser; a multiple of 64")
    parser.add_argument("--blocks", type=int, default=6, help="ComfyUI takes width / 64 for granted")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16000, help="of the denoiser")
    parser.add_argument("--cooldown", type=int, default=4000, help="last steps, with falling learning rate")
    parser.add_argument("--shards", type=int, default=32, help=f"files of {denoiser.SHARD} encoded pictures")
    parser.add_argument("--shift", type=float, default=1.5, help="above 1 favors high noise in training")
    parser.add_argument(
        "--compile", action="store_true", help="the denoiser: a sixth less time, needs a C++ compiler"
    )
    parser.add_argument("--prompts", nargs="*", help="of the samples")
    parser.add_argument("stages", nargs="*", metavar="stage", help="of STAGES")
    settings = parser.parse_intermixed_args()
    if unknown := set(settings.stages) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))}; stages are {', '.join(STAGES)}")
    return settings


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "autoencoder": train_autoencoder,
    "denoiser": train_denoiser,
    "decoder": finetune_decoder,
    "export": export,
    "check": check,
    "measure": measure,
    "samples": draw_samples,
    "reconstruct": reconstruct,
    "unpack": unpack,
}


if __name__ == "__main__":
    main()
