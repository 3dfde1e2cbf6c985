"""A command's output in the terminal: lines, and a bar that follows the server's events."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

WIDTH = 30
QUIET_SECONDS = 10.0
"""Where the output is not a terminal (a log), a line this often."""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


class Bar:
    """Shows each node of a prompt at work; or, given `nodes`, how many of them are done.

    Used as the `on_event` of `Server.wait`, inside a `with` block.
    """

    def __init__(self, prompt: Mapping[str, dict[str, Any]], nodes: Collection[str] = ()) -> None:
        self.prompt, self.nodes = prompt, frozenset(nodes)
        self.done: set[str] = set()
        self.title = self.text = ""
        self.shown_at = 0.0
        self.width = 0
        self.live = sys.stdout.isatty()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_line()

    def __call__(self, kind: str, data: dict[str, Any]) -> None:
        if self.nodes:
            if kind == "executed" and data["node"] in self.nodes:
                self.done.add(data["node"])
                self._show(len(self.done) / len(self.nodes), f"{len(self.done)} of {len(self.nodes)}")
        elif kind == "executing" and data["node"] in self.prompt:
            self._end_line()
            node = self.prompt[data["node"]]
            self.title, self.text = node.get("_meta", {}).get("title", node["class_type"]), ""
        elif kind == "progress_text":
            self.text = data["text"].splitlines()[-1]
        elif kind == "progress" and data["max"] > 1:
            count = f"{data['value']} of {data['max']}"
            self._show(data["value"] / data["max"], f"{self.title}: {self.text or count}")

    def _show(self, share: float, text: str) -> None:
        now = time.monotonic()
        if not self.live and share < 1 and now - self.shown_at < QUIET_SECONDS:
            return
        self.shown_at = now
        full = round(share * WIDTH)
        line = f"[{'#' * full}{'-' * (WIDTH - full)}]  {text}"
        if self.live:
            line = line[: shutil.get_terminal_size().columns - 1]  # a longer one would wrap
            print("\r" + line.ljust(self.width), end="", flush=True)
            self.width = len(line)
        else:
            say(line)

    def _end_line(self) -> None:
        if self.live and self.width:
            print(flush=True)
        self.width = 0
