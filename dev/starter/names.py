"""The names that the starter model learns, as ids of the icon packages (hyphens for spaces).

Every name exists in all three packages. It is trained or held out, which depends on the name alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

# Signs that mean something only as text, hands and people that differ by an attribute, and near-copies.
EXCLUDED = re.compile(
    r"skin|flag|keycap|-hair|button|o-clock|thirty|wom[ae]n|^man-|^men-|-men|couple|family|kiss|person|regional|^u1f|"
    r"bald|beard|oclock|^japanese-|medium|dark$|arrow|zodiac|-mark$|banknote|book$|^input-|^no-|moon-face|quarter-moon|"
    r"gibbous|crescent-moon$|sign$|selector|pointing|fist|-hand$|^hand-|^raised|backhand|diamond$|symbol|^ballot|"
    r"with-yen|aquarius|aries|^cancer|capricorn|gemini|^leo$|libra|pisces|sagittarius|scorpio$|taurus|virgo|"
    r"ophiuchus|circled|dotted|curly|heavy-|^mens|restroom|closet|toggle|wireless|vibration|antenna-bars|plus|^minus|"
    r"multiply|divide|infinity|^om$|wheel-of|menorah|khanda|hamsa|latin-cross|orthodox|star-and|star-of|yin-yang|"
    r"peace|atom|biohazard|radioactive|fleur|trident|part-alternation|hundred|zzz|anger|globe-with|copyright|"
    r"registered|trade-mark|level-slider|control-knobs|passport|customs|baggage|left-luggage|information|currency|"
    r"-suit$|middle-finger|breast|pregnant|vomiting|cigarette|bikini|briefs|love-hotel|kaaba|non-potable|potable|"
    r"exclamation|question|large-square|small-square|head-shaking|^face-|squinting|-with-(steam|sweat|tear)|"
    r"closed|speaking-head|bust|eye-in|hair-pick|tear-off|with-meridians"
)
KEPT = {"red-heart", "face-with-medical-mask", "face-with-monocle", "face-with-tears-of-joy", "crescent-moon"}
ONE_WAY = {"pool-8-ball", "money-bag", "abc", "memo", "stop-sign", "bus-stop", "newspaper", "atm-sign"}

COMMON = set(
    """
