"""The pictures of the demo: named emoji drawn from SVG, in two drawing styles.

Noto Emoji (Apache-2.0) is for the base model, Fluent Emoji Flat (MIT) the style a LoRA learns. Both come from
npm (@iconify-json/noto, @iconify-json/fluent-emoji-flat), one JSON file of SVG bodies each. An icon's id is
its caption with hyphens for spaces. A name is in at most one of LORA_SET, LORA_HELD_OUT and BASE_HELD_OUT.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

SIZE = 128
NOTO, FLUENT = "@iconify-json/noto@1.2.9", "@iconify-json/fluent-emoji-flat@1.2.6"


def caption(name: str) -> str:
    return name.replace("-", " ")


def fetch_package(package: str, folder: Path) -> Path:
    """Return the unpacked npm `package` ("@scope/name@version") in `folder`, downloaded if not there."""
    target = folder / package.strip("@").replace("/", "-").replace("@", "-")
    if not (target / "package" / "icons.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        result = subprocess.run(
            ["npm", "pack", package, "--silent"], cwd=target, check=True, capture_output=True, text=True
        )
        with tarfile.open(target / result.stdout.split()[-1]) as archive:
            archive.extractall(target, filter="data")
    return target / "package"


def read_svgs(package: Path, names: list[str]) -> dict[str, str]:
    """Return the complete SVG text of each icon. Raises KeyError for a name the package has not."""
    data = json.loads((package / "icons.json").read_text(encoding="utf-8"))
    svgs = {}
    for name in names:
        icon = data["icons"][name]
        width, height = icon.get("width", data.get("width", 16)), icon.get("height", data.get("height", 16))
        svgs[name] = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {width} {height}">{icon["body"]}</svg>'
        )
    return svgs


def render(svg: str) -> Tensor:
    """Draw `svg` on white: (3, 128, 128) uint8."""
    import resvg_py

    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIZE, height=SIZE))
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    page = Image.new("RGBA", (SIZE, SIZE), "white")
    page.alpha_composite(image, ((SIZE - image.width) // 2, (SIZE - image.height) // 2))
    return torch.from_numpy(np.array(page.convert("RGB"))).permute(2, 0, 1).contiguous()


def pose(svg: str, rng: np.random.Generator | None, *, flip: bool) -> str:
    """Return the same drawing, mirrored if `flip`, and with `rng` a little smaller, turned and moved."""
    head, body = svg.removesuffix("</svg>").split(">", 1)
    width, height = (float(v) for v in head.rpartition('viewBox="0 0 ')[2].rstrip('"').split())
    moves = ""
    if rng is not None:
        scale = rng.uniform(0.78, 0.98)
        dx, dy = rng.uniform(-0.5, 0.5, 2) * (1 - scale)
        moves += (
            f"translate({width * (0.5 + dx):.3f} {height * (0.5 + dy):.3f}) rotate({rng.uniform(-8, 8):.2f}) "
            f"scale({scale:.4f}) translate({-width / 2} {-height / 2}) "
        )
    if flip:
        moves += f"translate({width} 0) scale(-1 1)"
    return f'{head}><g transform="{moves}">{body}</g></svg>'


def write_captioned(svgs: dict[str, str], folder: Path) -> None:
    """Write name.png and name.txt for each icon, the form Load Dataset reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in svgs.items():
        Image.fromarray(render(svg).permute(1, 2, 0).numpy()).save(folder / f"{name}.png", optimize=True)
        (folder / f"{name}.txt").write_text(caption(name) + "\n", encoding="utf-8")


# --- which icons ------------------------------------------------------------------------------------------
# Chosen by eye: everyday things that look unlike one another at 128 px and exist in both styles. No flags, no
# skin tones, no clocks, no letters, no buttons.

