"""Job files and saved training states that are damaged, false or absurd."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .bad_files import Maker, aliases, bind

JOB = {
    "type": "sd_trainer",
    "datasets": [{"folder_path": "tiny", "resolution": 64}],
    "model": {"name_or_path": "graft_tiny_sd3.safetensors"},
    "network": {"type": "lora", "linear": 2},
    "train": {"steps": 1, "lr": 1e-3},
}


def job(name: Any = "sweep", **process: Any) -> str:
    """Return a sound job file but for what is changed."""
    return json.dumps({"config": {"name": name, "process": [{**JOB, **process}]}})


def with_value(section: str, key: str, value: str) -> str:
    """Return a job file with a value as YAML spells it."""
    return job(**{section: {**JOB.get(section, {}), key: "VALUE"}}).replace('"VALUE"', value)


def with_dataset(key: str, value: str) -> str:
    return job(datasets=[{**JOB["datasets"][0], key: "VALUE"}]).replace('"VALUE"', value)


BOMB = aliases()
UNREADABLE: Mapping[str, Maker] = {
    "no bytes": b"",
    "a name that is not UTF-8": b"x",
    "a comment": "# nothing",
    "noise": bytes(range(256)),
    "UTF-16 without its mark": job().encode("utf-16-le"),
    "Latin-1": b"config: {name: caf\xe9}",
    "a pipe": os.mkfifo if hasattr(os, "mkfifo") else Path.touch,
    "a socket": bind,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link that leads out": lambda path: path.symlink_to("/etc/passwd"),
    "10 MB of text": "x" * (10 << 20),
    "brackets, 100,000 deep": "[" * 100_000,
    "lists, 5,000 deep": "[" * 5000 + "]" * 5000,
    "objects, 5,000 deep": "{a: " * 5000 + "1" + "}" * 5000,
    "tabs": "config:\n\tname: x",
    "two documents": job() + "\n---\n" + job(),
    "code": "config: !!python/object/apply:os.mkdir [was-run]",
    "a tag that nobody knows": "config: !nobody {a: 1}",
    "a bomb of aliases for train": BOMB + "\nconfig: {name: x, process: [{type: sd_trainer, train: *a39}]}\n",
    "a bomb of aliases for config": BOMB + "\nconfig: *a39\n",
    "keys that are merged": "a: &a {x: 1}\nb: &b {<<: *a}\nconfig: {<<: [*a, *b]}",
    "an alias of itself": "config: &a {name: x, process: [*a]}",
    "a key that is a list": "config: {[1, 2]: 3}",
    "a key twice": "config: {name: a, name: b}",
    "a day that does not exist": "config: {name: 2020-99-99, process: []}",
    "a number of 9,999 digits": with_value("train", "steps", "9" * 9999),
}
"""Files that are refused by their names."""
UNREASONABLE: Mapping[str, Maker] = {
    "a bomb of aliases for a name": BOMB + "\nconfig: {name: *a39, process: []}\n",
    "10,000 unknown keys": json.dumps({"config": {f"key{n}": n for n in range(10_000)}}),
    "steps of infinity": with_value("train", "steps", ".inf"),
    "steps below 0": with_value("train", "steps", "-1"),
    "steps that are a list": with_value("train", "steps", "[1]"),
    "a rate of NaN": with_value("train", "lr", ".nan"),
    "a rate below 0": with_value("train", "lr", "-1"),
    "a rank of 0": with_value("network", "linear", "0"),
    "a rank of 2^70": with_value("network", "linear", str(1 << 70)),
    "a method that does not exist": with_value("network", "type", "[lora]"),
    "a resolution of NaN": with_dataset("resolution", "[.nan]"),
    "a resolution below 0": with_dataset("resolution", "[-64]"),
    "a folder elsewhere": with_dataset("folder_path", "/etc"),
    "a folder above": with_dataset("folder_path", "../../outside"),
    "a folder that is a number": with_dataset("folder_path", "1"),
    "a folder with a zero in it": with_dataset("folder_path", '"a\\0b"'),
    "a folder with half of a letter": with_dataset("folder_path", '"\\uD800"'),
    "no process": '{"config": {"name": "x", "process": []}}',
    "a process that is a number": '{"config": {"name": "x", "process": [1]}}',
    "process is null": '{"config": {"name": "x", "process": null}}',
    "a config that is a list": "config: [1]",
    "a name that leads out": job("../../x"),
    "a name that is a list": job([1]),
    "a name of 10,000 letters": job("x" * 10_000),
    "a model elsewhere": job(model={"name_or_path": "/etc/passwd"}),
    "a model that is null": job(model=None),
}
"""Files that are refused by what they ask for, or by their names."""
JOBS: Mapping[str, Maker] = {**UNREADABLE, **UNREASONABLE}
WORK = (
    "10 MB of text",
    "a rank of 2^70",
    "a rate below 0",
    "a name of 10,000 letters",
    "a name that leads out",
    "a model elsewhere",
    "a key twice",
)
"""Jobs that the node may hand on, as it does not use what is wrong, or that may take long to read."""

STATES: Mapping[str, Callable[[Path], Any]] = {
    "no state.json": lambda folder: (folder / "state.json").unlink(),
    "no tensors": lambda folder: _tensors(folder).unlink(),
    "tensors cut off": lambda folder: _tensors(folder).write_bytes(_tensors(folder).read_bytes()[:-9]),
    "tensors are a pipe": lambda folder: _instead(_tensors(folder), os.mkfifo),
    "tensors are a folder": lambda folder: _instead(_tensors(folder), os.mkdir),
    "state.json is a pipe": lambda folder: _instead(folder / "state.json", os.mkfifo),
    "state.json is a socket": lambda folder: _instead(folder / "state.json", bind),
    "state.json is a folder": lambda folder: _instead(folder / "state.json", os.mkdir),
    "state.json of no bytes": lambda folder: (folder / "state.json").write_bytes(b""),
    "state.json of zeros": lambda folder: (folder / "state.json").write_bytes(bytes(1000)),
    "state.json, 100,000 deep": lambda folder: (folder / "state.json").write_text("[" * 100_000),
    "state.json of a list": lambda folder: (folder / "state.json").write_text("[]"),
    "state.json that is not UTF-8": lambda folder: (folder / "state.json").write_bytes(b'{"a": "\xe9"}'),
    "a number of 9,999 digits": lambda folder: _change(folder, step="DIGITS"),
    "another format": lambda folder: _change(folder, format=99),
    "a format that is a list": lambda folder: _change(folder, format=[1]),
    "another digest": lambda folder: _change(folder, digest="0" * 32),
    "tensors elsewhere": lambda folder: _change(folder, tensors="../../../../../../outside/x"),
    "tensors with a zero in the name": lambda folder: _change(folder, tensors="a\0b"),
    "tensors with half of a letter": lambda folder: _change(folder, tensors="\ud800"),
    "a step that is text": lambda folder: _change(folder, step="x"),
    "losses that are text": lambda folder: _change(folder, losses="x"),
    "notes with half of a letter": lambda folder: _change(folder, notes={"\ud800": "\ud800"}),
}


def _tensors(folder: Path) -> Path:
    return next(folder.glob("state-*.safetensors"))


def _instead(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _change(folder: Path, **values: Any) -> None:
    path = folder / "state.json"
    text = json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values})
    path.write_text(text.replace('"DIGITS"', "9" * 9999), encoding="utf-8")
