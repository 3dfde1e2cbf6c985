"""A ComfyUI with Graft for the cases of a sweep, and a record of what each prompt does to it.

A prompt may end, be refused, or take its time until Cancel. Counted are: a queue that runs nothing
afterwards, a prompt that goes on after Cancel, an error that was not meant for people, an answer 500.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import textwrap
import time
import urllib.error
import urllib.request
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from graft.commands.headless.server import Server, make_folders, server

from .report import Problem

Prompt = dict[str, Any]

PATIENCE_SECONDS = 15.0
"""How long a prompt runs before Cancel is pressed."""
CANCEL_SECONDS = 2.0
"""How long it may run afterwards; other programs' share of the machine does not count."""
STUCK_SECONDS = 30.0
"""When no more is expected of it."""
ANSWER_SECONDS = 20.0
"""How long the server may take to answer."""

STOCK: Prompt = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}},
    "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
}
"""What any ComfyUI runs."""

WITNESS = '''
    """Writes down what this process opens for writing, moves or removes outside its folders."""
    import os, sys, threading
    INSIDE, OUTSIDE, NOTES = {inside!r}, {outside!r}, {notes!r}
    busy = threading.local()

    def note(event, arguments):
        if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink"):
            return
        if getattr(busy, "now", False):
            return
        busy.now = True
        try:
            writes, paths = True, arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]
            if event == "open":
                _, mode, flags = arguments
                writes = any(c in mode for c in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))
            for path in paths:
                if not isinstance(path, (str, bytes)):
                    continue
                where = os.path.realpath(os.fsdecode(path))
                inside = where.startswith((*INSIDE, "/dev/")) or "__pycache__" in where
                if where.startswith(OUTSIDE) or (writes and not inside):
                    with open(NOTES, "a", errors="backslashreplace") as file:
                        file.write(event + " " + where + "\\n")
        finally:
            busy.now = False

    sys.addaudithook(note)
    NODE_CLASS_MAPPINGS = {{}}
'''
"""A custom node. What is written without Python's knowing, as by safetensors, it does not see."""


@dataclass
class Outcome:
    """What came of a prompt."""

    ended: str
    """done, failed, refused (before it was queued), cancelled, or never."""
    message: str = ""
    problems: list[Problem] = field(default_factory=list)


class Stuck(Exception):
    """The server does not answer, or its process has ended."""


