"""The starter model's pictures: named emoji in eight drawing styles, colors, sizes, places and backgrounds.

A `Picture` says what is to be seen; `draw` draws it, `describe` writes a caption for it. Noto Emoji
(Apache-2.0), Fluent Emoji Flat (MIT) and Twemoji (CC BY 4.0) come from npm, one JSON file of SVG bodies
each; the other styles are made here from the same drawings. OpenMoji is left out: CC BY-SA would reach the
pictures that the model draws.
"""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import names as name_lists
import numpy as np
import resvg_py
from PIL import Image, ImageFilter

SIZE = 128
PACKAGES = {
    "noto": "@iconify-json/noto@1.2.9",
    "twemoji": "@iconify-json/twemoji@1.2.5",
    "fluent": "@iconify-json/fluent-emoji-flat@1.2.6",
}
STYLES = {  # share of the pictures
    "noto": 0.21, "twemoji": 0.19, "fluent": 0.19,
    "outline": 0.09, "silhouette": 0.06, "blueprint": 0.08, "neon": 0.09, "pixel art": 0.09,
}  # fmt: skip
NEW_STYLE = "sunburst"  # the base never sees it: a LoRA learns it
COLORS = {
    "red": "#e53935", "orange": "#fb8c00", "yellow": "#fdd835", "green": "#43a047", "turquoise": "#26c6da",
    "blue": "#1e5fd8", "purple": "#8e24aa", "pink": "#f06292", "brown": "#795548", "gray": "#8a8f94",
    "black": "#1c1c1e", "white": "#ffffff",
}  # fmt: skip
PAPERS = COLORS | {
    "light blue": "#b3e0fc", "light green": "#c5e8b7", "beige": "#f3e6cf", "dark blue": "#14265c",
}  # fmt: skip
NEON = {
    "red": "#ff3148", "orange": "#ff8a1e", "yellow": "#ffe93b", "green": "#39ff5a", "turquoise": "#22f2f2",
    "blue": "#3a7bff", "purple": "#b44dff", "pink": "#ff4fc3", "white": "#f5f5ff",
}  # fmt: skip
SCENES = {  # what is behind the object, and how a caption says so
    "striped": "on a striped background", "dotted": "on a polka dot background",
    "checkered": "on a checkered background", "meadow": "in a meadow", "beach": "at the beach",
    "night": "under a night sky", "sunset": "at sunset", "desert": "in the desert", "snow": "in the snow",
    "underwater": "under water",
}  # fmt: skip
PLACES = {
    "left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1), "top left": (-1, -1),
    "top right": (1, -1), "bottom left": (-1, 1), "bottom right": (1, 1),
}  # fmt: skip
STYLE_WORDS = {
    "outline": "outline drawing", "silhouette": "silhouette", "blueprint": "blueprint", "neon": "neon sign",
}  # fmt: skip

Drawing = tuple[str, float, float]  # SVG body, width, height


@dataclass(frozen=True)
class Picture:
    name: str
    style: str
    source: str  # package of the drawing; equal to style for the first three styles
    color: str = ""  # "" leaves the drawing's own colors
    size: str = ""  # "", "small" or "big"
    place: str = ""  # "" is the middle
    paper: str = "white"  # a color of PAPERS or a scene
    scale: float = 0.85
    turn: float = 0.0  # degrees
    shift: tuple[float, float] = (0.0, 0.0)  # of the middle, in widths
    flip: bool = False


# --- sources ----------------------------------------------------------------------------------------------


def fetch_package(package: str, folder: Path) -> Path:
    """Return the unpacked npm `package` ("@scope/name@version") in `folder`, first downloading it."""
    target = folder / package.strip("@").replace("/", "-").replace("@", "-")
    if not (target / "package" / "package.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", package, "--silent"]
        result = subprocess.run(command, cwd=target, check=True, capture_output=True, text=True)
        with tarfile.open(target / result.stdout.split()[-1]) as archive:
            archive.extractall(target, filter="data")
    return target / "package"


