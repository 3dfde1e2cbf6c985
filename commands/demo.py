"""`graft demo`: train LoRAs in a real ComfyUI on this machine and draw with them.

It queues the shipped example workflow as a person would, once for a style and once for a character, or for
the images of the user. Then it measures and samples with the saved files through ComfyUI's stock nodes, so
what it shows is what a user gets.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ..starter.judge import load_judge, shares
from ..training.data import CaptionConfig, DatasetConfig, scan
from ..training.data.caption import finish
from ..training.job.graph import Prompt, of_kind
from ..training.run.checkpoints import Checkpoints
from ..training.run.folder import Run
from ..training.run.plots import Column, loss_plot, sample_grid
from ..training.run.run_log import clock
from ..training.user_error import UserError
from . import demo_prompts as prompts
from .headless.server import (
    GRAFT,
    ComfyUIError,
    PromptError,
    Server,
    comfyui_version,
    find_comfyui,
    has_card,
    server,
)
from .headless.terminal import Bar, say

WORKFLOW = GRAFT / "example_workflows" / "api" / "first_lora.json"
SHIPPED = GRAFT / "starter"
TEXTS = {
    "style": (
        "fox, sunburst style", "car, sunburst style", "strawberry, sunburst style",
        "teddy bear, sunburst style", "panda, sunburst style", "dog",
    ),
    "character": (
        "mibo waving in the snow", "mibo jumping under a night sky", "mibo sleeping in a meadow",
        "small mibo at the top right", "neon sign of a mibo", "dog",
    ),
}  # fmt: skip
"""The shipped datasets, and what the demo draws with the LoRA of each: last, another prompt."""
TRIGGERS = {"character": "mibo"}
CLASS_WORDS = {"character": "animal"}
"""Class words for preservation: what the base draws for them stays as it is, and so do other prompts."""
STEPS = {"character": 90}
"""Steps where they differ from the workflow's: preservation adds passes to every other step."""
HELD_OUT, BASE_STYLE = "held out", "base style"
MOST_TEXTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options."""
    own = parser.add_argument_group("your own images and model")
    own.add_argument(
        "--dataset", type=Path, metavar="FOLDER", help="images, each with a .txt caption beside it"
    )
    own.add_argument(
        "--validation", type=Path, metavar="FOLDER", help="captioned images to measure on, not trained on"
    )
    own.add_argument("--trigger", metavar="WORD", help="a word of your own that calls up what is learned")
    own.add_argument("--checkpoint", type=Path, metavar="FILE", help="base model, .safetensors")
    own.add_argument(
        "--text-encoder", type=Path, metavar="FILE", action="append", default=[],
        help="where the checkpoint holds none; up to three times",
    )  # fmt: skip
    own.add_argument("--vae", type=Path, metavar="FILE", help="where the checkpoint holds none")
    own.add_argument(
        "--prompt", metavar="TEXT", action="append", help="what to draw; repeat it for more columns"
    )
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=int, help="optimizer steps")
    train.add_argument("--learning-rate", type=float)
    train.add_argument("--batch-size", type=int)
    train.add_argument("--rank", type=int)
    train.add_argument(
        "--resolution", type=int, help="pixels; default 128 with the demo's base, 1024 with yours"
    )
    train.add_argument("--seed", type=int, default=0)
    train.add_argument(
        "--shuffle-captions", action="store_true", help="give every image another's caption: learns less"
    )
    parser.add_argument("--cfg", type=float, help="guidance of the samples; 1 for models distilled for it")
    parser.add_argument("--cpu", action="store_true", help="leave the graphics card alone")
    parser.add_argument(
        "--out", type=Path, default=Path("graft-demo"), metavar="FOLDER", help="default: ./graft-demo"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo and return the exit code.

    Raises UserError for options, images and models that cannot be used, and OSError if ComfyUI cannot run.
    """
    plans = make_plans(args)
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.checkpoint and not args.cpu and not has_card():
        say("PyTorch finds no graphics card here: the processor trains, a model of full size for days.")
    comfyui = find_comfyui()
    say(f"Starting ComfyUI {comfyui_version(comfyui)} from {comfyui}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="graft-demo-", ignore_cleanup_errors=True) as scratch:
        base = Path(scratch).resolve()
        for plan in plans if args.shuffle_captions else ():
            use_shuffled_captions(plan, base, args.seed)
        # With one's own images, the same command continues where the last one ended.
        output = (out if args.dataset or args.checkpoint else base) / "output"
        options = [
            "--extra-model-paths-config", str(write_model_paths(base, args, plans)),
            "--output-directory", str(output),
        ]  # fmt: skip
        try:
            with server(comfyui, base, options=options, cpu=args.cpu or None) as comfy:
                made = [make_lora(comfy, plan, output, out) for plan in plans]
        except (PromptError, ComfyUIError) as error:
            raise UserError(f"{error}\nComfyUI's own words are in {out / 'comfyui.log'}.") from error
        finally:
            if (base / "comfyui.log").exists():
                shutil.copyfile(base / "comfyui.log", out / "comfyui.log")
    stacked([grid for _, grid in made]).save(out / "samples.png")
    report = {
        "loras": {plan.name: figures for plan, (figures, _) in zip(plans, made)},
        "shuffled_captions": args.shuffle_captions,
        "samples": str(out / "samples.png"),
        "seconds": round(time.monotonic() - began, 1),
        "comfyui_version": comfyui_version(comfyui),
    }
    (out / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    tell(report, out)
    return 0


# --- what to do ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is decided about one LoRA before anything is started."""

    name: str
    dataset: Path
    folders: dict[str, str]
    """What is measured on: {HELD_OUT or BASE_STYLE: dataset folder as the graph names it}."""
    roots: tuple[Path, ...]
    """Folders of images to register with ComfyUI."""
    texts: tuple[str, ...]
    captions: tuple[str, ...]
    prompt: Prompt


def make_plans(args: argparse.Namespace) -> list[Plan]:
    """Turn the options into prompts; inputs that cannot work are refused here, before ComfyUI starts."""
    for path in (args.checkpoint, args.vae, *args.text_encoder):
        if path is not None and not path.is_file():
            raise UserError(f"{path}: there is no such file.")
    if len(args.text_encoder) > 3:
        raise UserError(f"--text-encoder: {len(args.text_encoder)} files; models take at most three.")
    if args.dataset:
        return [make_plan(args, args.dataset.resolve(), args.trigger, args.validation)]
    return [
        make_plan(args, SHIPPED / name, args.trigger or TRIGGERS.get(name), args.validation) for name in TEXTS
    ]


def make_plan(args: argparse.Namespace, dataset: Path, trigger: str | None, validation: Path | None) -> Plan:
    shipped = dataset.parent == SHIPPED
    captions = read_captions(dataset, trigger or "")
    name = dataset.name
    texts = TEXTS[name] if shipped and not args.checkpoint else captions[:MOST_TEXTS]
    folders, roots = {}, []
    if validation:
        read_captions(validation, trigger or "")
        roots.append(validation.resolve())
        folders[HELD_OUT] = validation.resolve().name
    elif shipped:
        folders[HELD_OUT] = f"starter/{name}_validation"
    if not args.checkpoint:
        folders[BASE_STYLE] = "starter/base_style"
    if not shipped:
        roots.append(dataset)
    folder = f"starter/{name}" if shipped else name
    prompt = prompts.training(WORKFLOW, inputs(args, name, folder, trigger))
    if shipped and name in CLASS_WORDS:
        prompts.add_preservation(prompt, CLASS_WORDS[name])
    return Plan(
        name, dataset, folders, tuple(roots), tuple(args.prompt or texts), tuple(captions), prompt
    )  # fmt: skip


def inputs(
    args: argparse.Namespace, name: str, folder: str, trigger: str | None
) -> dict[str, dict[str, Any]]:
    """Return what the options change in the shipped workflow: {class of a node: {input: value}}."""
    own = args.checkpoint is not None
    pixels = args.resolution or (1024 if own else None)
    model: dict[str, Any] = {}
    if own:
        encoders = [path.name for path in args.text_encoder] + ["from checkpoint"] * 3
        model = {"model": args.checkpoint.name, **{f"text_encoder_{i + 1}": encoders[i] for i in range(3)}}
    return {
        "GraftLoadBaseModel": {**model, "vae": args.vae.name if args.vae else None},
        "GraftLoadDataset": {
            "folder": folder,
            "resolution": str(pixels) if pixels else None,
            "trigger": trigger,
        },
        "GraftBuildLora": {"rank": args.rank},
        "GraftTrainSteps": {
            "steps": args.steps or (1500 if own else STEPS.get(name)),
            "learning_rate": args.learning_rate or (1e-4 if own else None),
            "batch_size": args.batch_size or (1 if own else None),
            "seed": args.seed,
            "name": name,
        },
        "GraftSaveLora": {"name": name},
        "EmptySD3LatentImage": {"width": pixels, "height": pixels},
        "KSampler": {"cfg": args.cfg},
    }


def read_captions(folder: Path, trigger: str) -> list[str]:
    """Return a dataset folder's captions as the model gets them; raises UserError as Load Dataset does."""
    config = DatasetConfig(caption=CaptionConfig(trigger=trigger))
    return [finish(sample.captions[0], config) for sample in scan(folder, config).samples]


def use_shuffled_captions(plan: Plan, base: Path, seed: int) -> None:
    """Let `plan` train on a copy of its dataset, in ComfyUI's input folder, with the captions exchanged."""
    folder = base / "input" / f"{plan.name}_with_exchanged_captions"
    shuffle_captions(plan.dataset, folder, seed)
    for node_id in of_kind(plan.prompt, "GraftLoadDataset"):
        plan.prompt[node_id]["inputs"]["folder"] = folder.name


def shuffle_captions(source: Path, target: Path, seed: int) -> None:
    """Copy a dataset so that no image keeps its own caption."""
    shutil.copytree(source, target)
    files = sorted(target.glob("*.txt"))
    random.Random(seed).shuffle(files)
    captions = [file.read_text(encoding="utf-8") for file in files]
    for file, text in zip(files, captions[1:] + captions[:1]):
        file.write_text(text, encoding="utf-8")


def write_model_paths(base: Path, args: argparse.Namespace, plans: Sequence[Plan]) -> Path:
    """Tell ComfyUI where the user's files are: nothing is copied. JSON is YAML, whatever is in a path."""
    folders = {
        "checkpoints": [args.checkpoint.resolve().parent] if args.checkpoint else [],
        "text_encoders": [path.resolve().parent for path in args.text_encoder],
        "vae": [args.vae.resolve().parent] if args.vae else [],
        "graft_datasets": [root for plan in plans for root in plan.roots],
    }
    lines = {kind: "\n".join(dict.fromkeys(map(str, paths))) for kind, paths in folders.items() if paths}
    path = base / "model_paths.yaml"
    path.write_text(json.dumps({"demo": lines}), encoding="utf-8")
    return path


# --- doing it -----------------------------------------------------------------------------------------------


def make_lora(comfy: Server, plan: Plan, output: Path, out: Path) -> tuple[dict[str, Any], Image.Image]:
    """Train, measure and draw one LoRA; return its part of the report and its grid of samples.

    `output` is ComfyUI's own output folder. The LoRA, its loss curve and its workflow are written into `out`.
    """
    train_node = of_kind(plan.prompt, "GraftTrainSteps")[0]
    settings = plan.prompt[train_node]["inputs"]
    say(f"{plan.name}: training on {len(plan.captions)} images for {settings['steps']} steps")
    began = time.monotonic()
    with Bar(plan.prompt) as on_event:
        done = comfy.run(plan.prompt, on_event)
    seconds = time.monotonic() - began
    folder = output / "graft" / done["outputs"][train_node]["text"][0].splitlines()[1]
    losses = losses_of(folder, settings["steps"])
    lora = f"{plan.name}.safetensors"
    shutil.copyfile(output / "loras" / lora, out / lora)
    (out / f"{plan.name}.json").write_text(json.dumps(plan.prompt, indent=1), encoding="utf-8")
    batch, rate = settings["batch_size"], settings["learning_rate"]
    loss_plot(
        losses,
        title=f"{plan.name}: training loss",
        subtitle=f"{len(losses)} steps, batch {batch}, learning rate {rate:g}",
    ).save(out / f"{plan.name}_loss.png")
    measured = measure(comfy, plan, lora)
    figures: dict[str, Any] = {
        "steps": len(losses),
        "images": len(plan.captions),
        "seconds": round(seconds, 1),
        "validation_loss_base": measured.get(f"base {HELD_OUT}"),
        "validation_loss_lora": measured.get(f"lora {HELD_OUT}"),
        "validation_loss_base_on_its_own_style": measured.get(f"base {BASE_STYLE}"),
        "validation_loss_lora_on_the_bases_own_style": measured.get(f"lora {BASE_STYLE}"),
        "prompts": list(plan.texts),
        "lora": str(out / lora),
        "loss": str(out / f"{plan.name}_loss.png"),
        "workflow": str(out / f"{plan.name}.json"),
    }
    drawn = draw(comfy, plan, output, lora)
    if BASE_STYLE in plan.folders:
        judge = load_judge()
        figures["judged"] = {
            f"LoRA at {strength}": shares(judge, plan.texts, images)
            for strength, images in zip(prompts.VARIANTS.values(), zip(*drawn))
        }
    columns = [
        Column(text, f"{'in' if text in plan.captions else 'not in'} the training set", images)
        for text, images in zip(plan.texts, drawn)
    ]
    title = f"{plan.name}: {len(losses)} steps on {len(plan.captions)} images, {clock(seconds)}"
    subtitle = "every column from one seed, by ComfyUI's own KSampler"
    if figures["validation_loss_base"]:
        subtitle += "; held-out loss {validation_loss_base:.3f} -> {validation_loss_lora:.3f}".format(
            **figures
        )
    return figures, sample_grid(columns, list(prompts.VARIANTS), title=title, subtitle=subtitle)


def losses_of(folder: Path, steps: int) -> tuple[float, ...]:
    """Return the loss of every step of a finished run, read from its last checkpoint."""
    handle = Checkpoints(Run(folder)).latest(after=0, up_to=steps)
    if handle is None:
        raise UserError(f"{folder.name}: the run left no readable checkpoint.")
    return handle.load().losses


def measure(comfy: Server, plan: Plan, lora: str) -> dict[str, float]:
    """Return the losses on images that were not trained on, by name: "base held out", "lora held out" ..."""
    if not plan.folders:
        return {}
    say("Measuring on images that were not trained on")
    prompt, nodes = prompts.held_out(plan.prompt, lora, plan.folders)
    with Bar(prompt, nodes.values()) as on_event:
        outputs = comfy.run(prompt, on_event)["outputs"]
    return {name: float(outputs[node]["text"][0].split()[-1]) for name, node in nodes.items()}


def draw(comfy: Server, plan: Plan, output: Path, lora: str) -> list[list[Image.Image]]:
    """Return an image of every text at every strength of the LoRA: [text][variant]."""
    say(f"Drawing {len(plan.texts)} prompts without and with the LoRA")
    prompt, nodes = prompts.grid(plan.prompt, lora, plan.texts)
    with Bar(prompt, [node for row in nodes for node in row]) as on_event:
        outputs = comfy.run(prompt, on_event)["outputs"]

    def image_of(node: str) -> Image.Image:
        image = outputs[node]["images"][0]
        with Image.open(output / image["subfolder"] / image["filename"]) as file:
            drawn: Image.Image = file.convert("RGB")
            return drawn

    return [[image_of(node) for node in row] for row in nodes]


def stacked(grids: Sequence[Image.Image]) -> Image.Image:
    """Return the pictures one below the other."""
    page = Image.new("RGB", (max(g.width for g in grids), sum(g.height for g in grids)), "white")
    y = 0
    for grid in grids:
        page.paste(grid, (0, y))
        y += grid.height
    return page


def tell(report: dict[str, Any], out: Path) -> None:
    """Print what came of it."""
    for name, figures in report["loras"].items():
        base, with_lora = figures["validation_loss_base"], figures["validation_loss_lora"]
        if base:
            say(
                f"{name}: loss on held-out images {base:.4f}, with the LoRA {with_lora:.4f} "
                f"({with_lora / base:.2f} of it)"
            )
    files = " and ".join(figures["lora"] for figures in report["loras"].values())
    say(f"Done in {clock(report['seconds'])}. Look at {out / 'samples.png'}; saved: {files}")