ant bat bear honeybee blowfish butterfly cat cat-face cow cow-face crab crocodile deer dog dog-face dolphin
dragon dragon-face duck elephant fish flamingo fox frog giraffe hamster hatching-chick hedgehog horse
horse-face jellyfish kangaroo koala lady-beetle lion lobster monkey monkey-face mouse mouse-face octopus owl
panda parrot peacock penguin pig pig-face polar-bear rabbit rabbit-face rhinoceros rooster sauropod shark
ewe shrimp snail snake spider swan t-rex tiger tiger-face tropical-fish turtle unicorn spouting-whale whale
wolf zebra baby-chick bird eagle gorilla camel blossom cactus cherry-blossom deciduous-tree evergreen-tree
fallen-leaf four-leaf-clover maple-leaf mushroom palm-tree potted-plant rose seedling sunflower tulip
avocado bacon banana bell-pepper birthday-cake blueberries bread broccoli candy carrot cheese-wedge cherries
chocolate-bar cookie croissant cucumber cupcake doughnut ear-of-corn egg eggplant french-fries garlic
glass-of-milk grapes green-apple hamburger honey-pot hot-beverage hot-dog hot-pepper soft-ice-cream
ice-cream kiwi-fruit lemon lollipop meat-on-bone melon onion pancakes peach pear pie pineapple pizza popcorn
poultry-leg pretzel red-apple rice-ball sandwich shortcake spaghetti strawberry sushi taco teapot tomato
tropical-drink waffle watermelon wine-glass beer-mug cocktail-glass cup-with-straw axe backpack balloon
baseball basketball battery bed bell bomb books boxing-glove broom bucket camera candle chair christmas-tree
umbrella crown dagger desktop-computer door dress drum envelope fire-extinguisher flashlight floppy-disk
american-football game-die gear gem-stone glasses gloves guitar hammer headphone high-heeled-shoe
hourglass-done jack-o-lantern jeans joystick key kite ladder laptop light-bulb lipstick locked magnet
magnifying-glass-tilted-left maracas microphone mobile-phone money-bag necktie paintbrush pencil pool-8-ball
puzzle-piece red-paper-lantern ring running-shoe scissors screwdriver shield shopping-cart skateboard
soccer-ball socks sponge sunglasses syringe t-shirt teddy-bear telephone television tennis toilet toothbrush
top-hat trophy trumpet video-game violin volleyball watch wrapped-gift wrench yarn artist-palette
crystal-ball bullseye bowling airplane ambulance anchor automobile bicycle bus castle church cloud
cloud-with-rain crescent-moon fire droplet fire-engine flying-saucer globe-showing-europe-africa helicopter
high-voltage house motorcycle police-car rainbow ringed-planet rocket sailboat ship snowflake snowman star
sun sun-with-face taxi tent tractor volcano water-wave delivery-truck vertical-traffic-light ring-buoy train
mountain grinning-face smiling-face-with-sunglasses smiling-face-with-heart-eyes loudly-crying-face
angry-face sleeping-face nerd-face clown-face cowboy-hat-face ghost alien robot skull alien-monster
partying-face santa-claus tooth eye bone red-heart broken-heart
""".split()
)

WITH_FACE = set("cat cow dog dragon horse monkey mouse pig rabbit tiger".split())

SPOKEN = {  # what a person types for it; the package's own name stays a caption too
    "automobile": ["car"], "airplane": ["plane"], "doughnut": ["donut"], "soft-ice-cream": ["ice cream cone"],
    "deciduous-tree": ["tree"], "evergreen-tree": ["fir tree", "pine tree"],
    "hot-beverage": ["cup of coffee", "cup"], "red-apple": ["apple"], "honeybee": ["bee"],
    "lady-beetle": ["ladybug"], "ewe": ["sheep"], "t-rex": ["dinosaur"], "glass-of-milk": ["milk"],
    "beer-mug": ["beer"], "wine-glass": ["glass of wine", "wine"], "cheese-wedge": ["cheese"],
    "ear-of-corn": ["corn"], "game-die": ["die"], "gem-stone": ["diamond", "gem"],
    "headphone": ["headphones"], "high-heeled-shoe": ["high heel"], "hourglass-done": ["hourglass"],
    "jack-o-lantern": ["pumpkin"], "locked": ["padlock", "lock"],
    "magnifying-glass-tilted-left": ["magnifying glass"], "wrapped-gift": ["gift"],
    "running-shoe": ["shoe", "sneaker"], "red-heart": ["heart"], "delivery-truck": ["truck"],
    "droplet": ["drop of water"], "flying-saucer": ["ufo"], "globe-showing-europe-africa": ["globe", "earth"],
    "high-voltage": ["lightning"], "crescent-moon": ["moon"], "ringed-planet": ["planet"],
    "vertical-traffic-light": ["traffic light"], "water-wave": ["wave"], "video-game": ["gamepad"],
    "mobile-phone": ["phone"], "desktop-computer": ["computer"], "artist-palette": ["palette"],
    "baby-chick": ["chick"], "poultry-leg": ["chicken leg"], "light-bulb": ["lamp"], "hot-pepper": ["chili"],
    "american-football": ["football"], "tennis": ["tennis ball"], "spouting-whale": ["whale"],
    "sauropod": ["long necked dinosaur"], "red-paper-lantern": ["lantern"],
    "grinning-face": ["smiley", "happy face"], "loudly-crying-face": ["crying face"], "bullseye": ["target"],
    "potted-plant": ["plant"], "cup-with-straw": ["soda"], "sun-with-face": ["smiling sun"],
    "ring-buoy": ["lifebuoy"], "seedling": ["sprout"], "poodle": ["dog"], "sport-utility-vehicle": ["car"],
    "locomotive": ["train"], "kick-scooter": ["scooter"],
}  # fmt: skip


def usable(ids: Iterable[str]) -> list[str]:
    return sorted(name for name in ids if name in KEPT or not EXCLUDED.search(name))


def held_out(name: str) -> bool:
    """Return whether `name` is never trained: one in ten, no common ones."""
    return name not in COMMON and zlib.crc32(name.encode()) % 10 == 0


def spoken(name: str) -> list[str]:
    """Return the captions for `name`, its own first."""
    plain = name.replace("-", " ")
    animal = [plain.removesuffix(" face")] if name.removesuffix("-face") in WITH_FACE else []
    return [plain, *SPOKEN.get(name, []), *animal]