def read_drawings(folder: Path) -> dict[str, dict[str, Drawing]]:
    """Return {package: {name: (SVG body, width, height)}} for the usable names that every package has."""
    packages = {}
    for key, package in PACKAGES.items():
        data = json.loads((fetch_package(package, folder) / "icons.json").read_text(encoding="utf-8"))
        icons = data["icons"]
        icons |= {a: icons[v["parent"]] for a, v in data.get("aliases", {}).items() if v["parent"] in icons}
        default = data.get("width", 16), data.get("height", 16)
        packages[key] = {
            n: (i["body"], i.get("width", default[0]), i.get("height", default[1])) for n, i in icons.items()
        }
    shared = name_lists.usable(set.intersection(*(set(p) for p in packages.values())))
    return {key: {name: p[name] for name in shared} for key, p in packages.items()}


# --- choosing ---------------------------------------------------------------------------------------------


def choose(
    rng: np.random.Generator,
    names: Sequence[str],
    weights: np.ndarray | None = None,
    styles: Mapping[str, float] = STYLES,
) -> Picture:
    """Draw at random what a picture shows."""
    name = str(rng.choice(names, p=weights))
    style = str(rng.choice(list(styles), p=list(styles.values())))
    source = style if style in PACKAGES else str(rng.choice(list(PACKAGES)))
    if style == NEW_STYLE:
        source = "fluent"  # of few shapes: thick lines leave room for color
    color, paper = "", "white"
    if style in ("blueprint", NEW_STYLE):
        paper = style
    elif style == "neon":
        color, paper = str(rng.choice(list(NEON))), "neon"
    else:
        kind = rng.random()
        if kind < 0.28:
            paper = str(rng.choice(list(PAPERS)))
        elif kind < 0.43:
            paper = str(rng.choice(list(SCENES)))
        if style in ("outline", "silhouette"):
            color = "black" if rng.random() < 0.6 else str(rng.choice(list(COLORS)))
        elif rng.random() < 0.15:
            color = str(rng.choice(list(COLORS)))
        if color == paper:
            paper = "white" if color != "white" else "blue"
    size, place, layout = "", "", rng.random()
    scale, shift = rng.uniform(0.76, 0.9), rng.uniform(-0.03, 0.03, 2)
    if layout < 0.1:
        size, scale = "big", rng.uniform(1.1, 1.25)
    elif layout < 0.24:
        size, scale = "small", rng.uniform(0.4, 0.5)
        if rng.random() < 0.85:
            place = str(rng.choice(list(PLACES)))
            shift = shift + 0.25 * np.array(PLACES[place])
    return Picture(
        name=name, style=style, source=source, color=color, size=size, place=place, paper=paper,
        scale=float(scale), turn=float(rng.uniform(-8, 8)) if rng.random() < 0.5 else 0.0,
        shift=(float(shift[0]), float(shift[1])), flip=name not in name_lists.ONE_WAY and rng.random() < 0.5,
    )  # fmt: skip


def name_weights(names: Sequence[str]) -> np.ndarray:
    """Return how often each name is drawn: common ones three times as often."""
    weights = np.array([3.0 if n in name_lists.COMMON else 1.0 for n in names])
    return weights / weights.sum()


# --- captions ---------------------------------------------------------------------------------------------


