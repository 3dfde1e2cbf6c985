"""Random prompts: any node of Graft with the inputs it needs, most of them with one invalid value.

Values are valid, at the ends of what a widget allows, or hostile: of another type, huge, NaN, half of a
letter, a path that leads out, an entry that a menu has not. Counted as wrong: a file made, moved or opened
outside output/ and temp/.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .bad_jobs import job
from .files import prepare
from .graphs import TEXT_ENCODER, Prompt, node, write_pictures
from .report import Case, Problem
from .target import Target

PROMPTS = 3600
TRAINED = 0.2
"""Share of the prompts that train, a step or two."""
PATIENCE_SECONDS = 5.0

Schemas = Mapping[str, Any]
"""What /object_info says: class of a node -> its inputs and outputs."""

TAME: Mapping[str, Sequence[Any]] = {
    "model": ("graft_tiny_sd3.safetensors",), "checkpoint": ("graft_tiny_sd3.safetensors",),
    "original": ("graft_tiny_sd3.safetensors",), "tuned": ("graft_tiny_sd3.safetensors",),
    "text_encoder_1": (TEXT_ENCODER,), "text_encoder_2": ("from checkpoint",),
    "text_encoder_3": ("from checkpoint",), "vae": ("from checkpoint",), "folder": ("tiny",),
    "file": ("job.yaml",), "resolution": ("64", "64, 128"), "steps": (1, 2), "total_steps": (0, 4),
    "rank": (1, 2), "batch_size": (1, 2), "width": (64,), "height": (64,), "gpus": (1,), "count": (1, 2),
    "checkpoints": (1, 2), "gradient_accumulation": (1, 2), "prompts": ("a red square\n[trigger]",),
    "optimizer": ("adamw", "sgd", "lion"), "base": ("none", "graft_tiny_sd3.safetensors"),
    "sampler": ("euler",), "scheduler": ("simple",), "start_from": ("none",), "repeats": (1, 2),
}  # fmt: skip
"""Widget -> valid values that cost little, where not every valid value does."""
NO_EDGES = ("gpus", "width", "height", "resolution")
"""Widgets whose largest value is nothing to try on a small machine."""

STOCK: Mapping[str, tuple[Prompt, int]] = {
    "IMAGE": (node("EmptyImage", width=64, height=64, batch_size=1, color=0), 0),
    "MASK": (node("SolidMask", value=1.0, width=64, height=64), 0),
}
PRODUCERS: Mapping[str, tuple[str, int]] = {
    "MODEL": ("GraftLoadBaseModel", 0),
    "CLIP": ("GraftLoadBaseModel", 1),
    "VAE": ("GraftLoadBaseModel", 2),
    "GRAFT_DATASET": ("GraftLoadDataset", 0),
    "GRAFT_DATASET_SETTINGS": ("GraftDatasetSettings", 0),
    "GRAFT_LORA": ("GraftBuildLora", 0),
    "GRAFT_OPTIMIZER": ("GraftOptimizerSettings", 0),
    "GRAFT_OBJECTIVE": ("GraftObjectiveSettings", 0),
    "GRAFT_MEMORY": ("GraftMemorySettings", 0),
    "GRAFT_VALIDATION": ("GraftValidationSettings", 0),
    "GRAFT_CHECKPOINTS": ("GraftCheckpointSettings", 0),
    "GRAFT_SAMPLES": ("GraftSamplePrompts", 0),
    "GRAFT_STATE": ("GraftTrainSteps", 2),
}
"""Kind of socket -> the node and output that it is wired to."""
TAKE_PICTURES = ("GraftEncodeDataset", "GraftJoinDatasets", "GraftPreviewDataset")
"""Nodes that take a dataset before it is encoded."""


def hostile_values(outside: Path) -> list[Any]:
    """Return what no widget was made for, and a little that some were."""
    climb = "../" * 8
    return [
        f"{climb}{outside.as_posix().lstrip('/')}", str(outside), f"{outside}/red.png", "../../outside",
        "..\\..\\outside", f"{outside}/my_lora.safetensors", "/etc/passwd", "~/x", "C:\\x",
        "file:///etc/passwd", "", " ", ".", "..", "a/../../b", "\0", "a\0b", "a\nb", "\x1b[2J", "\u202etxt",
        "\ud7ff", "\U0001f600", "\ud800", "\ud800.safetensors", "\udce9", "a\udc80b.png", "\ufffe",
        "x" * 5000, "x/" * 3000, "9" * 5000, "(" * 3000, "a" * 300, "con", "nul.txt", "tiny", "sound", "none",
        "auto", "[trigger]", "{0}", "{step}", "%s", "%n", "*", "[a-", "(?P<", "$(touch x)", "'; --", "nan",
        "inf", "1e400", "1e9", "0", "-1", "0x10", "\u0661", "1,,2", "1;2", "#zzzzzz", "rgb(1,2,3)",
        "2020-99-99", "!!python/none", "__import__('os')",
        0, 1, 2, -1, 0.1, 7.5, 1e-300, 1e300, -1e300, 2**31, 2**63, 2**64, 2**70, -(2**70),
        float("nan"), float("inf"), float("-inf"), True, False, None,
        [], {}, [1, 2, 3], ["1"], ["1", 0], ["9", 0], ["1", 99], ["1", -1], ["1", "0"], [["1", 0]],
        {"a": {"b": []}}, {"__value__": "x"}, {"__value__": ["1", 0]}, [None], [[[]]],
    ]  # fmt: skip


@contextmanager
def cases(place: Path, comfyui: Path, seed: int) -> Iterator[list[Case]]:
    """Give PROMPTS prompts, on one server."""
    with Target(comfyui, place / "base") as target:
        target.watch()
        for folder in (target.base / "input" / "tiny", target.outside):
            write_pictures(folder)
        (target.base / "input" / "job.yaml").write_text(job())
        (target.outside / "state.json").write_text("{}")
        (target.outside / "my_lora.safetensors").write_bytes(b"no weights")
        drawer = Attempts(target)
        yield [Case("prompts", f"prompt {n}", partial(drawer.attempt, f"{seed}/{n}")) for n in range(PROMPTS)]
        print(
            "how the prompts ended:", ", ".join(f"{count} {ended}" for ended, count in drawer.ended.items())
        )


class Attempts:
    """Draws prompts for a server and queues them."""

    def __init__(self, target: Target) -> None:
        self.target, self.schemas = target, {}
        self.before: Any = None
        self.ended: Counter[str] = Counter()

    def attempt(self, seed: str) -> list[Problem]:
        """Draw a prompt, queue it, and return what went wrong."""
        if not self.schemas:
            self.prepare()
        draw = random.Random(seed)
        drawn = Draw(self.schemas, draw, hostile_values(self.target.outside))
        graph = drawn.prompt()
        extra = draw.choice(
            ({}, {}, {"extra_pnginfo": draw.choice((None, [], [1], "x", 5, {"workflow": "x"}))})
        )
        outcome = self.target.attempt(graph, extra, patience=PATIENCE_SECONDS)
        self.ended[outcome.ended] += 1
        problems = outcome.problems
        problems += [Problem("wrong", f"outside: {text}") for text in self.target.seen_outside()]
        after = self.files()
        problems += [Problem("wrong", f"changed: {path}") for path in sorted(changed(self.before, after))]
        self.before = after
        spoiled = "; ".join([*drawn.spoiled, *(["extra_data"] if extra else [])])
        return [Problem(problem.kind, f"{spoiled}: {problem.words}") for problem in problems]

    def prepare(self) -> None:
        """Ask the server for its nodes, and note which files lie where none may change."""
        prepare(self.target)
        _, schemas = self.target.ask("/object_info")
        self.schemas = {name: schema for name, schema in schemas.items() if name.startswith("Graft")}
        self.target.seen_outside()  # folders that stock nodes make when they are listed
        self.before = self.files()

    def files(self) -> dict[str, tuple[int, int]]:
        """Return the size and date of every file that no prompt may change."""
        folders = [self.target.outside, *(self.target.base / name for name in ("input", "models"))]
        every = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in every}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the names under which there is another thing, or none, or something new."""
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


