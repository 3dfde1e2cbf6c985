"""An edit LoRA from nothing, on a CPU: `python dev/pairs.py --work DIR`.

A tiny Flux that takes a reference learns five edits of the starter's icons by instruction ("mirror it"). On
it, Graft's nodes train a LoRA on pairs for an edit that it has not seen: fill a colored outline. Stock nodes
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
from collections.abc import Iterator
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

log = logging.getLogger("starter")

SIZE, LINE = 128, 3
"""Pixels of a picture and of a line on each side of an edge."""
TRAINED, HELD_OUT = ("style", "base_style"), "style_validation"
"""Folders of the starter."""
EDITS = (
    ("copy it", "plain", "plain"),
    ("copy it", "outline", "outline"),
    ("mirror it", "plain", "mirrored"),
    ("mirror it", "outline", "mirrored outline"),
    ("make it negative", "plain", "negative"),
    ("repair it", "damaged", "plain"),
    ("draw its outline", "plain", "outline"),
)
"""What the base learns: instruction, reference, target."""
NEW_EDIT = ("color it in", "outline", "plain")
"""What the LoRA learns."""
TEXT_TOKENS = 8
FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "guidance_embed": True,
    "vec_in_dim": 768, "context_in_dim": 768, "hidden_size": 192, "num_heads": 4, "axes_dim": [16, 16, 16],
    "depth": 2, "depth_single_blocks": 3, "mlp_ratio": 4.0, "theta": 10000, "qkv_bias": True,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="everything is written here")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variants", type=int, default=4, help="pictures of an icon: colors, poses")
    parser.add_argument("--trained", type=int, help="icons to train on; default: all")
    parser.add_argument("--base-steps", type=int, default=1500)
    parser.add_argument("--lora-steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--icons", type=int, default=12, help="held-out icons to draw")
    settings = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(settings.threads)
    work = settings.work = settings.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    start_graft(work)
    seconds, began = {}, time.process_time()
    for stage in (pretrain, write_pairs, train_lora, draw):
        stage(settings)
        seconds[stage.__name__], began = round(time.process_time() - began), time.process_time()
    report = {"errors": write_sheet(work), "cpu_seconds": seconds}
    (work / "pairs.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    log.info("%s: %s", work / "pairs.png", report)


def start_graft(work: Path) -> None:
    """Import this checkout as graft, and ComfyUI with `work` as its folder."""
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()
    server = importlib.import_module("graft.commands.headless.server")
    server.make_folders(work)
    executor = importlib.import_module("graft.commands.headless.executor")
    options = ["--cpu", "--use-pytorch-cross-attention", "--base-directory", str(work)]
    executor.set_up_comfyui(server.find_comfyui(), options)
    import nodes

    nodes.NODE_CLASS_MAPPINGS["TinyEditModel"] = TinyEditModel


# --- pictures ---------------------------------------------------------------------------------------------


def icons(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (STARTER / folder).glob("*.png"))


def variant(path: Path, number: int) -> Tensor:
    """Return an icon as (3, 128, 128) from 0 to 1: as it is, then with exchanged colors in other poses."""
    with Image.open(path) as file:
        image = file.convert("RGB").resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    rng = np.random.default_rng([number, *path.stem.encode()])
    colors = [0, 1, 2]
    if number:
        image = image.rotate(rng.uniform(-20, 20), Image.Resampling.BICUBIC, fillcolor="white")
        margin = int(rng.integers(0, 24))
        small = image.resize((SIZE - margin,) * 2, Image.Resampling.LANCZOS)
        image = Image.new("RGB", (SIZE, SIZE), "white")
        image.paste(small, tuple(int(n) for n in rng.integers(0, margin + 1, 2)))
        colors = rng.permutation(3).tolist()
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[colors] / 255
    return pixels.flip(-1) if number % 2 else pixels


def outline(pixels: Tensor) -> Tensor:
    """Return a picture's colors near its edges, white elsewhere."""
    around = [F.max_pool2d(sign * pixels, 2 * LINE + 1, 1, LINE) for sign in (1, -1)]
    edge = (around[0] + around[1]).amax(0) > 0.25
    return torch.where(edge, pixels, 1.0)


def damaged(pixels: Tensor) -> Tensor:
    """Return a picture with six white squares in it, always the same ones for the same picture."""
    rng, holed = np.random.default_rng(int(pixels.sum())), pixels.clone()
    for y, x in rng.integers(8, SIZE - 32, (6, 2)):
        holed[:, y : y + 24, x : x + 24] = 1
    return holed


VIEWS = {
    "plain": lambda x: x,
    "mirrored": lambda x: x.flip(-1),
    "negative": lambda x: 1 - x,
    "damaged": damaged,
    "outline": outline,
    "mirrored outline": lambda x: outline(x).flip(-1),
}


def save(pixels: Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels.permute(1, 2, 0) * 255).round().byte().numpy()).save(path)


# --- base -------------------------------------------------------------------------------------------------