def describe(picture: Picture, rng: np.random.Generator, *, complete: bool = False) -> str:
    """Write a caption: the name, and mostly (if `complete`, always) what differs from the usual."""

    def says(share: float) -> bool:
        return complete or rng.random() < share

    names = name_lists.spoken(picture.name)
    name = names[0] if complete or rng.random() < 0.5 else names[rng.integers(len(names))]
    usual = picture.style in ("outline", "silhouette") and picture.color == "black"
    color = picture.color if picture.color and says(0.3 if usual else 0.9) else ""
    size = picture.size if picture.size and says(0.85) else ""
    subject = " ".join(w for w in (size, color, name) if w)
    style = STYLE_WORDS.get(picture.style, picture.style)
    style = style if says(0.7 if picture.style in PACKAGES else 0.95) else ""
    place = ""
    if picture.place and says(0.9):
        corner = " " in picture.place or picture.place in ("top", "bottom")
        place = f"{'at' if corner else 'on'} the {picture.place}"
    paper = ""
    if picture.paper in SCENES:
        paper = SCENES[picture.paper] if says(0.95) else ""
    elif picture.paper in PAPERS and says(0.25 if picture.paper == "white" else 0.93):
        paper = f"on a {picture.paper} background"
    if rng.random() < 0.4:  # a list of words
        where = place.removeprefix("at the ").removeprefix("on the ")
        parts = [subject, style and f"{style} style", paper.removeprefix("on a "), where]
        return ", ".join(p for p in parts if p)
    article = rng.choice(["", "a "])
    text = " ".join(w for w in (article + subject, place, paper) if w)
    if style and picture.style in STYLE_WORDS and rng.random() < 0.5:
        text = f"{article}{style} of {text}"
    elif style:
        text = f"{text}, {style} style"
    return re.sub(r"\ba (?=[aeiou])", "an ", text)


# --- drawing ----------------------------------------------------------------------------------------------


def draw(picture: Picture, drawings: Mapping[str, Mapping[str, Drawing]]) -> np.ndarray:
    """Draw `picture`: (128, 128, 3) uint8."""
    drawing = drawings[picture.source][picture.name]
    if picture.style == "neon":
        return draw_neon(picture, drawing)
    if picture.style == NEW_STYLE:
        return draw_sunburst(picture, drawing)
    page = draw_paper(picture.paper)
    if picture.style == "pixel art":
        page = page.resize((32, 32), Image.Resampling.BOX)
        page.paste(*harden(tinted(render(place(picture, drawing), 32), picture.color)))
        return np.array(page.resize((SIZE, SIZE), Image.Resampling.NEAREST))
    if picture.style == "silhouette":
        shape = render(place(picture, drawing)).getchannel("A")
        page.paste(COLORS[picture.color], mask=shape)
    elif picture.style in ("outline", "blueprint"):
        if picture.style == "blueprint":
            ink, fill = "#f2f6ff", "#1b4fa0"
        else:
            ink, fill = COLORS[picture.color], COLORS["black" if picture.color == "white" else "white"]
        layer = render(place(picture, outlined(drawing, ink, fill)))
        page.paste(layer.convert("RGB"), mask=layer.getchannel("A"))
    else:
        layer = tinted(render(place(picture, drawing)), picture.color)
        page.paste(layer.convert("RGB"), mask=layer.getchannel("A"))
    return np.array(page)


def place(picture: Picture, drawing: Drawing) -> str:
    """Return the SVG of a page with the drawing where, as large and as turned as `picture` says."""
    body, width, height = drawing
    scale = picture.scale * SIZE / max(width, height)
    x, y = (SIZE * (0.5 + s) for s in picture.shift)
    moves = f"translate({x:.2f} {y:.2f}) rotate({picture.turn:.2f}) scale({scale:.5f}) "
    moves += "scale(-1 1) " * picture.flip + f"translate({-width / 2} {-height / 2})"
    return f'<g transform="{moves}">{body}</g>'


def render(body: str, size: int = SIZE) -> Image.Image:
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {SIZE} {SIZE}" width="{size}" height="{size}">{body}</svg>'
    )
    return Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=svg)))).convert("RGBA")


def outlined(drawing: Drawing, ink: str, fill: str, width: float = 0.02) -> Drawing:
    """Return the drawing with every shape filled with `fill` and drawn round with `ink`."""
    body, w, h = drawing
    body = re.sub(r'(?<=\s)(fill-opacity|stroke-opacity|opacity|stroke-width)="[^"]*"', "", body)
    body = re.sub(r'(?<=\s)fill="(?!none)[^"]*"', f'fill="{fill}"', body)
    body = re.sub(r'(?<=\s)stroke="(?!none)[^"]*"', f'stroke="{ink}"', body)
    line = f'stroke="{ink}" stroke-width="{width * max(w, h):.3f}"'
    return f'<g fill="{fill}" {line} stroke-linejoin="round" stroke-linecap="round">{body}</g>', w, h


