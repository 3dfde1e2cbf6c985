"""An edit LoRA from nothing, on a CPU: `python dev/pairs.py --work DIR`.

A tiny Flux that takes a reference learns a few edits of the starter's icons by instruction ("repair it").
On it, Graft's nodes train a LoRA on pairs for an edit that it has not seen: prints in blue. Stock nodes
then apply base and LoRA to icons that neither was shown: DIR/pairs.png, DIR/pairs.json. Seeded; the same
command continues what was stopped.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import runpy
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
STARTER = ROOT / "starter"
sys.path.insert(0, str(ROOT / "dev" / "starter"))

from fit import Muon, Training  # noqa: E402

SIZE, LINE = 96, 2
"""Pixels of a picture and of a line on each side of an edge."""
EDITS = (
    ("copy it", "plain", "plain"),
    ("repair it", "damaged", "plain"),
    ("draw its outline", "plain", "outline"),
)
"""What the base learns: instruction, reference, target."""
NEW_EDIT = "make it a cyanotype"
"""What the LoRA learns."""
TEXT_TOKENS, HEADS = 8, 4
FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "guidance_embed": True,
    "vec_in_dim": 768, "context_in_dim": 768, "hidden_size": 192, "num_heads": HEADS, "axes_dim": [8, 20, 20],
    "depth": 2, "depth_single_blocks": 3, "mlp_ratio": 4.0, "theta": 10, "qkv_bias": True,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="everything is written here")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trained", type=int, help="icons to train on; default: all")
    parser.add_argument("--variants", type=int, default=4, help="pictures of an icon: colors, poses")
    parser.add_argument("--base-steps", type=int, default=1800)
    parser.add_argument("--lora-steps", type=int, default=300)
    parser.add_argument("--held-out", type=int, default=10, help="icons to draw")
    settings = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(settings.threads)
    settings.work = settings.work.resolve()
    start_graft(settings.work)
    held_out, trained = ([path for path in icons() if is_held_out(path) == held] for held in (True, False))
    held_out = held_out[:: max(1, len(held_out) // settings.held_out)][: settings.held_out]
    trained = trained[: settings.trained]
    seconds, began = {}, time.process_time()
    for stage, done in (
        ("encode", lambda: encode_views(settings, trained)),
        ("pretrain", lambda: pretrain(settings)),
        ("train", lambda: train_lora(settings, trained)),
        ("draw", lambda: draw(settings.work, held_out)),
    ):
        done()
        seconds[stage], began = round(time.process_time() - began), time.process_time()
    report = {"errors": write_sheet(settings.work, held_out), "cpu_seconds": seconds}
    (settings.work / "pairs.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(report)


def start_graft(work: Path) -> None:
    """Import this checkout as graft, and ComfyUI with `work` as its folder."""
    work.mkdir(parents=True, exist_ok=True)
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()
    server = importlib.import_module("graft.commands.headless.server")
    server.make_folders(work)
    executor = importlib.import_module("graft.commands.headless.executor")
    options = ["--cpu", "--use-pytorch-cross-attention", "--base-directory", str(work)]
    executor.set_up_comfyui(server.find_comfyui(), options)
    import nodes

    nodes.NODE_CLASS_MAPPINGS["TinyEditModel"] = TinyEditModel


# --- pictures ---------------------------------------------------------------------------------------------


def icons() -> list[Path]:
    return sorted(STARTER.glob("*/*.png"))


def is_held_out(icon: Path) -> bool:
    return "validation" in icon.parent.name


def variant(icon: Path, number: int) -> Tensor:
    """Return an icon as (3, SIZE, SIZE) from 0 to 1: as it is, then with exchanged colors in other poses."""
    with Image.open(icon) as file:
        image = file.convert("RGB").resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    rng = np.random.default_rng([number, *icon.stem.encode()])
    colors = rng.permutation(3) if number else np.arange(3)
    if number:
        image = image.rotate(rng.uniform(-20, 20), Image.Resampling.BICUBIC, fillcolor=image.getpixel((0, 0)))
        x, y, side = (int(n) for n in rng.integers((0, 0, SIZE * 3 // 4), (SIZE // 6, SIZE // 6, SIZE + 1)))
        image = image.resize(
            (SIZE, SIZE), Image.Resampling.LANCZOS, (x, y, min(SIZE, x + side), min(SIZE, y + side))
        )
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[colors.tolist()] / 255
    return pixels.flip(-1) if number % 2 else pixels


def outline(pixels: Tensor) -> Tensor:
    """Return a picture's colors near its edges, white elsewhere."""
    around = [F.max_pool2d(sign * pixels, 2 * LINE + 1, 1, LINE) for sign in (1, -1)]
    return torch.where((around[0] + around[1]).amax(0) > 0.25, pixels, 1.0)


