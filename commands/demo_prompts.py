"""The demo's graphs in ComfyUI's API format: the shipped workflow, the held-out loss, the sample grid."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..training.job.graph import NODES, Prompt, of_kind
from ..training.user_error import UserError

Link = list[Any]

VARIANTS = {
    "base model\nwithout the LoRA": 0.0,
    "LoRA at 0.5\nhalf strength": 0.5,
    "LoRA at 1.0\nfull strength": 1.0,
}
"""Row of the grid -> strength of the LoRA."""


def training(workflow: Path, changes: Mapping[str, Mapping[str, Any]]) -> Prompt:
    """Return the shipped workflow with new inputs: {node's class: {input: value, or None to keep it}}."""
    prompt: Prompt = json.loads(workflow.read_text(encoding="utf-8"))
    for kind, values in changes.items():
        for node_id in of_kind(prompt, kind):
            inputs = prompt[node_id]["inputs"]
            inputs.update({name: value for name, value in values.items() if value is not None})
    return prompt


def add_preservation(prompt: Prompt, class_word: str, *, weight: float = 4.0, share: float = 0.5) -> None:
    """Add preservation to a training: what the base draws for captions with `class_word` in place of the
    trigger stays as it is.
    """
    for setting, values, node, slot in (
        ("objective", {"preservation": weight, "preservation_share": share}, "train", "objective_settings"),
        ("dataset_settings", {"class_word": class_word}, "dataset", "dataset_settings"),
    ):
        added = _add(prompt, NODES[setting].kind, **{**NODES[setting].inputs, **values})
        prompt[_first(prompt, NODES[node].kind)]["inputs"][slot] = [added, 0]


def held_out(trained: Prompt, lora: str, folders: Mapping[str, str]) -> tuple[Prompt, dict[str, str]]:
    """Return a prompt that measures the loss on folders of captioned images, and which node measures what.

    `folders` are {name: dataset folder}; the second value calls the measurements "base NAME" and "lora NAME".
    """
    prompt = _only(trained, "GraftLoadBaseModel")
    base, nodes = _first(prompt, "GraftLoadBaseModel"), {}
    patched = _add(prompt, "LoraLoader", model=[base, 0], clip=[base, 1], lora_name=lora, **_strength(1.0))
    like = {**trained[_first(trained, "GraftLoadDataset")]["inputs"]}
    like.pop("dataset_settings", None)
    for name, folder in folders.items():
        plain = {"folder": folder, "repeats": 1, "caption_dropout": 0.0, "flip": False}
        images = _add(prompt, "GraftLoadDataset", **{**like, **plain})
        encoded = _add(
            prompt,
            "GraftEncodeDataset",
            **{**trained[_first(trained, "GraftEncodeDataset")]["inputs"], "dataset": [images, 0]},
        )
        for model, link in (("base", [base, 0]), ("lora", [patched, 0])):
            nodes[f"{model} {name}"] = _add(prompt, "GraftValidationLoss", model=link, dataset=[encoded, 0])
    return prompt, nodes


def grid(trained: Prompt, lora: str, texts: Sequence[str]) -> tuple[Prompt, list[list[str]]]:
    """Return a prompt that draws every text at every strength, and its SaveImage nodes: [text][variant]."""
    prompt = _only(trained, "GraftLoadBaseModel")
    base = _first(prompt, "GraftLoadBaseModel")
    sampler = trained[_first(trained, "KSampler")]["inputs"]
    latent = _copy(prompt, trained, sampler["latent_image"][0], batch_size=1)
    models: list[tuple[Link, Link]] = []
    for strength in VARIANTS.values():
        node = strength and _add(
            prompt, "LoraLoader", model=[base, 0], clip=[base, 1], lora_name=lora, **_strength(strength)
        )
        models.append(([node, 0], [node, 1]) if node else ([base, 0], [base, 1]))
    saved: list[list[str]] = []
    for text in texts:
        saved.append([])
        for model, clip in models:
            positive = _add(prompt, "CLIPTextEncode", clip=clip, text=text)
            negative = _add(prompt, "CLIPTextEncode", clip=clip, text="")
            drawn = _add(
                prompt,
                "KSampler",
                **{
                    **sampler,
                    "model": model,
                    "positive": [positive, 0],
                    "negative": [negative, 0],
                    "latent_image": [latent, 0],
                },
            )
            image = _add(prompt, "VAEDecode", samples=[drawn, 0], vae=[base, 2])
            saved[-1].append(_add(prompt, "SaveImage", images=[image, 0], filename_prefix="grid/sample"))
    return prompt, saved


def _first(prompt: Prompt, kind: str) -> str:
    node_ids = of_kind(prompt, kind)
    if not node_ids:
        raise UserError(f"the example workflow has no {kind} node.")
    return node_ids[0]


def _only(prompt: Prompt, kind: str) -> Prompt:
    return {node_id: prompt[node_id] for node_id in of_kind(prompt, kind)}


def _add(prompt: Prompt, kind: str, **inputs: Any) -> str:
    node_id = str(1 + max(map(int, prompt), default=0))
    prompt[node_id] = {"class_type": kind, "inputs": inputs}
    return node_id


def _copy(prompt: Prompt, source: Prompt, node_id: str, **changes: Any) -> str:
    return _add(prompt, source[node_id]["class_type"], **{**source[node_id]["inputs"], **changes})


def _strength(value: float) -> dict[str, float]:
    return {"strength_model": value, "strength_clip": value}
