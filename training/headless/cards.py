"""Which of the machine's graphics cards a process computes on."""

from __future__ import annotations

import os

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""NVIDIA's variable and AMD's, which goes first where both are set."""


def choose_card(number: int) -> None:
    """Let this process, and those that it starts, see one graphics card: `number`, counted from 0, of those
    that it was given.

    Raises ValueError when there are fewer. To be called before anything touches the cards.
    """
    given = next((os.environ[name] for name in VISIBLE if name in os.environ), None)
    cards = [card for card in given.split(",") if card] if given is not None else None
    if cards == []:
        return  # they are all hidden
    if cards and number >= len(cards):
        raise ValueError(
            f"graphics card {number + 1} is asked for, but {len(cards)} can be seen (CUDA_VISIBLE_DEVICES, "
            "or ComfyUI's --cuda-device): choose a card among these (cuda:0 is the first), or start fewer "
            "processes."
        )
    for name in VISIBLE:
        os.environ[name] = cards[number] if cards else str(number)
