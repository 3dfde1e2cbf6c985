"""Files that cannot be used, each named with its reason."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ..user_error import UserError


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why."""

    name: str
    reason: str


def bad_files_error(bad: Sequence[Skipped], what: str, others: int) -> UserError:
    """Return the error that names every unusable file with its reason, beside so many `others`."""
    shown = grouped(bad)
    if len(shown) > 100:
        shown[100:] = [f"  ... and {len(shown) - 100} more"]
    advice = (
        "Repair or remove them, leave them out by 'Show and add images', or train a folder without them by "
        "'skip bad images' in Load Dataset."
    )
    advice = advice if others else "There are no other images; repair or replace these."
    lines = [f"{what}: {len(bad)} file(s) cannot be used.", *shown]
    if any(not item.reason.startswith(NO_CAPTION) for item in bad):  # whose reason says what to do
        lines.append(advice)
    return UserError("\n".join(lines))


NO_CAPTION = "no caption"
"""How the reason of an image without a caption begins."""
NAMED = 20
"""Most files that are named where several have the same reason."""


def grouped(bad: Sequence[Skipped]) -> list[str]:
    """Return a line for each file, or for several with the same reason, but for their own names in it."""
    groups: dict[str, list[Skipped]] = defaultdict(list)
    for item in bad:
        own = rf"(?<!\S){re.escape(PurePosixPath(item.name).stem)}\.(?=\w)"
        groups[re.sub(own, "<name>.", item.reason)].append(item)
    lines = []
    for reason, items in groups.items():
        if len(items) == 1:
            lines.append(f"  {items[0].name}: {items[0].reason}")
        else:
            names = ", ".join(item.name for item in items[:NAMED])
            more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
            lines.append(f"  {len(items)} files: {reason}: {names}{more}")
    return lines