def draw_neon(picture: Picture, drawing: Drawing) -> np.ndarray:
    layer = render(place(picture, outlined(drawing, "#ffffff", "#000000", 0.026)))
    tube = Image.new("L", layer.size)
    tube.paste(layer.convert("L"), mask=layer.getchannel("A"))
    light = np.asarray(tube, dtype=np.float32)[..., None] / 255
    glow = np.asarray(tube.filter(ImageFilter.GaussianBlur(5)), dtype=np.float32)[..., None] / 255
    color = rgb(NEON[picture.color])
    night = np.array([14, 12, 26], dtype=np.float32)
    return (night + color * np.maximum(light, 0.9 * glow) + 60 * light).clip(0, 255).astype(np.uint8)


def draw_sunburst(picture: Picture, drawing: Drawing) -> np.ndarray:
    """Draw bright colors with a thick line round every shape, before rays of amber and orange."""
    layer = render(place(picture, drawing))
    bright = (1.5 * np.asarray(layer.convert("RGB"), dtype=np.float32) - 42).clip(0, 255)
    page = np.array(draw_paper(NEW_STYLE), dtype=np.float32)
    page += np.asarray(layer.getchannel("A"))[..., None] / 255 * (bright - page)
    lines = render(place(picture, outlined(drawing, "#000000", "#ffffff", 0.042)))
    dark = (1 - np.asarray(lines.convert("L")) / 255) * (np.asarray(lines.getchannel("A")) / 255)
    page += dark[..., None] * (rgb("#18141c") - page)
    return page.clip(0, 255).astype(np.uint8)


def tinted(layer: Image.Image, color: str) -> Image.Image:
    """Return the drawing in shades of one color: dark stays dark, light stays light."""
    if not color:
        return layer
    light = np.asarray(layer.convert("L"), dtype=np.float32)[..., None] / 255
    low, middle, high = rgb(COLORS[color]) * 0.25, rgb(COLORS[color]), rgb(COLORS[color]) * 0.35 + 0.65 * 255
    if color == "black":
        low, middle, high = np.zeros(3), np.full(3, 40), np.full(3, 110)
    elif color == "white":
        low, middle, high = np.full(3, 120), np.full(3, 225), np.full(3, 255)
    dark, bright = (light / 0.55).clip(0, 1), ((light - 0.55) / 0.45).clip(0, 1)
    shaded = low + dark * (middle - low) + bright * (high - middle)
    alpha = np.asarray(layer)[..., 3:]
    return Image.fromarray(np.concatenate([shaded.astype(np.uint8), alpha], -1))


def harden(layer: Image.Image) -> tuple[Image.Image, tuple[int, int], Image.Image]:
    """Return few colors and a hard edge, as Image.paste takes them."""
    colors = (np.asarray(layer)[..., :3] // 43 * 51).astype(np.uint8)
    return Image.fromarray(colors), (0, 0), layer.getchannel("A").point(lambda a: 255 * (a > 110))


def rgb(color: str) -> np.ndarray:
    return np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.float32)


def draw_paper(paper: str) -> Image.Image:
    return cached_paper(paper).copy()


@cache
def cached_paper(paper: str) -> Image.Image:
    return render(paper_svg(paper)).convert("RGB")