BASE_SET = """
ant bat bear honeybee blowfish butterfly camel cat-face cow-face crab crocodile deer dog-face dolphin
dragon-face duck elephant fish flamingo fox frog giraffe hamster hatching-chick hedgehog horse-face jellyfish
kangaroo koala lady-beetle lion lobster monkey-face mouse-face octopus owl panda parrot peacock penguin
pig-face polar-bear rabbit-face rhinoceros rooster sauropod shark ewe shrimp snail snake spider swan t-rex
tiger-face tropical-fish turtle unicorn spouting-whale wolf zebra baby-chick blossom cactus cherry-blossom
deciduous-tree evergreen-tree fallen-leaf four-leaf-clover maple-leaf mushroom palm-tree potted-plant rose
seedling sunflower tulip avocado bacon banana bell-pepper birthday-cake blueberries bread broccoli bubble-tea
candy carrot cheese-wedge cherries chocolate-bar cookie croissant cucumber cupcake doughnut ear-of-corn egg
eggplant french-fries fried-shrimp garlic glass-of-milk grapes green-apple hamburger honey-pot hot-beverage
hot-dog hot-pepper soft-ice-cream kiwi-fruit lemon lollipop meat-on-bone melon onion pancakes peach pear pie
pineapple pizza popcorn poultry-leg pretzel red-apple rice-ball sandwich shortcake spaghetti strawberry sushi
taco teapot tomato tropical-drink waffle watermelon wine-glass beer-mug cocktail-glass cup-with-straw axe
backpack balloon baseball basketball battery bed bell bomb boxing-glove broom bucket camera candle chair
christmas-tree umbrella crown dagger desktop-computer door dress drum envelope fire-extinguisher flashlight
floppy-disk american-football game-die gear gem-stone glasses gloves guitar hammer headphone high-heeled-shoe
hourglass-done jack-o-lantern jeans joystick key kite ladder laptop light-bulb lipstick locked magnet
magnifying-glass-tilted-left maracas microphone mobile-phone money-bag necktie nesting-dolls paintbrush pencil
pool-8-ball puzzle-piece red-paper-lantern ring running-shoe scissors screwdriver shield shopping-cart
skateboard soccer-ball socks sponge sunglasses syringe t-shirt teddy-bear telephone television tennis toilet
toothbrush top-hat trophy trumpet video-game violin volleyball watch wrapped-gift wrench yarn artist-palette
crystal-ball bullseye bowling airplane ambulance anchor automobile bicycle bus castle church cloud
cloud-with-rain crescent-moon fire droplet fire-engine flying-saucer globe-showing-europe-africa helicopter
high-voltage house motorcycle police-car rainbow ringed-planet rocket sailboat ship snowflake snowman star
stop-sign sun-with-face taxi tent tractor volcano water-wave delivery-truck vertical-traffic-light ring-buoy
grinning-face smiling-face-with-sunglasses smiling-face-with-heart-eyes loudly-crying-face angry-face
sleeping-face nerd-face clown-face cowboy-hat-face ghost alien robot skull pile-of-poo alien-monster cold-face
partying-face santa-claus tooth eye bone red-heart broken-heart collision
""".split()

ONE_WAY = {"pool-8-ball", "money-bag"}  # a sign on them reads wrong when mirrored

LORA_SET = """
bear crab dog-face elephant fox lion octopus penguin tropical-fish broccoli carrot doughnut hamburger
red-apple strawberry soft-ice-cream sunflower mushroom palm-tree airplane bus house rocket sailboat guitar
umbrella robot smiling-face-with-sunglasses
""".split()

LORA_HELD_OUT = """
cat-face cow-face frog koala monkey-face owl panda rabbit-face spouting-whale avocado cherries eggplant lemon
pizza watermelon cupcake tulip cactus deciduous-tree automobile castle helicopter ghost balloon
""".split()

BASE_HELD_OUT = """
cat dog cow horse monkey mouse pig rabbit tiger dragon whale blue-heart oncoming-bus oncoming-police-car
house-with-garden grinning-cat clinking-beer-mugs snowman-without-snow cloud-with-snow winking-face racing-car
green-salad glowing-star oncoming-taxi
""".split()

# only the autoencoder sees these, to meet more shapes and colors
AUTOENCODER_EXTRA = """
badger beaver dove eagle bird goat raccoon hippopotamus sloth seal turkey lizard squid bouquet hibiscus
feather burrito butter custard fortune-cookie chestnut coconut olive leafy-green peanuts potato tangerine
mango accordion banjo bathtub briefcase coffin wood fuel-pump locomotive luggage microscope plunger postbox
purse red-envelope roll-of-paper saxophone scarf toolbox wastebasket desert-island ferris-wheel mountain
racing-car goblin ogre brain nauseated-face scorpion radio gorilla
""".split()
