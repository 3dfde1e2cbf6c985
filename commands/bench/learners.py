"""Trainers of `graft bench quality`: Graft's loop with the bench's settings or others, and ComfyUI's node.

"graft" has the settings of `SHARED`. "diffusers" is its script for LoRAs of SD3 in Graft's loop: AdamW with
its defaults, Gaussian initial weights, noise levels drawn one by one (train_dreambooth_lora_sd3.py, 0.39).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...training.config import TrainConfig, from_dict
from ...training.loop import Handles, Progress, train
from .curves import Values, Watch

RANK, BATCH_SIZE, ALPHA = 16, 4, 1.0
SHARED: Mapping[str, Any] = {
    "batch_size": BATCH_SIZE,
    "adapter": {"rank": RANK, "alpha": ALPHA, "targets": "all"},
    "memory": {"dtype": "bf16", "checkpointing": "none", "base": "resident"},
}
"""Settings of every trainer in Graft's loop; the node trains every weight too, its strength is 1 / rank."""
TRAINERS: Mapping[str, Mapping[str, Any]] = {
    "graft": {},
    "diffusers": {
        "adapter": {"init": "gaussian"},
        "optimizer": {"betas": [0.9, 0.999], "weight_decay": 1e-4, "max_grad_norm": 1.0},
        "objective": {"stratified": False},
    },
}
"""Name -> its settings beside SHARED, as in a run's config.json."""

Measure = Callable[..., Values]
"""measure(denoiser, state=None) -> the metrics of a base, or of a state on it."""


def config_of(settings: Mapping[str, Any], lr: float, seed: int) -> TrainConfig:
    """Return the settings of a run. Raises UserError for a setting that there is not."""
    own = {"seed": seed, "optimizer": {"lr": lr}}
    return from_dict(TrainConfig, join_settings(join_settings(SHARED, settings), own))


def join_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings, those of `other` where both have one."""
    inner = {
        key: join_settings(one[key], value)
        for key, value in other.items()
        if isinstance(value, Mapping) and isinstance(one.get(key), Mapping)
    }
    return {**one, **other, **inner}


def parts_of_run(
    settings: Mapping[str, Any], lr: float, seed: int, steps: int
) -> list[tuple[TrainConfig, int]]:
    """Return the parts of a run, each with its steps; one, unless the settings have "first".

    That is other settings for the first steps: {"steps": 10, "rate": 2.0, "objective": {"bias": 2.0}}, `rate`
    a multiple of the learning rate. Raises UserError for a setting that there is not.
    """
    rest = {name: value for name, value in settings.items() if name != "first"}
    whole = config_of(rest, lr, seed)
    if "first" not in settings:
        return [(whole, steps)]
    first = dict(settings["first"])
    count, rate = first.pop("steps", 10), first.pop("rate", 1.0)
    return [(config_of(join_settings(rest, first), lr * rate, seed), count), (whole, max(1, steps - count))]


def train_with_graft(
    denoiser: Any, dataset: Any, measure: Measure, parts: Sequence[tuple[TrainConfig, int]], watch: Watch
) -> None:
    """Train with Graft's own loop, each part on from the one before, as Train Steps in a row."""

    def on_step(progress: Progress, handles: Handles) -> None:
        def measured() -> Values:
            with handles.give_base_back():
                return measure(denoiser, handles.state())

        watch.look(progress.step, measured)

    state = None
    for config, steps in parts:
        state = train(denoiser, dataset, config, state, steps=steps, on_step=on_step)


def train_lora_node(patcher: Any, dataset: Any, measure: Measure, watch: Watch, steps: int) -> None:
    """Train with ComfyUI's node, copying its weights every few steps; the copies are measured afterwards.

    Its LoRA is float32: its default, bf16, loses small steps.
    """
    import comfy.model_management
    import comfy.sd

    from ...training.comfy.model.denoiser import ComfyDenoiser

    node = _node()
    latents, positive = samples(dataset)
    inputs = {
        "model": patcher, "latents": latents, "positive": positive, "batch_size": BATCH_SIZE,
        "steps": steps, "grad_accumulation_steps": 1, "learning_rate": watch.curve.lr, "rank": RANK,
        "optimizer": "AdamW", "loss_function": "MSE", "seed": watch.curve.seed, "training_dtype": "bf16",
        "lora_dtype": "fp32", "algorithm": "LoRA", "gradient_checkpointing": False,
        "existing_lora": "[None]", **_further_inputs(node),
    }  # fmt: skip
    lists = {name: value if name in ("latents", "positive") else [value] for name, value in inputs.items()}
    copies: list[list[Tensor]] = []
    with _after_steps(lambda step, weights: watch.look(step, lambda: _copied(copies, weights))):
        lora = node.execute(**lists).args[1]
    for copy in copies:
        tensors = dict(zip(lora, copy, strict=True))
        loaded, _ = comfy.sd.load_lora_for_models(patcher, None, tensors, 1.0, 0.0)
        watch.curve.add(measure(ComfyDenoiser(loaded)))
    comfy.model_management.unload_all_models()


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


def _copied(copies: list[list[Tensor]], weights: Sequence[Tensor]) -> Values:
    copies.append([weight.detach().clone() for weight in weights])
    return {}


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