def cyanotype(pixels: Tensor) -> Tensor:
    """Return a picture in shades from Prussian blue to white."""
    light = (pixels * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(0)
    return torch.stack([light**2.2, 0.1 + 0.9 * light**1.2, 0.35 + 0.65 * light**0.7])


def damaged(pixels: Tensor) -> Tensor:
    """Return a picture with eight white squares in it, always the same ones for the same picture."""
    rng, holed = np.random.default_rng(int(pixels.sum())), pixels.clone()
    for y, x in rng.integers(0, SIZE - SIZE // 6, (8, 2)):
        holed[:, y : y + SIZE // 6, x : x + SIZE // 6] = 1
    return holed


VIEWS = {
    "plain": lambda x: x,
    "damaged": damaged,
    "outline": outline,
}


def save(pixels: Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels.permute(1, 2, 0) * 255).round().byte().numpy()).save(path)


# --- base -------------------------------------------------------------------------------------------------


class TinyEditModel:
    """ComfyUI node: the trained base with its text encoder and VAE."""

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"work": ("STRING", {})}}

    def load(self, work: str) -> tuple[Any, Any, Any]:
        import comfy.model_management
        import comfy.model_patcher

        model = build_model()
        model.diffusion_model.load_state_dict(torch.load(Path(work) / "base.pt")["modules"]["model"])
        device = comfy.model_management.get_torch_device()
        patcher = comfy.model_patcher.ModelPatcher(model.requires_grad_(False), device, torch.device("cpu"))
        return patcher, load_clip(Path(work)), load_vae()