class Target:
    """A server, started when it is first needed and again when a case has left it unusable.

    `base` holds its folders. In `outside` lies what no prompt may reach.
    """

    def __init__(self, comfyui: Path, base: Path) -> None:
        self.comfyui, self.base = comfyui, base
        self.outside, self.scratch = base.parent / "outside", base / "scratch"
        self.notes = base.parent / "opened.txt"
        make_folders(base)
        for folder in (self.outside, self.scratch):
            folder.mkdir(exist_ok=True)
        self._stack = ExitStack()
        self._server: Server | None = None
        self._said = 0

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def server(self) -> Server:
        if self._server is None:
            with patch.dict(os.environ, TMPDIR=str(self.scratch)):
                self._server = self._stack.enter_context(server(self.comfyui, self.base, cpu=True))
            self.notes.write_text("")  # what ComfyUI opened while it started
        return self._server

    def stop(self) -> None:
        """End the server, at once: what it holds may never come to an end."""
        if self._server:
            self._server.kill()
        self._server = None
        self._stack.close()

    def add_node(self, name: str, code: str) -> None:
        """Give the server a custom node, before it is started."""
        folder = self.base / "custom_nodes" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(textwrap.dedent(code), encoding="utf-8")

    def watch(self) -> None:
        """Have the server write down what it does outside its folders; to be called before it is started."""
        inside = tuple(f"{self.base / name}{os.sep}" for name in ("output", "temp", "user", "scratch"))
        inside += (str(self.base / "comfyui.log"),)
        self.add_node(
            "witness", WITNESS.format(inside=inside, outside=str(self.outside), notes=str(self.notes))
        )

    def seen_outside(self) -> list[str]:
        """Return what the server did outside its folders since this was called last."""
        lines = self.notes.read_text(encoding="utf-8").splitlines()
        self.notes.write_text("")
        return lines

    # --- one prompt -----------------------------------------------------------------------------------------

    def attempt(self, graph: Prompt, extra: Any = None, *, patience: float = PATIENCE_SECONDS) -> Outcome:
        """Queue a prompt, press Cancel when `patience` is over, and see whether a stock prompt runs then."""
        self._said = self.server.log_file.stat().st_size
        outcome = self._attempt(graph, extra, patience)
        outcome.problems += [Problem("traceback", text) for text in raw_tracebacks(self.said())[:3]]
        if outcome.ended == "never":
            outcome.problems.append(Problem("dead queue" if self.is_dead() else "hang", outcome.message))
        elif not self.runs_stock():
            outcome.problems.append(Problem("dead queue", f"runs nothing after: {outcome.message}"))
        if any(problem.kind in ("dead queue", "hang") for problem in outcome.problems):
            self.stop()
        return outcome

    def _attempt(self, graph: Prompt, extra: Any, patience: float) -> Outcome:
        try:
            status, answer = self.ask("/prompt", {"prompt": graph, "extra_data": extra or {}})
            if status != 200:
                return _refused(status, answer)
            entry = self._wait(answer["prompt_id"], patience)
            if entry:
                return _ended(entry)
            seconds = self._cancel(answer["prompt_id"])
        except Stuck as error:
            return Outcome("never", str(error))
        if seconds is None:
            return Outcome("never", f"still running {STUCK_SECONDS:g} s after Cancel")
        late = [Problem("hang", f"ended {seconds:.1f} s after Cancel")] if seconds > CANCEL_SECONDS else []
        return Outcome("cancelled", problems=late)

    def said(self) -> str:
        """Return what the server has printed since the prompt was queued."""
        with self.server.log_file.open("rb") as file:
            file.seek(self._said)
            return file.read().decode("utf-8", "replace")

    def is_dead(self) -> bool:
        """Return whether the server's log tells of the end of the thread that runs prompts."""
        return "(prompt_worker)" in self.said()

    def runs_stock(self) -> bool:
        """Return whether a prompt of stock nodes runs."""
        try:
            status, answer = self.ask("/prompt", {"prompt": STOCK})
            return status == 200 and self._wait(answer["prompt_id"], STUCK_SECONDS) is not None
        except Stuck:
            return False

    def _wait(self, prompt_id: str, seconds: float) -> dict[str, Any] | None:
        """Return the history of a prompt once it has ended; None if it has not in so many seconds."""
        until, pause = time.monotonic() + seconds, 0.01
        while True:
            _, histories = self.ask(f"/history/{prompt_id}")
            if histories.get(prompt_id) or time.monotonic() > until:
                return histories.get(prompt_id)
            if self.is_dead():
                raise Stuck("the thread that runs prompts has ended")
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def _cancel(self, prompt_id: str) -> float | None:
        """Press Cancel and return how long the prompt went on: seconds of the clock, or of the processor
        where that had other work too. None: it did not end.
        """
        process = psutil.Process(self.server.process.pid)
        began, worked = time.monotonic(), sum(process.cpu_times()[:2])
        self.ask("/interrupt", {})
        if self._wait(prompt_id, STUCK_SECONDS) is None:
            return None
        return min(time.monotonic() - began, sum(process.cpu_times()[:2]) - worked)

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Return (status, JSON) of a GET, or a POST with a body. Raises Stuck where there is no answer."""
        if isinstance(body, dict) and "prompt" in body:
            body = {"prompt_id": str(uuid.uuid4()), **body}
        request = urllib.request.Request(
            f"http://{self.server.address}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with _opener.open(request, timeout=ANSWER_SECONDS) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        except OSError as error:
            with suppress(Exception):
                self.server.process.wait(1.0)
            if (code := self.server.process.returncode) is not None:
                raise Stuck(f"the process has ended with {code}") from None
            raise Stuck(f"no answer to {path} in {ANSWER_SECONDS:g} s ({error})") from None
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content.decode(errors="replace")


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _ended(entry: dict[str, Any]) -> Outcome:
    for kind, data in entry["status"]["messages"]:
        if kind == "execution_error":
            return Outcome("failed", data["exception_message"].strip())
        if kind == "execution_interrupted":
            return Outcome("cancelled")
    return Outcome("done")


def _refused(status: int, answer: Any) -> Outcome:
    text = json.dumps(answer, ensure_ascii=False)
    problems = [Problem("answer 500", text[:300])] if status >= 500 else []
    for node in (answer.get("node_errors") or {}).values() if isinstance(answer, dict) else ():
        for error in node["errors"]:
            extra = error.get("extra_info") or {}
            if any(place in line for line in extra.get("traceback", ()) for place in OURS):
                line = f"{extra['exception_type']}: {error['details']}"
                problems += [Problem("traceback", line)] if not is_for_people(line) else []
    return Outcome("refused", text, problems)


# --- errors that were not meant for people ------------------------------------------------------------------

BLOCK = re.compile(
    r"Traceback \(most recent call last\):\n(?P<frames>(?:[ \t].*\n|\n)+)(?P<error>\S.*)"
    r"(?:\n(?!.*Traceback \().+)*"  # more lines of the message, or what was printed next
    r"(?P<chained>\n{2,}(?:During handling|The above exception))?"
)
MEANT = re.compile(r"graft\.\w+")
"""A UserError or one of its kinds, as ComfyUI's log has them. Other OSErrors are meant for people too, unless
they are the system's own."""
OF_THE_SYSTEM = re.compile(r"\[Errno \d+\]")
OURS = ("custom_nodes/graft/", f"{Path(__file__).resolve().parents[2]}{os.sep}")


def raw_tracebacks(log: str) -> list[str]:
    """Return the errors of a log that went through Graft and were not meant for people: their last lines."""
    errors = {}
    for block in BLOCK.finditer(log):
        ours = any(place in block["frames"] for place in OURS) or "(prompt_worker)" in block["frames"]
        first = block["error"].startswith(("Exception in thread", "Exception ignored"))  # of another
        if ours and not block["chained"] and not first and not is_for_people(block["error"]):
            errors[block["error"]] = None
    return list(errors)


def is_for_people(line: str) -> bool:
    """Return whether the last line of a traceback is an error that a person can do something about."""
    name, _, message = line.partition(":")
    kind = name.rpartition(".")[2]
    if kind in ("InterruptProcessingException", "KeyboardInterrupt"):
        return True
    error = getattr(builtins, kind, None)
    if isinstance(error, type) and issubclass(error, OSError):
        return not OF_THE_SYSTEM.search(message)
    return bool(MEANT.fullmatch(name)) and "codec can't encode" not in message
