"""How fast a LoRA learns, against ComfyUI's own TrainLoraNode and other trainers, on the starter's tasks.

    graft bench quality --json
    graft bench quality --add '{"plus": {"adapter": {"lora_plus_ratio": 4}}}' --seeds 1
    graft bench quality --add '{"coarse": {"first": {"steps": 10, "rate": 2, "objective": {"bias": 2}}}}'

Same base, images, steps, rank, batch, alpha / rank (the node's is 1 / rank) and precision; every trainer runs
with each learning rate and the first seed, and at the best of them with the others. All train a LoRA on every
weight (`targets` "all"), the node also every norm and bias. Losses are measured at fixed noise by
`training.validation`; what pictures of held-out prompts show, by the starter's judge (`drawn`); seconds are
of one CPU thread without the measuring, so that a busy machine does not decide. What is concluded is in
`curves.compare`. With `--keep FILE` every run is appended to a file when it ends, and is not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...starter.clip_l import write_clip_l
from ...starter.judge import load_judge
from ...training.config import MemoryConfig
from ...training.data import BucketConfig, CaptionConfig, DatasetConfig, encode, scan
from ...training.files.input_file import parse_json
from ...training.user_error import UserError
from ...training.validation import validation_loss
from ..headless.import_comfyui import start_comfyui
from .curves import METRICS, REFERENCE, Curve, Values, Watch, best_rate, compare
from .drawn import Drawn
from .learners import (
    BATCH_SIZE,
    RANK,
    TRAINERS,
    join_settings,
    parts_of_run,
    train_lora_node,
    train_with_graft,
)

STARTER = Path(__file__).resolve().parents[2] / "starter"
RESOLUTION = 128
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class Task:
    """What is learned, by folders of the starter."""

    images: str
    held_out: str
    trigger: str = ""
    class_word: str = ""
    """What preservation without pictures puts in place of the trigger."""


TASKS: Mapping[str, Task] = {
    "style": Task("style", "style_validation"),
    "character": Task("character", "character_validation", "mibo", "animal"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `graft bench quality`."""
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    parser.add_argument("--every", type=int, default=20, help="steps between two measurements")
    parser.add_argument("--limit", type=int, default=0, help="measure this many held-out images; 0 is all")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), metavar="LR")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each trainer at its best rate")
    parser.add_argument("--targets", default="all", help="what Graft trains; by default every weight")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="a file that keeps the runs, to go on later"
    )
    names = [REFERENCE, *TRAINERS]
    parser.add_argument("--trainers", nargs="*", default=names, choices=names)
    parser.add_argument(
        "--add",
        default="{}",
        metavar="JSON",
        help="further trainers in Graft's loop: {name: settings as in a run's config.json}",
    )


def run(args: argparse.Namespace) -> int:
    """Train with each, and print how they compare."""
    trainers = {name: TRAINERS[name] for name in args.trainers if name != REFERENCE} | read_trainers(args.add)
    targets = {"adapter": {"targets": args.targets}}
    document = measure(
        args.tasks,
        {name: join_settings(targets, settings) for name, settings in trainers.items()},
        steps=args.steps,
        every=args.every,
        limit=args.limit,
        rates=args.rates,
        seeds=range(args.seeds),
        reference=REFERENCE in args.trainers,
        keep=args.keep,
    )
    print(json.dumps(document, indent=1) if args.json else table(document))
    return 0


def read_trainers(text: str) -> dict[str, Mapping[str, Any]]:
    """Return trainers and their settings from JSON. Raises UserError for settings that there are not."""
    trainers = parse_json(text)
    if not isinstance(trainers, dict) or not all(isinstance(value, dict) for value in trainers.values()):
        raise UserError('add: expected JSON such as {"plus": {"adapter": {"lora_plus_ratio": 4}}}.')
    for settings in trainers.values():
        parts_of_run(settings, RATES[0], 0, 1)
    return trainers


