"""How fast a LoRA learns, against ComfyUI's own TrainLoraNode: the loss on the demo's held-out images.

    graft bench quality --json

Same base, images, steps, rank, batch, alpha / rank (the node's is 1 / rank) and precision; each side runs
once with each of five learning rates, and its best run counts. Both train a LoRA on every weight (`targets`
"all"), the node also every norm and bias, its LoRA in float32 (its default, bf16, loses small steps). Losses
are measured at fixed noise by `training.validation`; seconds are of one CPU thread without the measuring, so
that a busy machine does not decide.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...starter.clip_l import write_clip_l
from ...training.config import AdapterConfig, MemoryConfig, OptimizerConfig, TrainConfig
from ...training.data import BucketConfig, DatasetConfig, encode, scan
from ...training.loop import Handles, Progress, train
from ...training.validation import validation_loss
from ..headless.import_comfyui import start_comfyui

STARTER = Path(__file__).resolve().parents[2] / "starter"
RESOLUTION = 128
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
RANK, BATCH_SIZE, ALPHA = 16, 4, 1.0


@dataclass
class Curve:
    """One run: the held-out loss after every few steps."""

    lr: float
    steps: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Watch:
    """Measures a run every few steps; the time that this takes is not counted."""

    curve: Curve
    every: int
    began: float = field(default_factory=time.process_time)

    def look(self, step: int, measure: Callable[[], float]) -> None:
        if step % self.every:
            return
        now = time.process_time()
        self.curve.steps.append(step)
        self.curve.seconds.append(round(now - self.began, 2))
        self.curve.validation.append(round(measure(), 5))
        self.began += time.process_time() - now


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `graft bench quality`."""
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    parser.add_argument("--every", type=int, default=20, help="steps between two measurements")
    parser.add_argument("--limit", type=int, default=0, help="measure this many held-out images; 0 is all")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), metavar="LR")
    parser.add_argument("--targets", default="all", help="what Graft trains; by default every weight")


def run(args: argparse.Namespace) -> int:
    """Train with both, and print how they compare."""
    results = measure(args.steps, args.every, args.limit, args.rates, args.targets)
    print(json.dumps(results, indent=1) if args.json else table(results))
    return 0


def measure(
    steps: int, every: int, limit: int, rates: Sequence[float], targets: str = "all"
) -> dict[str, Any]:
    """Return every curve of both trainers, and what follows from the best of each."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="graft-quality-") as place:
        denoiser, encoder = load_starter(Path(place))
        config = DatasetConfig(bucket=BucketConfig(resolutions=(RESOLUTION,)), dtype="fp32")
        dataset = encode(scan(STARTER / "dataset", config), encoder, Path(place, "cache"))
        held_out = encode(scan(STARTER / "validation", config), encoder, Path(place, "cache")).validation()

        def loss(model: Any, state: Any = None) -> float:
            return validation_loss(model, held_out, MemoryConfig(dtype="bf16"), state, limit=limit)

        base = round(loss(denoiser), 5)
        ours, theirs = [], []
        for rate in rates:
            ours.append(train_with_graft(denoiser, dataset, loss, rate, steps, every, targets))
            theirs.append(train_lora_node(denoiser.patcher, dataset, loss, rate, steps, every))
    return {"base": base, **comparison(ours, theirs)}


def comparison(ours: Sequence[Curve], theirs: Sequence[Curve]) -> dict[str, Any]:
    """Return the curves, and the best ones beside each other at equal steps and at equal seconds.

    "steps_to_match" are the fewest steps, at whichever rate, in which Graft comes down to the node's best
    last value, over the fewest in which the node does.
    """
    best, other = (min(curves, key=lambda curve: curve.validation[-1]) for curves in (ours, theirs))
    seconds = min(best.seconds[-1], other.seconds[-1])
    goal = other.validation[-1]
    mine, its = soonest(ours, goal), soonest(theirs, goal)
    return {
        "ours": [asdict(curve) for curve in ours],
        "train_lora_node": [asdict(curve) for curve in theirs],
        "best": {"ours": best.lr, "train_lora_node": other.lr},
        "at_equal_steps": {"ours": best.validation[-1], "train_lora_node": other.validation[-1]},
        "at_equal_seconds": {
            "seconds": seconds,
            "ours": at(best, seconds),
            "train_lora_node": at(other, seconds),
        },
        "steps_to_match": round(mine / its, 3) if mine and its else None,
    }


def soonest(curves: Sequence[Curve], goal: float) -> int | None:
    """Return the fewest steps in which one of the curves comes down to `goal`."""
    measured = (point for curve in curves for point in zip(curve.steps, curve.validation))
    return min((step for step, value in measured if value <= goal), default=None)


def at(curve: Curve, seconds: float) -> float:
    """Return the last loss measured up to `seconds`; the first where none was."""
    losses = [value for value, when in zip(curve.validation, curve.seconds) if when <= seconds]
    return losses[-1] if losses else curve.validation[0]


def train_with_graft(
    denoiser: Any, dataset: Any, loss: Callable[..., float], lr: float, steps: int, every: int, targets: str
) -> Curve:
    """Train with Graft's own loop."""
    config = TrainConfig(
        batch_size=BATCH_SIZE,
        adapter=AdapterConfig(rank=RANK, alpha=ALPHA, targets=targets),
        optimizer=OptimizerConfig(lr=lr),
        memory=MemoryConfig(dtype="bf16", checkpointing="none", base="resident"),
    )
    watch = Watch(Curve(lr), every)

    def on_step(progress: Progress, handles: Handles) -> None:
        def measured() -> float:
            with handles.give_base_back():
                return loss(denoiser, handles.state())

        watch.look(progress.step, measured)

    train(denoiser, dataset, config, None, steps=steps, on_step=on_step)
    return watch.curve


