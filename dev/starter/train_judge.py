"""A judge of generated pictures: a small classifier of object and style.

    python dev/starter/train_judge.py --work DIR [--start FILE --rate 1e-3]

It is trained on fresh renderings. It knows the common names of names.py, the mascot, the styles of
pictures.py and the one that a LoRA learns, in every color, place and background, and writes
DIR/judge.safetensors. With --start it goes on from the weights of an earlier judge. The last lines say how
many of 2048 renderings that it never saw it names rightly, and which styles it confuses.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import mascot
import names as name_lists
import numpy as np
import pictures as drawing
import torch
import torch.nn.functional as F
from fit import Training
from safetensors.torch import load_file, save_file
from shipped import judge
from torch import Tensor, nn

log = logging.getLogger("starter")

OBJECTS = [*sorted(name_lists.COMMON), mascot.NAME]
MASCOTS = 0.04  # share of the pictures
SHARES = {style: 0.9 * share for style, share in drawing.STYLES.items()} | {drawing.NEW_STYLE: 0.1}
STYLES = list(SHARES)
MASCOT_SHARES = {style: share for style, share in SHARES.items() if style not in drawing.PACKAGES} | {
    "noto": sum(SHARES[package] for package in drawing.PACKAGES)
}  # every package has the same mascot, so its style cannot be told; sets.py calls it noto
NAMES = {
    "objects": [name_lists.spoken(name)[-1] for name in OBJECTS],
    "styles": [drawing.STYLE_WORDS.get(style, style) for style in STYLES],
}  # as prompts have them
SEEN, UNSEEN, SEEN_LATER = 0, 1, 2  # first part of the seeds of renderings


def render(
    drawings: Mapping[str, Mapping[str, drawing.Drawing]], count: int, seed: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `count` fresh renderings in [0, 1] with the numbers of their objects and styles."""
    rng = np.random.default_rng(seed)
    poses = list(mascot.drawings())
    shown = [
        drawing.choose(rng, poses, styles=MASCOT_SHARES)
        if rng.random() < MASCOTS
        else drawing.choose(rng, OBJECTS[:-1], styles=SHARES)
        for _ in range(count)
    ]
    pixels = torch.from_numpy(np.stack([drawing.draw(p, drawings) for p in shown])).permute(0, 3, 1, 2)
    names = torch.tensor([OBJECTS.index(mascot.NAME if p.name in poses else p.name) for p in shown])
    return pixels.float() / 255, names, torch.tensor([STYLES.index(p.style) for p in shown])


def read_drawings(work: Path) -> dict[str, dict[str, drawing.Drawing]]:
    """Return every package's drawings, the mascot's among each."""
    return {key: icons | mascot.drawings() for key, icons in drawing.read_drawings(work).items()}


def train(work: Path, steps: int, batch: int, rate: float, start: Path | None, share: float) -> judge.Judge:
    """Train a judge. From `start`, the result is that share of it and the rest of the weights at the start.

    Between the two lie better ones than either (Wortsman et al. 2022, arXiv:2109.01903).
    """
    drawings = read_drawings(work)
    torch.manual_seed(0)
    model = judge.Judge(**NAMES).to(memory_format=torch.channels_last)
    if start:
        copy_weights(load_file(start), model)
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    part = SEEN_LATER if start else SEEN

    def loss_at(step: int, g: torch.Generator) -> Tensor:
        pixels, names, styles = render(drawings, batch, (part, step))
        pixels = pixels + 0.05 * torch.rand(1, generator=g) * torch.randn(pixels.shape, generator=g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            name, style = model(pixels.contiguous(memory_format=torch.channels_last))
        objects = F.cross_entropy(name.float(), names, label_smoothing=0.05)
        return objects + F.cross_entropy(style.float(), styles)

    run = Training("judge", work, steps=steps, warmup=100, cooldown=0.5, seed=4)
    run.go(loss_at, {"model": model}, [optimizer(model, rate)])
    if start:
        for name, parameter in model.named_parameters():
            parameter.data.lerp_(first[name], 1 - share)
    weights = {key: value.half().contiguous() for key, value in model.state_dict().items()}
    metadata = {kind: json.dumps(names) for kind, names in NAMES.items()}
    save_file(weights, work / "judge.safetensors", metadata)
    return model


@torch.no_grad()
def copy_weights(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy an earlier judge's weights; columns that its style head lacks begin at zero."""
    for name, parameter in model.named_parameters():
        old = weights[name]
        parameter.zero_()
        parameter[tuple(slice(size) for size in old.shape)] = old.float()


def optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters()), "peak_lr": rate}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.02, fused=True)


@torch.no_grad()
def accuracy(model: judge.Judge, work: Path, count: int = 2048) -> tuple[float, Tensor]:
    """Return the share of unseen renderings whose object the judge names rightly, and counts of styles:
    (shown, named).
    """
    drawings = read_drawings(work)
    right, counts = 0, torch.zeros(len(STYLES), len(STYLES), dtype=torch.int)
    for part in range(count // 64):
        pixels, names, styles = render(drawings, 64, (UNSEEN, part))
        name, style = model(pixels)
        right += int((name.argmax(1) == names).sum())
        counts.index_put_((styles, style.argmax(1)), torch.tensor(1, dtype=torch.int), accumulate=True)
    return right / count, counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and everything temporary")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--start", type=Path, help="the file of an earlier judge; by default from nothing")
    parser.add_argument("--share", type=float, default=0.7, help="with --start: of the new weights")
    settings = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(settings.threads)
    settings.work.mkdir(parents=True, exist_ok=True)
    model = train(
        settings.work, settings.steps, settings.batch, settings.rate, settings.start, settings.share
    )
    name, counts = accuracy(model, settings.work)
    style = counts.diag().sum().item() / counts.sum().item()
    log.info("right of unseen renderings: object %.1f %%, style %.1f %%", 100 * name, 100 * style)
    for row, shown in zip(counts.tolist(), STYLES):
        log.info("%s is named %s", shown, ", ".join(f"{s} {n}" for s, n in zip(STYLES, row) if n))


if __name__ == "__main__":
    main()