def build_model() -> Any:
    """Return ComfyUI's Flux at tiny size: every block starts as the identity, every head looks at its place.

    The constant in queries and keys lets their positions decide, in target and reference alike, the more
    the later the head; to find that out takes training longer than all the edits.
    """
    import comfy.supported_models
    from comfy.ldm.flux.model import FluxParams

    newer = {"txt_ids_dims": []} if "txt_ids_dims" in FluxParams.__annotations__ else {}
    config = comfy.supported_models.Flux(FLUX | newer)
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "")
    torch.manual_seed(0)
    width = FLUX["hidden_size"]
    constant = torch.linspace(1, 4, HEADS).repeat_interleave(width // HEADS).repeat(2)
    with torch.no_grad():
        for name, p in model.diffusion_model.named_parameters():
            if name.endswith(("norm.scale", "norm.weight")):
                p.fill_(2.5)
            elif p.ndim == 1 or any(part in name for part in ("_mod.", "modulation.", "final_layer.")):
                p.zero_()
            else:
                nn.init.xavier_uniform_(p)
            if name.endswith(("qkv.bias", "linear1.bias")):
                p[: 2 * width] = constant
    return model


@functools.cache
def load_vae() -> Any:
    """Return the starter's autoencoder, its latents scaled as Flux expects them."""
    import comfy.latent_formats
    import comfy.sd
    import comfy.utils

    weights = comfy.utils.load_torch_file(str(next((STARTER / "base").glob("*sd3.safetensors"))))
    prefix, scale = "first_stage_model.", comfy.latent_formats.Flux()
    weights = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
    weights |= {"vae_scale": torch.tensor(scale.scale_factor), "vae_shift": torch.tensor(scale.shift_factor)}
    return comfy.sd.VAE(sd=weights)


@functools.cache
def load_clip(work: Path) -> Any:
    """Return the starter's text encoder for short texts."""
    import comfy.sd

    path = work / "models" / "text_encoders" / "clip_l.safetensors"
    if not path.exists():
        importlib.import_module("graft.starter.clip_l").write_clip_l(path)
    clip = comfy.sd.load_clip([str(path)])
    places = clip.cond_stage_model.clip_l.transformer.text_model.embeddings.position_embedding
    places.weight = nn.Parameter(places.weight[:TEXT_TOKENS].clone(), requires_grad=False)
    clip.tokenizer.clip_l.max_length = TEXT_TOKENS
    return clip


@torch.no_grad()
@torch.autocast("cpu", dtype=torch.bfloat16)
def encode_views(settings: argparse.Namespace, trained: list[Path]) -> None:
    """Write work/views.pt: {view: (pictures, 16, 16, 16)}, ready for the model."""
    path = settings.work / "views.pt"
    if not path.exists():
        pictures = [variant(icon, number) for icon in trained for number in range(settings.variants)]
        scale, views = build_model().process_latent_in, {}
        for name, view in VIEWS.items():
            pixels = torch.stack([view(picture) for picture in pictures]).permute(0, 2, 3, 1)
            views[name] = torch.cat([scale(load_vae().encode(part)).float() for part in pixels.split(16)])
        torch.save(views, path)


def pretrain(settings: argparse.Namespace, batch: int = 16) -> None:
    """Train the base by rectified flow on EDITS: work/base.pt."""
    views = torch.load(settings.work / "views.pt")
    clip = load_clip(settings.work)
    texts = {text: clip.encode_from_tokens(clip.tokenize(text), True) for text, _, _ in EDITS}
    model = build_model().diffusion_model.requires_grad_(True)
    training_mode = importlib.import_module("graft.training.comfy.versions").training_mode
    guard = importlib.import_module("graft.training.memory.in_place").guard_saved_tensors

    def loss_at(step: int, g: torch.Generator) -> Tensor:
        rng = np.random.default_rng([5, step])
        edits = [EDITS[n] for n in rng.integers(len(EDITS), size=batch)]
        which = rng.integers(len(views["plain"]), size=batch)
        reference, x0 = (
            torch.stack([views[edit[side]][n] for edit, n in zip(edits, which)]) for side in (1, 2)
        )
        context, pooled = (torch.cat([texts[edit[0]][n] for edit in edits]) for n in (0, 1))
        sigma = torch.sigmoid(torch.randn(batch, generator=g))
        sigma = 1.5 * sigma / (1 + 0.5 * sigma)
        noise, s = torch.randn(x0.shape, generator=g), sigma.view(-1, 1, 1, 1)
        guidance = torch.rand(batch, generator=g) * 4  # any: it says nothing
        with torch.autocast("cpu", dtype=torch.bfloat16), guard(copies=True):
            v = model(s * noise + (1 - s) * x0, sigma, context, pooled, guidance, [reference])
        return F.mse_loss(v.float(), noise - x0)

    named = list(model.named_parameters())
    inner = [p for name, p in named if p.ndim == 2 and "_blocks." in name and "mod" not in name]
    rest = [p for _, p in named if all(p is not other for other in inner)]
    updates = [
        Muon([{"params": inner, "peak_lr": 6e-3}], weight_decay=0.01),
        torch.optim.AdamW([{"params": rest, "peak_lr": 2e-3}], betas=(0.9, 0.98), weight_decay=0.0),
    ]
    run = Training("base", settings.work, steps=settings.base_steps, warmup=50, cooldown=0.5, seed=2)
    with training_mode():
        run.go(loss_at, {"model": model}, updates)


# --- LoRA -------------------------------------------------------------------------------------------------


def train_lora(settings: argparse.Namespace, trained: list[Path]) -> None:
    """Train on pairs by Graft's nodes; output/loras/cyanotype.safetensors."""
    folder = settings.work / "input"
    for icon in trained:
        for number in range(min(2, settings.variants)):
            name, picture = f"{icon.parent.name}-{icon.stem}-{number}", variant(icon, number)
            save(picture, folder / "pictures" / f"{name}.png")
            save(cyanotype(picture), folder / "cyanotypes" / f"{name}.png")
            (folder / "cyanotypes" / f"{name}.txt").write_text(NEW_EDIT, encoding="utf-8")
    run_graph(
        base=("TinyEditModel", {"work": str(settings.work)}),
        images=("GraftLoadDataset", {
            "folder": "cyanotypes", "references": "pictures", "resolution": str(SIZE), "trigger": "",
            "missing_captions": "error", "repeats": 1, "caption_dropout": 0.0, "flip": True,
            "recursive": False, "skip_bad_images": False,
        }),
        encoded=("GraftEncodeDataset", {
            "dataset": ["images", 0], "model": ["base", 0], "clip": ["base", 1], "vae": ["base", 2],
            "encode_again": False,
        }),
        lora=("GraftBuildLora", {"algorithm": "lora", "rank": 32, "alpha": 0.0, "targets": "all"}),
        train=("GraftTrainSteps", {
            "model": ["base", 0], "dataset": ["encoded", 0], "start": ["lora", 0], "batch_size": 8,
            "steps": settings.lora_steps, "total_steps": 0, "learning_rate": 2e-3, "seed": 0,
            "name": "cyanotype",
        }),
        save=("GraftSaveLora", {
            "state": ["train", 2], "name": "cyanotype", "dtype": "bf16", "save_workflow": True,
        }),
    )  # fmt: skip


def draw(work: Path, held_out: list[Path]) -> None:
    """Apply base and LoRA to held-out icons by stock nodes: output/drawn."""
    shutil.rmtree(work / "output" / "drawn", ignore_errors=True)
    graph: dict[str, tuple[str, dict[str, Any]]] = {
        "base": ("TinyEditModel", {"work": str(work)}),
        "LoRA": ("LoraLoaderModelOnly", {
            "model": ["base", 0], "lora_name": "cyanotype.safetensors", "strength_model": 1.0,
        }),
        "text": ("CLIPTextEncode", {"clip": ["base", 1], "text": NEW_EDIT}),
        "empty": ("EmptySD3LatentImage", {"width": SIZE, "height": SIZE, "batch_size": 1}),
    }  # fmt: skip
    for icon in held_out:
        name = icon.stem
        save(variant(icon, 0), work / "input" / "held_out" / icon.name)
        graph[f"{name} image"] = ("LoadImage", {"image": f"held_out/{icon.name}"})
        graph[f"{name} latent"] = ("VAEEncode", {"pixels": [f"{name} image", 0], "vae": ["base", 2]})
        reference = {"conditioning": ["text", 0], "latent": [f"{name} latent", 0]}
        graph[f"{name} reference"] = ("ReferenceLatent", reference)
        for model in ("base", "LoRA"):
            graph[f"{name} {model}"] = ("KSampler", {
                "model": [model, 0], "seed": 1, "steps": 20, "cfg": 1.0, "sampler_name": "euler",
                "scheduler": "simple", "positive": [f"{name} reference", 0], "negative": ["text", 0],
                "latent_image": ["empty", 0], "denoise": 1.0,
            })  # fmt: skip
            pixels = {"samples": [f"{name} {model}", 0], "vae": ["base", 2]}
            graph[f"{name} {model} pixels"] = ("VAEDecode", pixels)
            saved = {"images": [f"{name} {model} pixels", 0], "filename_prefix": f"drawn/{model}-{name}"}
            graph[f"{name} {model} saved"] = ("SaveImage", saved)
    run_graph(**graph)


def run_graph(**nodes: tuple[str, dict[str, Any]]) -> None:
    """Execute {name: (class, inputs)} in ComfyUI's own executor; a link is [name, index]."""
    prompt = {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in nodes.items()}
    graph = importlib.import_module("graft.commands.headless.executor").Executor(prompt, {})
    graph.run(graph.outputs)


def write_sheet(work: Path, held_out: list[Path]) -> dict[str, float]:
    """Write pairs.png; return the mean difference of each row's pictures to their targets, from 0 to 255."""
    plots = importlib.import_module("graft.training.run.plots")
    rows, columns, errors = ("input", "base", "LoRA", "target"), [], []
    for icon in held_out:
        drawn = work / "output" / "drawn"
        paths = [next(drawn.glob(f"{model}-{icon.stem}_*.png")) for model in ("base", "LoRA")]
        target = work / "targets" / icon.name
        save(cyanotype(variant(icon, 0)), target)
        paths = [work / "input" / "held_out" / icon.name, *paths, target]
        pictures = [Image.open(path).convert("RGB") for path in paths]
        columns.append(plots.Column(icon.stem.replace("-", " "), "", pictures))
        values = np.stack([np.asarray(picture, np.float32) for picture in pictures])
        errors.append(np.abs(values[:3] - values[3]).mean((1, 2, 3)))
    subtitle = f"{len(columns)} held-out icons; instruction: {NEW_EDIT}"
    plots.sample_grid(columns, list(rows), title="An edit LoRA", subtitle=subtitle).save(work / "pairs.png")
    return {row: round(float(error), 1) for row, error in zip(rows, np.mean(errors, 0))}


if __name__ == "__main__":
    main()