class Draw:
    """One prompt: a node, what its sockets need, and then some values that are none."""

    def __init__(self, schemas: Schemas, draw: random.Random, hostile: Sequence[Any]) -> None:
        self.schemas, self.draw, self.hostile = schemas, draw, hostile
        self.graph: Prompt = {}
        self.numbers: dict[str, str] = {}
        """Class -> the node of it that the others share."""
        self.trains = draw.random() < TRAINED
        self.spoiled: list[str] = []
        """What was changed, for people."""

    def prompt(self) -> Prompt:
        kinds = [kind for kind in self.schemas if self.trains or not self.needs_training(kind)]
        kind = self.draw.choice(kinds)
        target = self.add(kind)
        for _ in range(self.draw.choice((0, 1, 1, 1, 1, 2, 3))):
            self.spoil(target if self.draw.random() < 0.8 else self.draw.choice(list(self.numbers.values())))
        if not self.schemas[kind].get("output_node"):
            self.graph["90"] = node("PreviewAny", source=[target, 0])
        return self.graph

    def needs_training(self, kind: str) -> bool:
        sockets = {spec[0] for spec in self.inputs(kind, "required").values()}
        return kind == "GraftTrainSteps" or "GRAFT_STATE" in sockets

    def inputs(self, kind: str, *groups: str) -> dict[str, Any]:
        inputs = self.schemas[kind]["input"]
        return {name: spec for group in groups for name, spec in (inputs.get(group) or {}).items()}

    def add(self, kind: str) -> str:
        """Add a node with all that it needs, and half of what it may have; return its number."""
        if kind in self.numbers:
            return self.numbers[kind]
        node_id = self.numbers[kind] = str(len(self.numbers) + 1)
        entry = self.graph[node_id] = node(kind)
        optional = {
            name: spec for name, spec in self.inputs(kind, "optional").items() if self.draw.random() < 0.5
        }
        for name, spec in {**self.inputs(kind, "required"), **optional}.items():
            value = self.value(kind, name, spec)
            if value is not None:
                entry["inputs"][name] = value
        return node_id

    def value(self, kind: str, name: str, spec: Sequence[Any]) -> Any:
        """Return a valid value for an input, or a wire to what makes one."""
        if is_widget(spec):
            return self.draw.choice(valid(name, spec))
        socket = self.draw.choice(str(spec[0]).split(","))
        if not self.trains and socket == "GRAFT_STATE":
            socket = "GRAFT_LORA" if "GRAFT_LORA" in spec[0] else ""
        if socket in STOCK:
            entry, output = STOCK[socket]
            self.graph[f"stock {socket}"] = entry
            return [f"stock {socket}", output]
        if socket == "GRAFT_DATASET" and kind not in TAKE_PICTURES and self.draw.random() < 0.95:
            return [self.add("GraftEncodeDataset"), 0]
        if socket not in PRODUCERS or PRODUCERS[socket][0] == kind:
            return None
        producer, output = PRODUCERS[socket]
        return [self.add(producer), output]

    def spoil(self, node_id: str) -> None:
        """Give an input of a node a value at the end of what is allowed, or one that is not, or none."""
        kind = self.graph[node_id]["class_type"]
        every = self.inputs(kind, "required", "optional")
        if not every:
            return
        name = self.draw.choice([name for name, spec in every.items() if is_widget(spec)] or list(every))
        if not is_widget(every[name]) or self.draw.random() < 0.03:
            self.graph[node_id]["inputs"].pop(name, None)
            self.spoiled.append(f"{kind} without {name}")
            return
        value = self.draw.choice([*edges(name, every[name]), *self.hostile])
        if name == "gpus" and is_number(value) and 1 < value <= 64:
            value = 65  # so many processes would be started
        self.graph[node_id]["inputs"][name] = value
        self.spoiled.append(f"{kind} {name}={ascii(value)[:60]}")


def is_widget(spec: Sequence[Any]) -> bool:
    return isinstance(spec[0], list) or spec[0] in ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def valid(name: str, spec: Sequence[Any]) -> Sequence[Any]:
    """Return values that a widget was made for."""
    options = spec[1] if len(spec) > 1 else {}
    menu = spec[0] if isinstance(spec[0], list) else options.get("options")
    if name in TAME and (not menu or set(TAME[name]) & {*menu}):
        return [value for value in TAME[name] if not menu or value in menu]
    if menu is not None:
        return list(menu) or [""]
    if spec[0] == "BOOLEAN":
        return (False, True)
    values = [options["default"]] if "default" in options else []
    return values or [{"INT": 1, "FLOAT": 1.0}.get(spec[0], "sweep")]


def edges(name: str, spec: Sequence[Any]) -> list[Any]:
    """Return the ends of what a number may be, and what lies just beyond."""
    options = spec[1] if len(spec) > 1 and isinstance(spec[1], dict) else {}
    if name in NO_EDGES or spec[0] not in ("INT", "FLOAT"):
        return []
    step = options.get("step", 1)
    low, high = options.get("min", 0), options.get("max", 1)
    return 3 * [low, high, low - step, high + step, low + step]
