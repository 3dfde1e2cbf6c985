"""The demo's character in SVG: a round purple creature with one eye, a yellow belly and a curled antenna.

The base never saw it. A LoRA learns it from a dozen pictures, with NAME as its trigger.
"""

from __future__ import annotations

from dataclasses import dataclass

NAME = "mibo"
BODY, LIMBS, BELLY, INK, FEET, TONGUE = "#9a4fd3", "#6d2aa8", "#ffd94d", "#22223a", "#ff8a1e", "#ff7f9f"
SIZE = 128

Point = tuple[float, float]


@dataclass(frozen=True)
class Pose:
    """Where the hands and feet are, on a page of 128, and how the body stands."""

    hands: tuple[Point, Point] = ((20, 84), (108, 84))
    feet: tuple[Point, Point] = ((48, 116), (80, 116))
    eye: str = "open"  # or "happy", "closed"
    look: Point = (0, 0)  # of the pupil
    mouth: str = "smile"  # or "open", "small"
    lean: float = 0  # degrees
    lift: float = 0
    height: float = 1  # of the body, which keeps its area


POSES = {
    "standing": Pose(),
    "waving": Pose(hands=((20, 84), (116, 40)), mouth="open"),
    "jumping": Pose(
        hands=((12, 44), (116, 44)), feet=((44, 112), (84, 112)), lift=10, mouth="open", eye="happy"
    ),
    "sleeping": Pose(hands=((24, 100), (104, 100)), eye="closed", mouth="small", height=0.84),
    "running": Pose(hands=((14, 66), (114, 92)), feet=((34, 112), (94, 118)), lean=10, look=(6, 0)),
    "looking up": Pose(look=(0, -8), mouth="small"),
    "pointing": Pose(hands=((20, 84), (122, 70)), look=(8, 0)),
    "cheering": Pose(hands=((16, 32), (112, 32)), mouth="open", eye="happy"),
    "sitting": Pose(hands=((26, 98), (102, 98)), feet=((36, 114), (92, 114)), height=0.9),
    "leaning": Pose(hands=((8, 84), (108, 84)), lean=-14, look=(-7, 2)),
}

LINE = 'fill="none" stroke-linecap="round"'
EYES = {
    "happy": f'<path d="M46 54Q64 32 82 54" {LINE} stroke="{INK}" stroke-width="6"/>',
    "closed": f'<path d="M46 50Q64 64 82 50" {LINE} stroke="{INK}" stroke-width="6"/>',
}
MOUTHS = {
    "smile": f'<path d="M54 75Q64 84 74 75" {LINE} stroke="{INK}" stroke-width="4"/>',
    "open": f'<path d="M52 73H76Q75 87 64 87Q53 87 52 73z" fill="{INK}"/>'
    f'<path d="M58 84Q64 79 70 84Q67 87 64 87Q61 87 58 84z" fill="{TONGUE}"/>',
    "small": f'<circle cx="64" cy="77" r="4" fill="{INK}"/>',
}
HEAD_AND_BODY = (
    f'<path d="M64 26C62 14 68 6 78 8" {LINE} stroke="{LIMBS}" stroke-width="5"/>'
    f'<circle cx="80" cy="9" r="7" fill="{FEET}"/>'
    f'<path d="M30 46L20 22L48 32z" fill="{LIMBS}"/><path d="M98 46L108 22L80 32z" fill="{LIMBS}"/>'
    f'<path d="M64 24C96 24 106 52 106 76C106 102 88 112 64 112C40 112 22 102 22 76C22 52 32 24 64 24z" '
    f'fill="{BODY}"/><ellipse cx="64" cy="90" rx="25" ry="19" fill="{BELLY}"/>'
)


def drawings() -> dict[str, tuple[str, float, float]]:
    """Return {NAME-pose: (SVG body, width, height)}, as pictures.draw takes them."""
    return {f"{NAME}-{pose.replace(' ', '-')}": (draw_mascot(p), SIZE, SIZE) for pose, p in POSES.items()}


def draw_mascot(pose: Pose) -> str:
    feet = "".join(f'<ellipse cx="{x}" cy="{y}" rx="13" ry="7" fill="{FEET}"/>' for x, y in pose.feet)
    arms = "".join(draw_arm(x, hand) for x, hand in zip((30, 98), pose.hands))
    eye = EYES.get(pose.eye) or draw_eye(*pose.look)
    moves = f"translate(0 {-pose.lift}) rotate({pose.lean} 64 100) translate(64 112) "
    moves += f"scale({2 - pose.height} {pose.height}) translate(-64 -112)"
    return f'{feet}<g transform="{moves}">{HEAD_AND_BODY}{eye}{MOUTHS[pose.mouth]}{arms}</g>'


def draw_eye(x: float, y: float) -> str:
    return (
        '<circle cx="64" cy="50" r="19" fill="#ffffff"/>'
        f'<circle cx="{64 + x}" cy="{50 + y}" r="10" fill="{INK}"/>'
        f'<circle cx="{67 + x}" cy="{46 + y}" r="3.4" fill="#ffffff"/>'
    )


def draw_arm(shoulder: float, hand: Point) -> str:
    x, y = hand
    bend = (shoulder + x) / 2 + (4 if x > 64 else -4), (74 + y) / 2 + 6
    return (
        f'<path d="M{shoulder} 74Q{bend[0]} {bend[1]} {x} {y}" {LINE} stroke="{LIMBS}" stroke-width="10"/>'
        f'<circle cx="{x}" cy="{y}" r="7" fill="{LIMBS}"/>'
    )
