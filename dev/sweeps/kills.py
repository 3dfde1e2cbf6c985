"""Kills of a server while it encodes, trains, saves or draws; then it starts again with the same graph.

Counted as wrong: any difference from an undisturbed server (LoRAs, the log's losses, checkpoints
and images, bit for bit), files with temporary names, processes and scratch files that outlive the server.
A case is a chain of kills of one run, at moments that are drawn from what the undisturbed one did to files.
"""

from __future__ import annotations

import csv
import json
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from graft.training.files.whole_file import TEMPORARY

from .files import prepare
from .graphs import BASE, DATASET, ENCODE, LORA, SAVE, TRAIN, Prompt, node, part, write_pictures
from .report import Case, Problem
from .target import Stuck, Target

KILLS = 25
CHAIN = 3
"""Kills of one run, and of the last chain what is left."""
STEPS = 40
PROMPTS = "red\nblue\na square\na circle\na tree\nnothing"
PATIENCE_SECONDS = 600.0
ENDING_SECONDS = 60.0
"""How long a server that is asked to end may save, and processes without their server may live."""

MOMENTS: Mapping[str, tuple[str, str]] = {
    "encode": ("open", r"/output/graft/cache/"),
    "early": ("os.rename", r"/checkpoints/step-0000000[123]/state\.json$"),
    "train": ("os.rename", r"/checkpoints/step-\d+/state\.json$"),
    "checkpoint": ("open", r"/checkpoints/"),
    "sample": ("os.rename", r"/samples/step-\d+-\d+\.png$"),
    "save": ("os.rename", r"/output/loras/"),
    "gpus=2": ("open", r"/log\.jsonl$"),
}
"""Moment -> what Python tells of what happens to which file."""
LATER = ("early", "train", "gpus=2")
"""Moments that lie between what happens to files: the kill comes a little later."""
WEIGHTS = {"sample": 6, "early": 4, "train": 4, "checkpoint": 4, "encode": 3, "save": 3, "gpus=2": 1}
"""How often each is drawn: where most was lost before, most is tried."""
SIGNALS = ("SIGKILL",) * 8 + ("SIGTERM", "SIGINT")

KILLER = '''
    """Counts what this process does to files, and kills it at the moment that a file asks for."""
    import json, os, re, signal, threading
    MOMENTS, PLAN, COUNTS = {moments!r}, {plan!r}, {counts!r}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = json.load(open(PLAN)) if os.path.exists(PLAN) else {{}}
    counts, busy = dict.fromkeys(MOMENTS, 0), threading.local()

    def end():
        os.remove(PLAN)
        os.kill(os.getpid(), getattr(signal, plan["signal"]))

    def watch(event, arguments):
        if event not in ("open", "os.rename") or getattr(busy, "now", False):
            return
        path = arguments[1 if event == "os.rename" else 0]
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        path = os.fsdecode(path)
        for moment, (kind, pattern) in MOMENTS.items():
            if kind == event and re.search(pattern, path):
                counts[moment] += 1
                if plan.get("moment") == moment and plan["number"] == counts[moment]:
                    threading.Timer(plan["after"], end).start() if plan["after"] else end()
                if not plan:
                    busy.now = True
                    with open(COUNTS, "w") as file:
                        json.dump(counts, file)
                    busy.now = False

    import sys
    sys.addaudithook(watch)
    NODE_CLASS_MAPPINGS = {{}}
'''
"""A custom node."""


@dataclass(frozen=True)
class Kill:
    """When a server is killed, and how."""

    moment: str
    share: float
    """Which of the moments of its kind, from 0 (the first) to 1 (the last) of this kill's part of the run."""
    after: float
    """Seconds later."""
    signal: str

    def __str__(self) -> str:
        asked = "" if self.signal == "SIGKILL" else f" {self.signal}"
        return f"{self.moment} {self.share:.2f}{asked}"


