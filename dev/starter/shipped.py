"""What the starter ships, starter/clip_l.py and starter/judge.py, for scripts that stand alone."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "starter"))
import clip_l  # noqa: E402
import judge  # noqa: E402

__all__ = ["clip_l", "judge"]