def build_model() -> Any:
    """Return ComfyUI's Flux at tiny size; every block starts as the identity."""
    import comfy.supported_models

    config = comfy.supported_models.Flux(dict(FLUX))
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.diffusion_model.named_parameters():
            if name.endswith(("norm.scale", "norm.weight")):
                p.fill_(1)
            elif p.ndim == 1 or any(part in name for part in ("_mod.", "modulation.", "final_layer.")):
                p.zero_()
            else:
                nn.init.xavier_uniform_(p)
    return model


@functools.cache
def load_vae() -> Any:
    """Return the starter's autoencoder, its latents scaled as Flux expects them."""
    import comfy.latent_formats
    import comfy.sd
    import comfy.utils

    weights = comfy.utils.load_torch_file(str(STARTER / "base" / "graft_tiny_sd3.safetensors"))
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
        model.diffusion_model.load_state_dict(torch.load(Path(work) / "base.pt")["modules"]["average"])
        device = comfy.model_management.get_torch_device()
        patcher = comfy.model_patcher.ModelPatcher(model.requires_grad_(False), device, torch.device("cpu"))
        return patcher, load_clip(Path(work)), load_vae()


@torch.no_grad()
@torch.autocast("cpu", dtype=torch.bfloat16)
def encode_views(settings: argparse.Namespace) -> dict[str, Tensor]:
    """Return {view: (pictures, 16, 16, 16)} of the icons to train on, ready for the model."""
    path = settings.work / f"views-{settings.variants}.pt"
    if not path.exists():
        pictures = [
            variant(icon, n) for icon in icons(*TRAINED)[: settings.trained] for n in range(settings.variants)
        ]
        scale, views = build_model().process_latent_in, {}
        for name, view in VIEWS.items():
            pixels = torch.stack([view(picture) for picture in pictures]).permute(0, 2, 3, 1)
            views[name] = torch.cat([scale(load_vae().encode(part)).float() for part in pixels.split(16)])
            log.info("encoded the %d pictures %s", len(pixels), name)
        torch.save(views, path)
    return torch.load(path)


def pretrain(settings: argparse.Namespace, batch: int = 16) -> None:
    """Train the base by rectified flow on EDITS: work/base.pt."""
    path = settings.work / "base.pt"
    if path.exists() and torch.load(path, mmap=True)["step"] == settings.base_steps:
        return
    views = encode_views(settings)
    clip = load_clip(settings.work)
    texts = {text: clip.encode_from_tokens(clip.tokenize(text), True) for text, _, _ in EDITS}
    model, average = (build_model().diffusion_model for _ in range(2))
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

    def update_average(step: int) -> None:
        mean, now = ([p.data for p in m.parameters()] for m in (average, model))
        torch._foreach_lerp_(mean, now, max(0.005, 9 / (10 + step)))

    named = list(model.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and "_blocks." in name and "mod" not in name]
    rest = [p for _, p in named if all(p is not other for other in hidden)]
    updates = [
        Muon([{"params": hidden, "peak_lr": 2e-3}], weight_decay=0.01),
        torch.optim.AdamW([{"params": rest, "peak_lr": 1e-3}], betas=(0.9, 0.98), weight_decay=0.0),
    ]
    run = Training("base", settings.work, steps=settings.base_steps, warmup=50, cooldown=0.4, seed=2)
    run.go(loss_at, {"model": model, "average": average}, updates, after_step=update_average)


# --- LoRA -------------------------------------------------------------------------------------------------


def write_pairs(settings: argparse.Namespace) -> None:
    """Write the pairs to train on, and the outlines and targets of held-out icons, into ComfyUI's input."""
    folder = settings.work / "input"
    shutil.rmtree(folder)
    for icon in icons(*TRAINED)[: settings.trained]:
        for number in range(min(2, settings.variants)):
            plain, name = variant(icon, number), f"{icon.parent.name}-{icon.stem}-{number}"
            save(plain, folder / "targets" / f"{name}.png")
            save(outline(plain), folder / "outlines" / f"{name}.png")
            (folder / "targets" / f"{name}.txt").write_text(NEW_EDIT[0], encoding="utf-8")
    for icon in icons(HELD_OUT)[: settings.icons]:
        save(variant(icon, 0), folder / "held_out" / icon.name)
        save(outline(variant(icon, 0)), folder / "held_out_outlines" / icon.name)


