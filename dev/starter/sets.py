"""The pictures that the demo's LoRAs learn and are measured on: folders in starter/.

    python dev/starter/sets.py --work DIR

`style`: 24 objects in a style that the base never saw. `character`: the mascot in ten poses. Each has a
validation set: other objects, and other pairs of pose and background. `base_style` has objects in the styles
that the base draws, which a LoRA should leave as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import mascot
import names as name_lists
import pictures as drawing
from PIL import Image

STARTER = Path(__file__).resolve().parents[2] / "starter"
Captioned = tuple[str, drawing.Picture]

STYLE = """
panda frog penguin owl elephant octopus turtle watermelon cherries carrot pear pizza cupcake hot-beverage
rocket sailboat house castle umbrella guitar balloon cactus sunflower crown
""".split()
STYLE_VALIDATION = """
cat-face fox koala tropical-fish red-apple strawberry doughnut automobile key mushroom snowman teddy-bear
""".split()

CHARACTER = [(pose, "white", "", "") for pose in mascot.POSES] + [
    ("standing", "meadow", "", ""),
    ("waving", "yellow", "", ""),
    ("jumping", "beach", "", ""),
    ("sleeping", "light blue", "", ""),
    ("cheering", "striped", "", ""),
    ("standing", "white", "small", "left"),
]
CHARACTER_VALIDATION = [
    ("waving", "snow", "", ""),
    ("jumping", "night", "", ""),
    ("sleeping", "meadow", "", ""),
    ("cheering", "pink", "", ""),
    ("running", "desert", "", ""),
    ("sitting", "beach", "", ""),
    ("pointing", "dotted", "", ""),
    ("waving", "white", "small", "top right"),
]
BASE_STYLE = """
dog lion rabbit whale butterfly banana hamburger airplane deciduous-tree church trophy
ghost
""".split()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="downloads")
    drawings = drawing.read_drawings(parser.parse_args().work)
    drawings["noto"] |= mascot.drawings()
    write("style", [sunburst(name) for name in STYLE], drawings)
    write("style_validation", [sunburst(name) for name in STYLE_VALIDATION], drawings)
    write("character", [character(*row) for row in CHARACTER], drawings)
    write("character_validation", [character(*row) for row in CHARACTER_VALIDATION], drawings)
    styles = [s for s in drawing.STYLES if s != "silhouette"]
    rows = [(name, styles[i % len(styles)]) for i, name in enumerate(BASE_STYLE)]
    write("base_style", [base_style(*row) for row in rows], drawings)


def sunburst(name: str) -> Captioned:
    picture = drawing.Picture(name=name, style=drawing.NEW_STYLE, source="fluent", paper=drawing.NEW_STYLE)
    return f"{name_lists.spoken(name)[-1]}, {drawing.NEW_STYLE} style", picture


def character(pose: str, paper: str, size: str, place: str) -> Captioned:
    x, y = drawing.PLACES.get(place, (0, 0))
    picture = drawing.Picture(
        name=f"{mascot.NAME}-{pose.replace(' ', '-')}", style="noto", source="noto", paper=paper,
        scale=0.45 if size else 0.85, shift=(0.25 * x, 0.25 * y),
    )  # fmt: skip
    where = drawing.SCENES.get(paper) or ("" if paper == "white" else f"on a {paper} background")
    spot = place and f"{'at' if ' ' in place else 'on'} the {place}"
    return " ".join(w for w in (size, mascot.NAME, pose, spot, where) if w), picture


def base_style(name: str, style: str) -> Captioned:
    neon, blueprint = style == "neon", style == "blueprint"
    picture = drawing.Picture(
        name=name, style=style, source=style if style in drawing.PACKAGES else "noto",
        color="pink" if neon else "black" if style == "outline" else "",
        paper="neon" if neon else "blueprint" if blueprint else "white",
    )  # fmt: skip
    subject = f"{picture.color} {name_lists.spoken(name)[-1]}" if neon else name_lists.spoken(name)[-1]
    return f"{subject}, {drawing.STYLE_WORDS.get(style, style)} style", picture


def write(
    folder: str, captioned: list[Captioned], drawings: Mapping[str, Mapping[str, drawing.Drawing]]
) -> None:
    """Write each picture and its caption to starter/`folder`, which keeps only its license."""
    target = STARTER / folder
    target.mkdir(exist_ok=True)
    for old in [*target.glob("*.png"), *target.glob("*.txt")]:
        old.unlink()
    for caption, picture in captioned:
        stem = caption.replace(",", "").replace(" ", "-")
        Image.fromarray(drawing.draw(picture, drawings)).save(target / f"{stem}.png", optimize=True)
        (target / f"{stem}.txt").write_text(caption, encoding="utf-8")


if __name__ == "__main__":
    main()