def train_lora_node(
    patcher: Any, dataset: Any, loss: Callable[..., float], lr: float, steps: int, every: int
) -> Curve:
    """Train with ComfyUI's node, copying its weights every few steps; the copies are measured afterwards."""
    import comfy.model_management
    import comfy.sd

    from ...training.comfy.model.denoiser import ComfyDenoiser

    node = _node()
    latents, positive = samples(dataset)
    inputs = {
        "model": patcher, "latents": latents, "positive": positive, "batch_size": BATCH_SIZE,
        "steps": steps, "grad_accumulation_steps": 1, "learning_rate": lr, "rank": RANK,
        "optimizer": "AdamW", "loss_function": "MSE", "seed": 0, "training_dtype": "bf16",
        "lora_dtype": "fp32", "algorithm": "LoRA", "gradient_checkpointing": False,
        "existing_lora": "[None]", **_further_inputs(node),
    }  # fmt: skip
    lists = {name: value if name in ("latents", "positive") else [value] for name, value in inputs.items()}
    watch = Watch(Curve(lr), every)
    copies: list[list[Tensor]] = []
    with _after_steps(lambda step, weights: watch.look(step, lambda: _copied(copies, weights))):
        lora = node.execute(**lists).args[1]
    watch.curve.validation.clear()
    for copy in copies:
        tensors = dict(zip(lora, copy, strict=True))
        loaded, _ = comfy.sd.load_lora_for_models(patcher, None, tensors, 1.0, 0.0)
        watch.curve.validation.append(round(loss(ComfyDenoiser(loaded)), 5))
    comfy.model_management.unload_all_models()
    return watch.curve


def samples(dataset: Any) -> tuple[list[dict[str, Tensor]], list[list[Any]]]:
    """Return the dataset as the node takes it: a latent and a conditioning for each image."""
    steady = dataset.validation()
    batches = [steady.sample(index) for index in range(len(steady))]
    positive = []
    for batch in batches:
        cond = dict(batch.conditioning[0])
        positive.append([[cond.pop("cross_attn"), cond]])
    return [{"samples": batch.latents} for batch in batches], positive


def _node() -> Any:
    import comfy_extras.nodes_train as nodes_train

    classes = asyncio.run(nodes_train.TrainingExtension().get_node_list())
    node = next(node for node in classes if node.__name__ == "TrainLoraNode")
    node.GET_SCHEMA()
    return node


def _further_inputs(node: Any) -> dict[str, Any]:
    """Return what newer versions of the node ask for as well, without their memory savers."""
    wanted = {"checkpoint_depth": 1, "offloading": False, "bucket_mode": False, "bypass_mode": False}
    names = {entry.id for entry in node.define_schema().inputs}
    inputs = {name: value for name, value in wanted.items() if name in names}
    return {**inputs, **({"quantized_backward": False} if "quantized_backward" in names else {})}


def _copied(copies: list[list[Tensor]], weights: Sequence[Tensor]) -> float:
    copies.append([weight.detach().clone() for weight in weights])
    return 0.0


@contextmanager
def _after_steps(look: Callable[[int, Sequence[Tensor]], None]) -> Any:
    """Call `look(step, parameters)` after every step of a torch.optim.AdamW within the context."""
    before, count = torch.optim.AdamW.step, 0

    def step(self: torch.optim.AdamW, closure: Any = None) -> Any:
        nonlocal count
        result = before(self, closure)
        count += 1
        look(count, [p for group in self.param_groups for p in group["params"]])
        return result

    torch.optim.AdamW.step = step  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.optim.AdamW.step = before  # type: ignore[method-assign]


def table(results: dict[str, Any]) -> str:
    """Return the figures for people to read."""
    lines = [
        f"held-out loss of the base {results['base']}",
        f"{'lr':>8}  {'Graft':>9}  {'TrainLoraNode':>13}",
    ]
    for one, other in zip(results["ours"], results["train_lora_node"]):
        lines.append(f"{one['lr']:>8g}  {one['validation'][-1]:>9.5f}  {other['validation'][-1]:>13.5f}")
    even = results["at_equal_seconds"]
    matched = results["steps_to_match"]
    return "\n".join(
        [
            *lines,
            f"after {even['seconds']:.0f} s: Graft {even['ours']}, TrainLoraNode {even['train_lora_node']}",
            "TrainLoraNode's last value is not reached"
            if matched is None
            else f"TrainLoraNode's last value is reached in {matched:.2f} of the steps it takes",
        ]
    )


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