def train_lora(settings: argparse.Namespace) -> None:
    """Train on the pairs by Graft's nodes; output/loras/color_in.safetensors."""
    run_graph(
        base=("TinyEditModel", {"work": str(settings.work)}),
        images=("GraftLoadDataset", {
            "folder": "targets", "references": "outlines", "resolution": str(SIZE), "trigger": "",
            "missing_captions": "error", "repeats": 1, "caption_dropout": 0.0, "flip": False,
            "recursive": False, "skip_bad_images": False,
        }),
        encoded=("GraftEncodeDataset", {
            "dataset": ["images", 0], "model": ["base", 0], "clip": ["base", 1], "vae": ["base", 2],
            "encode_again": False,
        }),
        lora=("GraftBuildLora", {"algorithm": "lora", "rank": settings.rank, "alpha": 0.0, "targets": "all"}),
        train=("GraftTrainSteps", {
            "model": ["base", 0], "dataset": ["encoded", 0], "start": ["lora", 0], "batch_size": 8,
            "steps": settings.lora_steps, "total_steps": 0, "learning_rate": 2e-3, "seed": 0,
            "name": "color_in",
        }),
        save=("GraftSaveLora", {
            "state": ["train", 2], "name": "color_in", "dtype": "bf16", "save_workflow": True,
        }),
    )  # fmt: skip


def draw(settings: argparse.Namespace) -> None:
    """Apply base and LoRA to the held-out outlines by stock nodes: output/drawn."""
    shutil.rmtree(settings.work / "output" / "drawn", ignore_errors=True)
    graph: dict[str, tuple[str, dict[str, Any]]] = {
        "base": ("TinyEditModel", {"work": str(settings.work)}),
        "LoRA": ("LoraLoaderModelOnly", {
            "model": ["base", 0], "lora_name": "color_in.safetensors", "strength_model": 1.0,
        }),
        "text": ("CLIPTextEncode", {"clip": ["base", 1], "text": NEW_EDIT[0]}),
        "empty": ("EmptySD3LatentImage", {"width": SIZE, "height": SIZE, "batch_size": 1}),
    }  # fmt: skip
    for icon in icons(HELD_OUT)[: settings.icons]:
        name = icon.stem
        image, latent, reference = f"{name} image", f"{name} latent", f"{name} reference"
        graph[image] = ("LoadImage", {"image": f"held_out_outlines/{icon.name}"})
        graph[latent] = ("VAEEncode", {"pixels": [image, 0], "vae": ["base", 2]})
        graph[reference] = ("ReferenceLatent", {"conditioning": ["text", 0], "latent": [latent, 0]})
        for model in ("base", "LoRA"):
            sampled, pixels = f"{name} {model}", f"{name} {model} pixels"
            graph[sampled] = ("KSampler", {
                "model": [model, 0], "seed": 1, "steps": 20, "cfg": 1.0, "sampler_name": "euler",
                "scheduler": "simple", "positive": [reference, 0], "negative": ["text", 0],
                "latent_image": ["empty", 0], "denoise": 1.0,
            })  # fmt: skip
            graph[pixels] = ("VAEDecode", {"samples": [sampled, 0], "vae": ["base", 2]})
            saved = {"images": [pixels, 0], "filename_prefix": f"drawn/{model}-{name}"}
            graph[f"{name} {model} saved"] = ("SaveImage", saved)
    run_graph(**graph)


def run_graph(**nodes: tuple[str, dict[str, Any]]) -> None:
    """Execute {name: (class, inputs)} in ComfyUI's own executor; a link is [name, index]."""
    executor = importlib.import_module("graft.commands.headless.executor")
    ids = {name: str(number) for number, name in enumerate(nodes, 1)}

    def linked(value: Any) -> Any:
        return [ids[value[0]], value[1]] if isinstance(value, list) else value

    prompt = {
        ids[name]: {"class_type": kind, "inputs": {key: linked(value) for key, value in inputs.items()}}
        for name, (kind, inputs) in nodes.items()
    }
    graph = executor.Executor(prompt, {})
    graph.run(graph.outputs)


# --- sheet ------------------------------------------------------------------------------------------------


def write_sheet(work: Path) -> dict[str, float]:
    """Write pairs.png; return the mean difference of each row's pictures to their targets, from 0 to 255."""
    plots = importlib.import_module("graft.training.run.plots")
    rows = ("input", "base", "LoRA", "target")
    columns, errors = [], {row: [] for row in rows[:3]}
    for name, pictures in drawn(work):
        for row, picture in zip(rows[:3], pictures):
            difference = np.asarray(picture, np.float32) - np.asarray(pictures[3], np.float32)
            errors[row].append(np.abs(difference).mean())
        columns.append(plots.Column(name.replace("-", " "), "", pictures))
    subtitle = f"{len(columns)} held-out icons; instruction: {NEW_EDIT[0]}"
    plots.sample_grid(columns, list(rows), title="An edit LoRA", subtitle=subtitle).save(work / "pairs.png")
    return {row: round(float(np.mean(each)), 1) for row, each in errors.items()}


def drawn(work: Path) -> Iterator[tuple[str, list[Image.Image]]]:
    for target in sorted((work / "input" / "held_out").glob("*.png")):
        output = work / "output" / "drawn"
        paths = [work / "input" / "held_out_outlines" / target.name]
        paths += [next(output.glob(f"{model}-{target.stem}_*.png")) for model in ("base", "LoRA")]
        yield target.stem, [Image.open(path).convert("RGB") for path in (*paths, target)]


if __name__ == "__main__":
    main()