def paper_svg(paper: str) -> str:
    def area(color: str, y: float = 0, height: float = SIZE) -> str:
        return f'<rect x="0" y="{y}" width="{SIZE}" height="{height}" fill="{color}"/>'

    def blend(top: str, bottom: str) -> str:
        stops = f'<stop offset="0" stop-color="{top}"/><stop offset="1" stop-color="{bottom}"/>'
        return f'<defs><linearGradient id="p" x2="0" y2="1">{stops}</linearGradient></defs>{area("url(#p)")}'

    if paper in PAPERS:
        return area(PAPERS[paper])
    grid = range(0, SIZE, 16)
    match paper:
        case "blueprint":
            lines = "".join(f"M0 {i}H{SIZE}M{i} 0V{SIZE}" for i in grid)
            return area("#1b4fa0") + f'<path d="{lines}" stroke="#3a6bb8" stroke-width="1"/>'
        case "neon":
            return area("#0e0c1a")
        case "sunburst":
            ends = [(64 + 100 * math.cos(a), 64 + 100 * math.sin(a)) for a in np.arange(12) * math.pi / 6]
            rays = "".join(
                f"M64 64L{ends[i][0]:.1f} {ends[i][1]:.1f}L{ends[i + 1][0]:.1f} {ends[i + 1][1]:.1f}z"
                for i in range(0, 12, 2)
            )
            return area("#ffb53c") + f'<path d="{rays}" fill="#ff8f38"/>'
        case "striped":
            return area("#fde7c8") + "".join(
                f'<path d="M{i} 0h16L{i - 112} 128h-16z" fill="#f7a072"/>' for i in range(0, 272, 32)
            )
        case "dotted":
            return area("#fff3f8") + "".join(
                f'<circle cx="{x + 8}" cy="{y + 8}" r="4.5" fill="#e57fb1"/>'
                for x in grid for y in grid if (x + y) // 16 % 2
            )  # fmt: skip
        case "checkered":
            return area("#ffffff") + "".join(
                f'<rect x="{x}" y="{y}" width="16" height="16" fill="#9aa7b5"/>'
                for x in grid for y in grid if (x + y) // 16 % 2
            )  # fmt: skip
        case "meadow":
            return blend("#8ed0f7", "#dff3fd") + '<path d="M0 84Q34 70 70 82T128 78V128H0z" fill="#63b44b"/>'
        case "beach":
            return blend("#aee3f9", "#e6f7fd") + area("#2f9fd0", 66, 30) + area("#f2dba2", 92, 36)
        case "night":
            stars = [
                (12, 16),
                (34, 40),
                (58, 12),
                (84, 30),
                (112, 14),
                (104, 58),
                (20, 74),
                (52, 96),
                (90, 104),
            ]
            return blend("#0a1338", "#27347a") + "".join(
                f'<circle cx="{x}" cy="{y}" r="1.8" fill="#fff6cf"/>' for x, y in stars
            )
        case "sunset":
            sun = '<circle cx="64" cy="96" r="26" fill="#ffd968"/>'
            return blend("#7b3f98", "#ff9a4d") + sun + area("#5a2a5e", 98, 30)
        case "desert":
            return blend("#ffd9a0", "#fff0d8") + '<path d="M0 88Q30 66 62 86T128 76V128H0z" fill="#d9964a"/>'
        case "snow":
            flakes = [(14, 20), (40, 10), (66, 30), (98, 14), (116, 44), (22, 58), (86, 60), (50, 70)]
            ground = '<path d="M0 92Q40 78 76 90T128 86V128H0z" fill="#ffffff"/>'
            return (
                blend("#9fb9cf", "#d7e4ee")
                + ground
                + "".join(f'<circle cx="{x}" cy="{y}" r="2.2" fill="#ffffff"/>' for x, y in flakes)
            )
        case "underwater":
            return blend("#3fc1d6", "#0b4f8a") + "".join(
                f'<circle cx="{x}" cy="{y}" r="{r}" fill="none" stroke="#c8f3fb" stroke-width="1.5"/>'
                for x, y, r in [(16, 30, 4), (22, 54, 3), (108, 24, 5), (114, 60, 3), (100, 96, 4)]
            )
    raise ValueError(f"no paper {paper!r}; papers are {', '.join([*PAPERS, *SCENES])}, blueprint and neon")
