"""What the files of this folder were made of: the tests ask today's code for the same again.

They were made on 2026-11-23, at the root, by
`python -c "import tests.conftest; from graft.tests.contracts import make; make.write()"`, and are never made
again. A new kind of file gets lines here and a place beside the others. Only `make.write_starter()` is run
again, when the starter has another base or other pictures.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors import safe_open

from graft.commands.headless.import_comfyui import import_comfyui
from graft.commands.headless.server import find_comfyui, server
from graft.tests.support.datasets import FakeEncoder
from graft.tests.support.tiny import TinyDataset, TinyDenoiser, TinySamples
from graft.training.config import (
    AdapterConfig,
    CheckpointConfig,
    EmaConfig,
    MemoryConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
    digest,
)
from graft.training.data import EncodedDataset, SplitConfig, encode, join, scan
from graft.training.data.augment import Jitter
from graft.training.data.config import AugmentConfig, BucketConfig, CaptionConfig, DatasetConfig, MaskConfig
from graft.training.data.index import SourceRules
from graft.training.files.lora.read import read_lora
from graft.training.job.read import Job, read_job
from graft.training.loop import train
from graft.training.run.execute import Run, execute, run_key
from graft.training.run.queued import note_queued, run_settings, settings_of
from graft.training.run.saved_state import StateHandle, save_state
from graft.training.state import LossScale
from graft.training.tools.merge import digest as lora_digest

HERE = Path(__file__).resolve().parent

RUN = TrainConfig(
    batch_size=2,
    seed=7,
    adapter=AdapterConfig(rank=2, alpha=1.0, targets="all", ranks=(("*mlp*", 3),)),
    optimizer=OptimizerConfig(lr=1e-3),
    schedule=ScheduleConfig(name="cosine", warmup_steps=2, total_steps=20),
    ema=EmaConfig(decay=0.9),
    validation=ValidationConfig(every=2),
)
STEPS = 6
SAVING = CheckpointConfig(minutes=60, steps=3, sqlite=True)
"""No checkpoint by the clock."""
TRAIN_STEPS = "23"
"""The node of graph.json that the run was queued by."""

STATE = TrainConfig(
    seed=8, adapter=AdapterConfig(algorithm="dora", rank=2, targets="attn"), memory=MemoryConfig(dtype="fp16")
)
"""A run whose state has a loss scale."""

PICTURES = DatasetConfig(
    caption=CaptionConfig(trigger="p3r5on", shuffle=True, variations=2, dropout=0.1),
    bucket=BucketConfig(resolutions=(64, 32)),
    augment=AugmentConfig(crop="random", flip=True, hue=0.1, variations=2),
    mask=MaskConfig(outside=0.25),
)
PLAIN = DatasetConfig(bucket=BucketConfig(resolutions=(64,)), dtype="fp32")

CONFIGS = (TrainConfig(), DatasetConfig(), LossScale())
"""Everything that is digested, with what is in it."""
PARTS = (Jitter, SourceRules)
"""Whose repr is part of a digest."""


def key_of(config: TrainConfig) -> str:
    """Return the key of a run of the tiny denoiser."""
    return run_key(TinyDenoiser(), TinyDataset(), config, None, TinySamples())


def go(folder: Path, steps: int, **options: Any) -> StateHandle:
    """Train the run in `folder` to step `steps`."""
    samples = {"validation": TinySamples(), **options}
    return execute(Run(folder, SAVING), TinyDenoiser(), TinyDataset(), RUN, None, steps=steps, **samples)


def encoded(folder: Path, cache: Path, encoder: FakeEncoder) -> EncodedDataset:
    """Return the pictures of `folder` twice, by other settings, with what of them is in the cache."""
    return encode(join([scan(folder, PICTURES), scan(folder, PLAIN)]), encoder, cache)


def tree(config: Any) -> Iterator[Any]:
    """Yield a config and the configs in it."""
    yield config
    for item in fields(config):
        if is_dataclass(value := getattr(config, item.name)):
            yield from tree(value)


def known(run: Path, data: EncodedDataset) -> dict[str, Any]:
    """Return the digests that are the same for good."""
    graph = json.loads((HERE / "graph.json").read_text(encoding="utf-8"))
    configs = [found for config in CONFIGS for found in tree(config)]
    names = {kind.__name__: [f.name for f in fields(kind)] for kind in (*map(type, configs), *PARTS)}
    train_set, held_out = data.split(SplitConfig(fraction=0.5))
    return {
        "fields": names,
        "defaults": {type(config).__name__: digest(config) for config in configs},
        "datasets": [data.fingerprint, train_set.fingerprint, held_out.fingerprint],
        "graph": settings_of(graph),
        "lora": lora_digest(read_lora(Run(run).lora(STEPS))),
    }


def plain(job: Job) -> dict[str, Any]:
    """Return what a job asks for, without the places of files on this machine."""
    names = ("name", "prompt", "device", "log_every", "document")
    return {name: getattr(job, name) for name in names}


def write() -> None:
    """Write what needs no ComfyUI; graph.json and job.yaml are there."""
    run = HERE / "run" / f"tiny-{key_of(RUN)}"
    go(run, STEPS)
    graph = json.loads((HERE / "graph.json").read_text(encoding="utf-8"))
    note_queued(run, run_settings(graph, TRAIN_STEPS), STEPS)
    save_state(train(TinyDenoiser(), TinyDataset(), STATE, None, steps=3), HERE / "state")
    write_pictures(HERE / "pictures")
    data = encoded(HERE / "pictures", HERE / "cache", FakeEncoder())
    (HERE / "cache" / "content.sqlite").unlink()  # it remembers files by where they lay
    write_json("job", plain(read_job(HERE / "job.yaml")))
    write_json("known", known(run, data))


def write_starter() -> None:
    """Write what depends on the starter: lora.safetensors, by the graph in it, and known_comfy.json."""
    lora = HERE / "lora.safetensors"
    with safe_open(lora, "pt") as file:
        graph = json.loads(file.metadata()["prompt"])
    first = json.loads((HERE / "first_lora.json").read_text(encoding="utf-8"))
    first = {key: node for key, node in first.items() if int(key) <= 6}
    first["5"]["inputs"] |= {"steps": 1, "name": "first"}
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch).resolve()
        with server(find_comfyui(), base, cpu=True) as comfy:
            comfy.run(graph)
            comfy.run(first)
        shutil.copy(base / "output" / "loras" / "contract.safetensors", lora)
        [run] = (base / "output" / "graft").glob("first-*")
        known = known_of_starter(base / "output", lora)
        write_json("known_comfy", {"run": run.name.removeprefix("first-"), **known})


def known_of_starter(output: Path, lora: Path) -> dict[str, Any]:
    """Return the digests of the starter's model, of a start from `lora`, and the names of its pictures."""
    import_comfyui(find_comfyui(), ["--cpu"])
    import comfy.sd
    import folder_paths

    from graft.starter.in_comfyui import BASE, BASE_MODEL, STARTER
    from graft.training.comfy.files.initial_lora import save_initial_state
    from graft.training.comfy.model.denoiser import ComfyDenoiser

    folder_paths.set_output_directory(str(output))
    folder_paths.add_model_folder_path("loras", str(lora.parent))
    denoiser = ComfyDenoiser(comfy.sd.load_checkpoint_guess_config(str(BASE / BASE_MODEL))[0])
    config = AdapterConfig(start_from=lora.name, include=("*joint_blocks.0.x_block*",))
    start, _ = save_initial_state(denoiser, config, seed=0)
    assert start
    folders = {"dataset": "style", "validation": "style_validation", "base_style": "base_style"}
    pictures = {
        f"demo/{old}": sorted(path.name for path in (STARTER / now).glob("*.png"))
        for old, now in folders.items()
    }
    known = {"base": denoiser.fingerprint, "start": start.path.name, "lora": lora_digest(read_lora(lora))}
    return {**known, "pictures": pictures}


def write_json(name: str, value: Any) -> None:
    (HERE / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_pictures(folder: Path) -> None:
    """Write three small images with captions, one with a mask and one with transparency."""
    folder.mkdir()
    for number, (name, size) in enumerate({"red": (64, 64), "green": (96, 64), "blue": (48, 80)}.items()):
        pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3 + number % 2), np.uint8)
        Image.fromarray(pixels).resize(size).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"{name}, square, a picture", encoding="utf-8")
    Image.new("L", (64, 64), 128).save(folder / "red-mask.png")
