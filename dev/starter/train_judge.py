"""A judge of generated pictures: a small classifier of object and style.

    python dev/starter/train_judge.py --work DIR

It is trained on fresh renderings. It knows the common names of names.py, the mascot, the styles of
pictures.py and the one that a LoRA learns, in every color, place and background, and writes
DIR/judge.safetensors. The last line says how many of 2048 renderings that it never saw it names rightly.
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
from safetensors.torch import save_file
from shipped import judge
from torch import Tensor, nn

log = logging.getLogger("starter")

OBJECTS = [*sorted(name_lists.COMMON), mascot.NAME]
MASCOTS = 0.04  # share of the pictures
SHARES = {style: 0.9 * share for style, share in drawing.STYLES.items()} | {drawing.NEW_STYLE: 0.1}
STYLES = list(SHARES)
NAMES = {
    "objects": [name_lists.spoken(name)[-1] for name in OBJECTS],
    "styles": [drawing.STYLE_WORDS.get(style, style) for style in STYLES],
}  # as prompts have them
SEEN, UNSEEN = 0, 1  # first part of the seeds of renderings


def render(
    drawings: Mapping[str, Mapping[str, drawing.Drawing]], count: int, seed: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `count` fresh renderings in [0, 1] with the numbers of their objects and styles."""
    rng = np.random.default_rng(seed)
    poses = list(mascot.drawings())
    shown = [
        drawing.choose(rng, poses if rng.random() < MASCOTS else OBJECTS[:-1], styles=SHARES)
        for _ in range(count)
    ]
    pixels = torch.from_numpy(np.stack([drawing.draw(p, drawings) for p in shown])).permute(0, 3, 1, 2)
    names = torch.tensor([OBJECTS.index(mascot.NAME if p.name in poses else p.name) for p in shown])
    return pixels.float() / 255, names, torch.tensor([STYLES.index(p.style) for p in shown])


def read_drawings(work: Path) -> dict[str, dict[str, drawing.Drawing]]:
    """Return every package's drawings, the mascot's among each."""
    return {key: icons | mascot.drawings() for key, icons in drawing.read_drawings(work).items()}


def train(work: Path, steps: int, batch: int) -> judge.Judge:
    drawings = read_drawings(work)
    torch.manual_seed(0)
    model = judge.Judge(**NAMES).to(memory_format=torch.channels_last)

    def loss_at(step: int, g: torch.Generator) -> Tensor:
        pixels, names, styles = render(drawings, batch, (SEEN, step))
        pixels = pixels + 0.05 * torch.rand(1, generator=g) * torch.randn(pixels.shape, generator=g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            name, style = model(pixels.contiguous(memory_format=torch.channels_last))
        objects = F.cross_entropy(name.float(), names, label_smoothing=0.05)
        return objects + F.cross_entropy(style.float(), styles)

    run = Training("judge", work, steps=steps, warmup=100, cooldown=0.5, seed=4)
    run.go(loss_at, {"model": model}, [optimizer(model)])
    weights = {key: value.half().contiguous() for key, value in model.state_dict().items()}
    metadata = {kind: json.dumps(names) for kind, names in NAMES.items()}
    save_file(weights, work / "judge.safetensors", metadata)
    return model


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters()), "peak_lr": 2e-3}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.02, fused=True)


@torch.no_grad()
def accuracy(model: judge.Judge, work: Path, count: int = 2048) -> tuple[float, float]:
    """Return the shares of unseen renderings whose object and whose style the judge names rightly."""
    drawings = read_drawings(work)
    right = torch.zeros(2)
    for part in range(count // 64):
        pixels, names, styles = render(drawings, 64, (UNSEEN, part))
        name, style = model(pixels)
        right += torch.stack([(name.argmax(1) == names).sum(), (style.argmax(1) == styles).sum()])
    return (right / count)[0].item(), (right / count)[1].item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and everything temporary")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4400)
    parser.add_argument("--batch", type=int, default=64)
    settings = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(settings.threads)
    settings.work.mkdir(parents=True, exist_ok=True)
    model = train(settings.work, settings.steps, settings.batch)
    name, style = accuracy(model, settings.work)
    log.info("right of unseen renderings: object %.1f %%, style %.1f %%", 100 * name, 100 * style)


if __name__ == "__main__":
    main()
