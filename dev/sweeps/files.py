"""Bad files: datasets, LoRAs, checkpoints, job files and states, each queued or opened in the editor.

Counted as wrong: a bad file that is accepted, an error that does not name it, code in it that is run,
anything opened outside the server's folders, a damaged checkpoint of a run that keeps it from going on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import bad_datasets, bad_files, bad_jobs
from .bad_files import BAD, MALFORMED, ODD, Maker, file_name, put
from .commands import spellings
from .graphs import (
    BASE,
    BASE_MODEL,
    DATASET,
    ENCODE,
    LORA,
    SAVE,
    TEXT_ENCODER,
    TRAIN,
    Prompt,
    node,
    part,
    shown,
    write_pictures,
)
from .report import Case, Problem
from .target import Outcome, Target


@dataclass(frozen=True)
class Trial:
    """A bad file, and a graph that reads it."""

    folder: str
    """Below the server's; it is empty before, and removed afterwards."""
    make: Callable[[Path], Any]
    """Writes the file into that folder."""
    graph: Prompt
    named: str = ""
    """What an error has to name."""
    refused: bool | None = True
    """None: it may be refused or work."""


@contextmanager
def cases(place: Path, comfyui: Path, seed: int) -> Iterator[list[Case]]:
    """Give every trial, on one server."""
    with Target(comfyui, place / "base") as target:
        target.watch()
        write_pictures(target.base / "input" / "tiny")
        trials = {"dataset": datasets(), "lora": loras(), "checkpoint": checkpoints()}
        trials |= {"job": jobs(), "state": states()}
        listed = [
            Case(group, f"{group}: {name}", partial(attempt, target, trial))
            for group, table in trials.items()
            for name, trial in table.items()
        ]
        listed.append(Case("state", "state: damaged checkpoint of a run", partial(damaged_run, target)))
        yield listed


def attempt(target: Target, trial: Trial) -> list[Problem]:
    """Write a bad file, list it as the editor does, queue its graph, and return what went wrong."""
    prepare(target)
    folder = target.base / trial.folder
    folder.mkdir(parents=True)
    try:
        trial.make(folder)
        problems = listed(target, trial.graph)
        outcome = target.attempt(trial.graph)
        problems += outcome.problems + judge(trial, outcome)
        problems += [Problem("wrong", f"outside: {text}") for text in target.seen_outside()]
        if any(target.base.glob("*was-run*")) or any(folder.glob("*was-run*")):
            problems.append(Problem("wrong", "the code in the file was run"))
        return problems
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def listed(target: Target, graph: Prompt) -> list[Problem]:
    """Ask for the nodes' menus, in which files are listed."""
    for kind in {entry["class_type"] for entry in graph.values()}:
        status, _ = target.ask(f"/object_info/{kind}")
        if status != 200:
            return [Problem("answer 500", f"/object_info/{kind}: {status}")]
    return []


def judge(trial: Trial, outcome: Outcome) -> list[Problem]:
    """Return what is wrong with how a trial ended."""
    if outcome.ended == "never":
        return []
    if trial.refused and outcome.ended in ("done", "cancelled"):
        return [Problem("wrong", f"{outcome.ended} instead of refused")]
    if trial.refused is False and outcome.ended != "done":
        return [Problem("wrong", f"{outcome.ended}: {outcome.message[:300]}")]
    if trial.named and outcome.ended in ("failed", "refused"):
        if not any(spelled in outcome.message for spelled in spellings(trial.named)):
            return [Problem("wrong", f"does not name {ascii(trial.named)}: {outcome.message[:300]}")]
    return []


def prepare(target: Target) -> None:
    """Train and save a step once, so that there is a text encoder, a state and a cache."""
    if (target.base / "output" / "graft" / "states" / "sound").exists():
        return
    graph = part(BASE, DATASET, ENCODE, LORA, TRAIN, SAVE)
    graph["91"] = node("GraftSaveTrainingState", state=[TRAIN, 2], name="sound")
    outcome = target.attempt(graph, patience=600)
    if outcome.ended != "done":
        raise RuntimeError(f"a sound graph does not run: {outcome}")
    target.seen_outside()  # the text encoder of the tiny base was written into models/


def make(maker: Maker, file: str, folder: Path) -> None:
    """Make a file in a folder."""
    put(maker, folder / file)


# --- trials -------------------------------------------------------------------------------------------------


def datasets() -> dict[str, Trial]:
    """Return a trial for each bad folder of pictures."""
    graph = shown(part(BASE, DATASET, ENCODE, GraftLoadDataset={"folder": "sweep"}), ENCODE)
    return {
        name: Trial("input/sweep", partial(bad_datasets.make, name), graph, extra.named, extra.refused)
        for name, extra in bad_datasets.DATASETS.items()
    }