@contextmanager
def cases(place: Path, comfyui: Path, seed: int) -> Iterator[list[Case]]:
    """Give chains of KILLS kills in all."""
    with Killing(comfyui, place) as killing:
        listed = []
        for index, chain in enumerate(chains(random.Random(seed))):
            name = f"chain {index}: {', '.join(map(str, chain))}"
            listed.append(Case("kills", name, partial(killing.attempt, chain)))
        yield listed
        print(
            "what became of the kills:", ", ".join(f"{count} {what}" for what, count in killing.came.items())
        )


def chains(draw: random.Random) -> list[list[Kill]]:
    """Draw KILLS kills and return them in chains; those of one run come in the order of its phases."""
    moments = draw.sample([m for m, weight in WEIGHTS.items() for _ in range(weight)], k=KILLS)
    several = [moment for moment in moments if moment == "gpus=2"]
    alone = [moment for moment in moments if moment != "gpus=2"]
    groups = [alone[at : at + CHAIN] for at in range(0, len(alone), CHAIN)] + [[m] for m in several]
    return [[one_kill(moment, draw) for moment in sorted(group, key=list(MOMENTS).index)] for group in groups]


def one_kill(moment: str, draw: random.Random) -> Kill:
    after = draw.uniform(0.01, 0.3) if moment in LATER else 0.0
    share = draw.uniform(0, 0.5 if moment == "gpus=2" else 1)  # of several, how often depends on the machine
    return Kill(moment, share, after, draw.choice(SIGNALS))


def graph(gpus: int) -> Prompt:
    """Return a run with checkpoints at each step, samples at every tenth, and a LoRA in the end."""
    prompt = part(BASE, DATASET, ENCODE, LORA, TRAIN, SAVE)
    prompt[TRAIN]["inputs"] |= {"steps": STEPS, "gpus": gpus}
    prompt[TRAIN]["inputs"] |= {"checkpoint_settings": ["91", 0], "sample_prompts": ["92", 0]}
    prompt["91"] = node(
        "GraftCheckpointSettings", minutes=0.0, steps=10, keep=3, tensorboard=False, lora=True
    )
    prompt["92"] = node(
        "GraftSamplePrompts", clip=[BASE, 1], vae=[BASE, 2], prompts=PROMPTS,
        negative="", every=10, before_training=True, width=64, height=64, steps=2, cfg=1.0, sampler="euler",
        scheduler="simple", seed=0, walk_seed=False, guidance=-1.0,
    )  # fmt: skip
    return prompt


