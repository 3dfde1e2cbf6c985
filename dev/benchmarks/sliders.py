"""Sliders on the starter, as its judge sees them: one from words, one from pairs of pictures.

    python dev/bench.py sliders --json --work DIR

Each goes from an outline drawing at strength -1 to a neon sign at 1. It is saved to a file, loaded with
ComfyUI's stock loader, and draws objects, most of which it was not trained on, at both ends and at 0. The
score of a picture is the judge's probability of neon less that of outline: a picture of another style has 0.
`--work` keeps the icons that the pairs are drawn from.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...commands.bench.drawn import Drawn
from ...commands.bench.quality import RESOLUTION, STARTER, load_starter
from ...starter.judge import load_judge
from ...training.config import AdapterConfig, MemoryConfig, OptimizerConfig, TrainConfig
from ...training.data import BucketConfig, DatasetConfig, encode, scan
from ...training.data.slider import pair_images, slide_words
from ...training.data.slider_words import SliderWords
from ...training.files.lora.write import lora_tensors, write_lora
from ...training.loop import train

STRENGTHS = (-1.0, 0.0, 1.0)
ENDS = {1: "neon sign", -1: "outline drawing"}
"""Strength -> the judge's style."""
WORDS = SliderWords(positive="neon sign of a cat", negative="outline drawing of a cat", neutral="cat")
TRAINED = ("cat", "dog", "elephant", "rose", "banana", "hamburger", "rocket", "guitar", "umbrella", "house")
PROMPTS = ("cat", "owl", "mushroom", "car", "key", "strawberry")
"""What is drawn: of these only the first is trained on."""
RANK, BATCH_SIZE = 16, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python dev/bench.py sliders`."""
    parser.add_argument("--work", type=Path, required=True, help="keeps the icons, from npm")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each slider")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--guidance", type=float, default=WORDS.guidance, help="of the slider from words")
    parser.add_argument("--kinds", nargs="+", default=["words", "pairs"], choices=["words", "pairs"])


def run(args: argparse.Namespace) -> int:
    """Train the sliders and print what the judge says of their pictures."""
    torch.set_num_threads(1)
    found = measure(args.kinds, args.work, args.steps, args.lr, args.guidance)
    print(json.dumps(found, indent=1) if args.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return 0


def measure(kinds: list[str], work: Path, steps: int, lr: float, guidance: float) -> dict[str, Any]:
    """Return, by kind, the scores at each strength, and whether strength 0 draws the base's pictures."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="graft-sliders-") as place:
        denoiser, encoder = load_starter(Path(place))
        drawn = Drawn(encoder.clip, encoder.vae, load_judge(), PROMPTS, others=())
        base = drawn.draw(denoiser.patcher)
        config = TrainConfig(
            batch_size=BATCH_SIZE,
            adapter=AdapterConfig(rank=RANK),
            optimizer=OptimizerConfig(lr=lr),
            memory=MemoryConfig(dtype="bf16"),
        )
        for kind in kinds:
            images = words(guidance) if kind == "words" else pairs(work, Path(place, "pairs"))
            dataset = encode(images, encoder, Path(place, "cache"))
            state = train(denoiser, dataset, config, None, steps=steps)
            file = Path(place, f"{kind}.safetensors")
            write_lora(file, lora_tensors(state, denoiser.family, torch.bfloat16), {})
            pictures = {s: drawn.draw(with_file(denoiser.patcher, file, s)) for s in STRENGTHS}
            scores = {str(s): score(drawn, pixels) for s, pixels in pictures.items()}
            rising = [low < middle < high for low, middle, high in zip(*scores.values())]
            found[kind] = {
                "score": {s: round(statistics.mean(each), 3) for s, each in scores.items()},
                "by prompt": {s: dict(zip(PROMPTS, each)) for s, each in scores.items()},
                "rising": sum(rising) / len(rising),
                "zero is the base": bool(np.array_equal(pictures[0.0], base)),
            }
    return found


def words(guidance: float) -> Any:
    """Return the dataset of the slider from words; its pictures only say where noise is put."""
    return slide_words(scan(STARTER / "base_style", sized()), replace(WORDS, guidance=guidance))


def pairs(work: Path, place: Path) -> Any:
    """Return the dataset of the slider from pairs, drawn to `place`: equal but for the style."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "starter"))
    import pictures as drawing

    drawings = drawing.read_drawings(work)
    looks = {1: ("neon", "pink", "neon"), -1: ("outline", "black", "white")}
    for name in TRAINED:
        for end, (style, color, paper) in looks.items():
            folder = place / str(end)
            folder.mkdir(parents=True, exist_ok=True)
            shown = drawing.Picture(name=name, style=style, source="noto", color=color, paper=paper)
            Image.fromarray(drawing.draw(shown, drawings)).save(folder / f"{name}.png")
            (folder / f"{name}.txt").write_text(name, encoding="utf-8")
    return pair_images(*(scan(place / str(end), sized()) for end in ENDS))


def sized() -> DatasetConfig:
    return DatasetConfig(bucket=BucketConfig(resolutions=(RESOLUTION,)), dtype="fp32")


def with_file(patcher: Any, file: Path, strength: float) -> Any:
    """Return MODEL with a LoRA file, as Load LoRA applies it."""
    import comfy.sd
    import comfy.utils

    lora = comfy.utils.load_torch_file(str(file), safe_load=True)
    return comfy.sd.load_lora_for_models(patcher, None, lora, strength, 0.0)[0]


def score(drawn: Drawn, pixels: np.ndarray) -> list[float]:
    """Return each picture's probability of the style of strength 1, less that of the style of -1."""
    judge = drawn.judge
    _, styles = judge.logits([Image.fromarray(each) for each in pixels])
    shares = styles.double().softmax(1)
    one, other = (shares[:, judge.styles.index(ENDS[end])] for end in (1, -1))
    return [round(value, 6) for value in (one - other).tolist()]