def loras() -> dict[str, Trial]:
    """Return two trials for each bad LoRA: to look at it, and to merge it into the tiny base."""
    trials = {}
    for name, maker in BAD.items():
        file = f"{file_name(name)}.safetensors"
        lora = f"sweep/{file}"
        inspect = {"1": node("GraftInspectLora", lora_name=lora)}
        strength = {"strength_model": 1.0, "strength_clip": 1.0}
        merge = part(BASE) | {"2": node("GraftMergeLora", model=[BASE, 0], lora_name=lora, **strength)}
        what = ("models/loras/sweep", partial(make, maker, file))
        named = file if name in MALFORMED else ""
        trials[f"inspect: {name}"] = Trial(*what, inspect, named, True if named else None)
        trials[f"merge: {name}"] = Trial(*what, shown(merge, "2", 2), named, None if name in ODD else True)
    return trials


def checkpoints() -> dict[str, Trial]:
    """Return a trial for each bad checkpoint: a step of training on it."""
    trials = {}
    for name, maker in {**MALFORMED, **bad_checkpoints()}.items():
        file = f"{file_name(name)}.safetensors"
        base = {"model": f"sweep/{file}", "text_encoder_1": TEXT_ENCODER}
        graph = shown(part(BASE, DATASET, ENCODE, LORA, TRAIN, GraftLoadBaseModel=base), TRAIN, 4)
        named = file if name in MALFORMED else ""
        trials[name] = Trial("models/checkpoints/sweep", partial(make, maker, file), graph, named)
    return trials


def bad_checkpoints() -> dict[str, Maker]:
    """Return what makes the tiny base with something wrong."""

    def changed(layer: str, change: Callable[[Any], Any]) -> Maker:
        def write(path: Path) -> None:
            from safetensors.torch import load_file, save_file

            tensors = load_file(BASE_MODEL)
            name = next(name for name in tensors if layer in name)
            save_file({**tensors, name: change(tensors[name]).contiguous()}, path)

        return write

    qkv, encoder = "joint_blocks.0.x_block.attn.qkv.weight", "taesd_encoder.1.conv.0.weight"
    return {
        "a weight of NaN": changed(qkv, lambda weight: weight * float("nan")),
        "a weight of infinity": changed(qkv, lambda weight: weight + float("inf")),
        "a VAE of NaN": changed(encoder, lambda weight: weight * float("nan")),
        "a weight of another shape": changed(qkv, lambda weight: weight[:, :-1]),
        "a weight without a dimension": changed(qkv, lambda weight: weight.sum()),
        "half of a file": lambda path: path.write_bytes(BASE_MODEL.read_bytes()[: 1 << 20]),
        "a LoRA": bad_files.lora(),
    }


def jobs() -> dict[str, Trial]:
    """Return a trial for each bad job file."""
    trials = {}
    for name, maker in bad_jobs.JOBS.items():
        file = f"{file_name(name)}.yaml"
        graph = shown({"1": node("GraftTrainingJob", file=f"sweep/{file}")}, "1", 7)
        refused = None if name in bad_jobs.WORK else True
        named = file if name in bad_jobs.UNREADABLE else ""
        trials[name] = Trial("input/sweep", partial(make, maker, file), graph, named, refused)
    return trials


def states() -> dict[str, Trial]:
    """Return a trial for each damaged state."""

    def damage(change: Callable[[Path], Any], folder: Path) -> None:
        shutil.copytree(folder.parent / "sound", folder, dirs_exist_ok=True)
        change(folder)

    graph = {"1": node("GraftLoadTrainingState", name="sweep"), "2": node("GraftLossPlot", state=["1", 0])}
    return {
        name: Trial("output/graft/states/sweep", partial(damage, change), shown(graph, "2"), "sweep")
        for name, change in bad_jobs.STATES.items()
    }


def damaged_run(target: Target) -> list[Problem]:
    """Damage the newest checkpoint of a run, and ask for more steps of it in a new server."""
    saving = node("GraftCheckpointSettings", minutes=0.0, steps=1, keep=9, tensorboard=False, lora=False)
    train = {"name": "damaged", "checkpoint_settings": ["92", 0]}
    problems = []
    for steps in (2, 3):
        inputs = {**train, "steps": steps}
        graph = shown(
            part(BASE, DATASET, ENCODE, LORA, TRAIN, GraftTrainSteps=inputs) | {"92": saving}, TRAIN, 4
        )
        outcome = target.attempt(graph, patience=600)
        problems += outcome.problems
        if outcome.ended != "done":
            problems.append(Problem("wrong", f"step {steps}: {outcome.ended}: {outcome.message[:300]}"))
        for newest in sorted(target.base.glob("output/graft/damaged-*/checkpoints/step-00000002")):
            (newest / "state.json").write_text("[" * 100_000)
        target.stop()
    return problems