class Killing:
    """A server that is killed, and what an undisturbed one gave."""

    def __init__(self, comfyui: Path, place: Path) -> None:
        self.target = Target(comfyui, place / "base")
        self.plan, self.counts = place / "kill.json", place / "counts.json"
        code = KILLER.format(moments=dict(MOMENTS), plan=str(self.plan), counts=str(self.counts))
        self.target.add_node("killer", code)
        write_pictures(self.target.base / "input" / "tiny")
        self.came: Counter[str] = Counter()
        self._undisturbed: dict[int, tuple[dict[str, Any], dict[str, int]]] = {}

    def __enter__(self) -> Killing:
        return self

    def __exit__(self, *error: object) -> None:
        self.target.stop()

    @property
    def output(self) -> Path:
        return self.target.base / "output"

    def undisturbed(self, gpus: int) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the results of an undisturbed run, and how often each moment comes in it."""
        if gpus not in self._undisturbed:
            prepare(self.target)  # the tiny base's text encoder, which is made once
            shutil.rmtree(self.output)
            if problems := self.complete(gpus):
                raise RuntimeError(f"an undisturbed run goes wrong: {problems}")
            counts = json.loads(self.counts.read_text())
            self._undisturbed[gpus] = results(self.output), counts
        return self._undisturbed[gpus]

    def complete(self, gpus: int) -> list[Problem]:
        """Run the graph in a new server, and return what went wrong."""
        self.plan.unlink(missing_ok=True)
        self.target.stop()
        outcome = self.target.attempt(graph(gpus), patience=PATIENCE_SECONDS)
        if outcome.ended != "done":
            outcome.problems.append(Problem("wrong", f"{outcome.ended}: {outcome.message[:300]}"))
        return outcome.problems

    def attempt(self, chain: Sequence[Kill]) -> list[Problem]:
        """Kill a run again and again, complete it, and return what is not as it should be."""
        gpus = 2 if chain[0].moment == "gpus=2" else 1
        expected, counts = self.undisturbed(gpus)
        shutil.rmtree(self.output, ignore_errors=True)
        problems = []
        for kill in chain:
            occurrence = 1 + int(kill.share * (counts[kill.moment] - 1) / len(chain))
            problems += self.kill(kill, occurrence, gpus)
        problems += self.complete(gpus)
        problems += [
            Problem("wrong", difference) for difference in differences(expected, results(self.output))
        ]
        problems += [Problem("wrong", f"left over: {path}") for path in leftovers(self.target.base)]
        return problems

    def kill(self, kill: Kill, occurrence: int, gpus: int) -> list[Problem]:
        """Start a server that kills itself at a moment, queue the graph, and return what outlived it."""
        plan = {"moment": kill.moment, "number": occurrence, "after": kill.after, "signal": kill.signal}
        self.plan.write_text(json.dumps(plan))
        self.target.stop()
        process = self.target.server.process
        with suppress(Stuck):
            _, answer = self.target.ask("/prompt", {"prompt": graph(gpus)})
            while process.poll() is None and not self.target.ask(f"/history/{answer['prompt_id']}")[1]:
                time.sleep(0.1)
        came = not self.plan.exists()
        self.came["came in time" if came else "would have come after the end"] += 1
        try:
            process.wait(ENDING_SECONDS if came else 0)
        except subprocess.TimeoutExpired:
            if came:
                return [Problem("hang", f"{kill}: not ended {ENDING_SECONDS:g} s after {kill.signal}")]
        finally:
            self.target.stop()
        return [Problem("wrong", f"{kill}: outlives the server: {command}") for command in self.orphans()]

    def orphans(self) -> list[str]:
        """Return the command lines of processes that belong to the server and do not end; end them."""
        until, processes = time.monotonic() + ENDING_SECONDS, self.processes()
        while processes and time.monotonic() < until:
            time.sleep(0.5)
            processes = self.processes()
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        return [f"{process.pid} {process.name()}" for process in processes]

    def processes(self) -> list[psutil.Process]:
        """Return the processes that have the server's scratch folder or its base in their command lines."""
        matching = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(str(self.target.base) in word for word in process.cmdline()):
                    matching.append(process)
        return matching


def results(output: Path) -> dict[str, Any]:
    """Return what is under an output folder, without what differs from one time to the next."""
    contents: dict[str, Any] = {}
    for path in sorted(path for path in output.rglob("*") if path.is_file()):
        name = path.relative_to(output).as_posix()
        if path.suffix == ".safetensors" and "cache" not in path.parts:
            contents[name] = digest_of_tensors(path)
        elif path.suffix == ".png":
            with Image.open(path) as image:
                contents[name] = sha256(image.tobytes()).hexdigest()
        elif path.name == "log.csv":
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            contents[name] = [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in rows]
        elif path.name == "state.json":
            contents[name] = json.loads(path.read_text(encoding="utf-8"))["digest"]
    return contents


def digest_of_tensors(path: Path) -> str:
    """Return a digest of a file without its metadata, which say when it was made."""
    content = path.read_bytes()
    body = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:body])
    header.pop("__metadata__", None)
    return sha256(json.dumps(header, sort_keys=True).encode() + content[body:]).hexdigest()


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Return a line for each file that is missing, new or another."""
    lines = [f"missing: {name}" for name in expected if name not in actual]
    lines += [f"not in the undisturbed run: {name}" for name in actual if name not in expected]
    return lines + [
        f"differs: {name}" for name in expected if name in actual and actual[name] != expected[name]
    ]


def leftovers(base: Path) -> list[str]:
    """Return what lies under a temporary name, or in the scratch folder."""
    scratch = [path for path in (base / "scratch").glob("*") if path.name.startswith("graft-")]
    leftovers = [*(base / "output").rglob(f"{TEMPORARY}*"), *(base / "models").rglob("*.part"), *scratch]
    return [path.relative_to(base).as_posix() for path in leftovers]