def measure(
    tasks: Sequence[str],
    trainers: Mapping[str, Mapping[str, Any]],
    *,
    steps: int,
    every: int,
    limit: int,
    rates: Sequence[float],
    seeds: Sequence[int],
    reference: bool,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Return one document of every curve and what follows from them."""
    torch.set_num_threads(1)
    shared = {"steps": steps, "every": every, "limit": limit, "rank": RANK, "batch_size": BATCH_SIZE}
    trainers = {**trainers, **({REFERENCE: {"node": "TrainLoraNode"}} if reference else {})}
    kept = KeptCurves(keep)
    curves: list[Curve] = []
    base: dict[str, Values] = {}
    with tempfile.TemporaryDirectory(prefix="graft-quality-") as place:
        denoiser, encoder = load_starter(Path(place))
        for task in tasks:
            images, cache = TASKS[task], Path(place, "cache")
            words = CaptionConfig(trigger=images.trigger, class_word=images.class_word)
            config = DatasetConfig(
                bucket=BucketConfig(resolutions=(RESOLUTION,)), caption=words, dtype="fp32"
            )
            dataset = encode(scan(STARTER / images.images, config), encoder, cache)
            others = scan(STARTER / images.held_out, config)
            held_out = encode(others, encoder, cache).validation()
            prompts = [sample.captions[0] for sample in others.samples]
            drawn = Drawn(encoder.clip, encoder.vae, load_judge(), prompts)

            def values(model: Any, state: Any = None, held_out: Any = held_out, drawn: Any = drawn) -> Values:
                memory = MemoryConfig(dtype="bf16")
                loss = validation_loss(model, held_out, memory, state, limit=limit)
                return {"loss": loss, **drawn.values(sampled(model, state))}

            base[task] = {metric: round(value, 5) for metric, value in values(denoiser).items()}

            def learn(
                task: str, name: str, seed: int, lr: float, dataset: Any = dataset, values: Any = values
            ) -> Curve:
                watch = Watch(Curve(task, name, seed, lr), every)
                if name == REFERENCE:
                    train_lora_node(denoiser.patcher, dataset, values, watch, steps)
                else:
                    parts = parts_of_run(trainers[name], lr, seed, steps)
                    train_with_graft(denoiser, dataset, values, parts, watch)
                return watch.curve

            for name, settings in trainers.items():
                run = partial(kept.get, partial(learn, task, name), [shared, settings, task, name])
                first = [run(seeds[0], lr) for lr in rates]
                best = best_rate(first)
                curves += [*first, *(run(seed, best) for seed in seeds[1:])]
    return {
        "settings": shared,
        "metrics": {metric: "lower" if less else "higher" for metric, less in METRICS.items()},
        "tasks": list(tasks),
        "trainers": trainers,
        "seeds": list(seeds),
        "rates": list(rates),
        "base": base,
        "curves": [asdict(curve) for curve in curves],
        "comparison": compare(curves),
    }


class KeptCurves:
    """Curves in a file of JSON lines, each with what its run depends on; without a file, none is kept."""

    def __init__(self, file: Path | None) -> None:
        """Read the file, if there is one. Raises UserError for a line that is not JSON."""
        self.file = file
        lines = file.read_text("utf-8").splitlines() if file and file.exists() else []
        self.kept = {json.dumps(key): Curve(**curve) for key, curve in map(parse_json, lines)}

    def get(
        self, learn: Callable[[int, float], Curve], settings: Sequence[Any], seed: int, lr: float
    ) -> Curve:
        """Return the curve of a run with these settings; `learn(seed, lr)` runs it if the file lacks it."""
        key = [*settings, seed, lr]
        text = json.dumps(key)
        if text not in self.kept:
            self.kept[text] = learn(seed, lr)
            if self.file:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, asdict(self.kept[text])]) + "\n")
        return self.kept[text]


def table(document: Mapping[str, Any]) -> str:
    """Return the figures for people to read."""
    lines = []
    for task, compared in document["comparison"].items():
        for metric, found in compared["metrics"].items():
            lines.append(f"{task}, {metric} (base {document['base'][task][metric]})")
            lines.append(
                f"  {'trainer':<16} {'best':>9} {'at rate':>9}  share of the node's steps to its best"
            )
            for trainer, best in found["best"].items():
                share = found["steps_to_match"].get(trainer)
                shown = "never reached" if share is None else f"{share:.2f}"
                lines.append(f"  {trainer:<16} {best:>9.5f} {compared['best_rate'][trainer]:>9g}  {shown}")
    return "\n".join(lines)


def sampled(denoiser: Any, state: Any) -> Any:
    """Return the MODEL as it is sampled with: with the LoRA of a state, if there is one."""
    from ...training.comfy.files.trained_lora import with_lora

    if state is None:
        return denoiser.patcher
    return with_lora(denoiser.patcher, None, state, denoiser.family)[0]


def load_starter(place: Path) -> tuple[Any, Any]:
    """Return the starter base and its encoder, from ComfyUI's own loaders."""
    start_comfyui()
    import comfy.sd

    from ...training.comfy.model.denoiser import ComfyDenoiser
    from ...training.comfy.model.encoder import ComfyEncoder

    checkpoint = STARTER / "base" / "graft_tiny_sd3.safetensors"
    patcher, _, vae, _ = comfy.sd.load_checkpoint_guess_config(str(checkpoint))
    texts = write_clip_l(place / "clip_l.safetensors")
    clip = comfy.sd.load_clip([str(texts)], clip_type=comfy.sd.CLIPType.SD3)
    denoiser = ComfyDenoiser(patcher)
    return denoiser, ComfyEncoder(vae, clip, denoiser.family)
