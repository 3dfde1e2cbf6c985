"""A job file (YAML), in the layout of EriDiffusion and ai-toolkit, as a graph of Graft's nodes.

The rule: every key of a file is either honored or refused by name, with the nearest known ones or the
reason. Only a key that is off or empty, and so asks for nothing, may be unknown.
`keys.py` says what each key sets, `rules.py` what several decide together and `graph.py` what the
graph is, so that the command line, the Training Job node and an exported graph all do the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..config import unknown_key
from ..files.text import shortened
from ..ineffective_settings import ineffective_settings
from ..user_error import UserError
from .graph import NODES, Prompt, graph_of, of_kind
from .keys import DATASET_KEYS, KEYS, OTHER_NAMES, ROOT_KEYS, TEXT_ENCODERS, Beside, Read, Settings, is_off
from .rules import RULES
from .yaml_file import read_yaml

DATASETS = "graft_datasets"
"""Kind of folder, in extra_model_paths.yaml, that holds images."""
MOST_NAMED = 50
"""Problems of one file that are named, a line each."""


@dataclass(frozen=True)
class Job:
    """A job file as a graph, its folders and its options."""

    name: str
    prompt: Prompt
    folders: Mapping[str, tuple[Path, ...]]
    """Kind of file, as ComfyUI calls it -> folders outside ComfyUI that the job names."""
    output: Path
    """`training_folder`: ComfyUI's output folder for this job."""
    device: str = "cuda"
    log_every: int = 0
    document: Mapping[str, Any] = field(default_factory=dict)
    """The file as it was read; it goes into the LoRA's metadata. Paths are cut to their last part."""

    def node(self, kind: str) -> str:
        """Return the id of the only node of class `kind`."""
        return of_kind(self.prompt, kind)[0]

    def nodes(self, kind: str) -> list[dict[str, Any]]:
        """Return the nodes of class `kind`."""
        return [self.prompt[node_id] for node_id in of_kind(self.prompt, kind)]


HasDataset = Callable[[str], bool]
"""Whether ComfyUI has a dataset with this name."""


def maybe(name: str) -> bool:
    """Accept every dataset; ComfyUI decides."""
    return True


def read_job(path: Path, has_dataset: HasDataset = maybe) -> Job:
    """Read the job file `path`. Paths in it are relative to its folder; `has_dataset` is asked for others.

    Raises UserError for YAML that cannot be read, a key that is not known, and a value that cannot be used.
    """
    try:
        document = read_yaml(path)
        if not isinstance(document, dict):
            raise UserError(
                "expected 'job:' and 'config:', or 'model:', 'datasets:' and 'train:'; see "
                "example_workflows/jobs."
            )
        return compile_job(document, path.resolve().parent, name=path.stem, has_dataset=has_dataset)
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from error


def compile_job(
    document: Mapping[str, Any], folder: Path, *, name: str = "", has_dataset: HasDataset = maybe
) -> Job:
    """Return the job that the parsed file `document` in `folder` asks for.

    `name` is the run's where the file has the layout without `config` and gives none.

    Raises one UserError for everything in the file that cannot be had, a line each.
    """
    refusals: list[str] = []
    whole = _with_config(document, name)
    origin: dict[str, str] = {}
    settings = _settings(whole, ROOT_KEYS, refusals, origin)
    inputs: dict[str, dict[str, Any]] = {}
    sets: list[Settings] = []
    places = _Places(folder, has_dataset)
    with _noted(refusals):
        process, datasets = _parts(whole, refusals)
        settings = _settings(process, KEYS, refusals, origin, before=settings)
        for i, entry in enumerate(datasets):
            sets.append(_settings(entry, DATASET_KEYS, refusals, {}, f"datasets[{i}]."))
            if again := sets[-1].pop("encode.encode_again", None):  # all are encoded by one node
                settings["encode.encode_again"] = again
        _require(settings, "run.name", "config.name", "the name of the run", refusals)
        _require(settings, "run.type", "type", "sd_trainer", refusals)
        _require(settings, "base.model", "model.name_or_path", "the base model's file", refusals)
        inputs = _by_node(derive(settings, refusals))
        refusals += _without_effect(inputs, origin)
        _place_models(inputs.get("base", {}), places, refusals)
        if assistant := inputs.get("assistant"):
            with _noted(refusals):
                name, key = assistant["lora_name"], "model.assistant_lora_path"
                assistant["lora_name"] = places.file(name, key, ("loras",))
        for i, entry in enumerate(sets):
            folder_key = f"datasets[{i}].folder_path"
            if not _require(entry, "dataset.folder", folder_key, "the folder of the images", refusals):
                continue
            if "may.trigger" in settings:
                entry.setdefault("dataset.trigger", settings["may.trigger"])
            with _noted(refusals):
                _preserve_class(entry, inputs.get("run", {}).get("class_word"), folder_key)
            with _noted(refusals):
                entry["dataset.folder"] = places.dataset(entry["dataset.folder"], folder_key)
            _place_references(entry, places, f"datasets[{i}].", refusals)
    if refusals:
        raise _problems(refusals)
    run = inputs.pop("run")
    name = run["name"]
    return Job(
        name,
        graph_of(inputs, [_by_node(entry) for entry in sets]),
        {kind: tuple(dict.fromkeys(found)) for kind, found in places.folders.items()},
        folder / run.get("output", "output"),
        run.get("device", "cuda"),
        run.get("log_every", 0),
        _shared(document, name),
    )


@contextmanager
def _noted(refusals: list[str]) -> Iterator[None]:
    """Note an error and go on, so that one attempt names every problem of a file."""
    try:
        yield
    except UserError as error:
        refusals.append(shortened(str(error)))
    except OSError as error:  # a path that no system takes
        refusals.append(shortened(f"{error.filename}: {error.strerror}."))


def _problems(refusals: Sequence[str]) -> UserError:
    """Return one error for every problem of a file."""
    lines = [f"{len(refusals)} problems:"] if refusals[1:] else []
    lines += refusals[:MOST_NAMED]
    lines += [f"... and {len(refusals) - MOST_NAMED} more"] if refusals[MOST_NAMED:] else []
    return UserError("\n".join(lines))


def flat(
    values: Mapping[str, Any], known: Mapping[str, Read], where: str = "", *, shown: str = ""
) -> Iterator[tuple[str, Any, Read]]:
    """Yield (dotted key, value, its reading) of nested dicts; empty values (YAML's null) say nothing.

    The reading of a key that leads to none of `known` raises a UserError that names the nearest that would,
    unless it is off and is not one of them written wrongly.
    """
    for name, value in values.items():
        key = f"{where}{name}"
        if key in known:
            if value is not None:
                yield key, value, known[key]
        elif not any(other.startswith(f"{key}.") for other in known):
            if not is_off(value) or _siblings_like(str(name), known, where, cutoff=0.8):
                yield key, value, _raising(_unknown(str(name), known, where, shown))
        elif isinstance(value, Mapping):
            yield from flat(value, known, f"{key}.", shown=shown)
        elif value is not None:
            yield key, value, _raising(UserError(f"{shown}{key}: expected keys below it, found {value!r}."))


def _siblings_like(name: str, known: Iterable[str], where: str, *, cutoff: float = 0.6) -> list[str]:
    """Return the keys in the same place that are written nearly so, the nearest first, at most three."""
    below = [other.removeprefix(where) for other in known if other.startswith(where)]
    siblings = dict.fromkeys(other.partition(".")[0] for other in below)
    return get_close_matches(name, siblings, n=3, cutoff=cutoff)


def _unknown(name: str, known: Iterable[str], where: str, shown: str) -> UserError:
    """Return the error for a key, with those that it may mean: in its place, else anywhere in the file."""
    last = {other.rpartition(".")[2]: other for other in known}
    meant = OTHER_NAMES.get(name, name)
    near = _siblings_like(meant, known, where) or [
        shown + last[match] for match in get_close_matches(meant, last, n=3)
    ]
    return unknown_key(name, near, where=shown + where)


def _raising(error: UserError) -> Read:
    def read(value: Any, key: str) -> Settings:
        raise error

    return read


def model_paths(job: Job) -> dict[str, dict[str, str]]:
    """Return the content of an extra_model_paths.yaml that tells ComfyUI of the job's folders."""
    lines = {kind: "\n".join(map(str, folders)) for kind, folders in job.folders.items()}
    return {"graft_job": lines} if lines else {}


def derive(settings: Settings, refusals: list[str]) -> Settings:
    """Return the settings with those resolved that several keys decide together ("may.*")."""
    done = {name: value for name, value in settings.items() if not name.startswith("may.")}
    may = {name.removeprefix("may."): v for name, v in settings.items() if name.startswith("may.")}
    for rule in RULES:
        with _noted(refusals):
            rule(done, may)
    return done | {"train.name": done.get("run.name"), "save.name": done.get("run.name")}


class _Places:
    """Where the files of a job are, and the names by which ComfyUI will find them."""

    def __init__(self, folder: Path, has_dataset: HasDataset) -> None:
        self.folder, self.has_dataset = folder, has_dataset
        self.folders: dict[str, list[Path]] = {}
        self.owners: dict[tuple[str, str], Path] = {}
        """By kind of file and name in ComfyUI."""

    def file(self, name: str, key: str, kinds: Sequence[str]) -> str:
        """Return ComfyUI's name of a model file: its own, where the file lies outside ComfyUI."""
        if not name.endswith((".safetensors", ".sft")):
            raise UserError(
                f"{key}: {name!r} is not a .safetensors file; give the path of one on this machine, or its "
                "name in ComfyUI's models folder. Nothing is downloaded."
            )
        path = self.folder / Path(name).expanduser()
        if not path.is_file():
            if Path(name).is_absolute() or name.startswith("."):
                raise UserError(f"{key}: there is no file {path}.")
            return self._claimed(name, Path(name), key, kinds)
        for kind in kinds:
            self.folders.setdefault(kind, []).append(path.resolve().parent)
        return self._claimed(path.name, path.resolve(), key, kinds)

    def dataset(self, name: str, key: str) -> str:
        """Return the name of a folder of images: its last part, where it lies outside ComfyUI.

        Raises UserError for one that does not exist.
        """
        path = self.folder / Path(name).expanduser()
        if path.is_dir():
            path = path.resolve()
            self.folders.setdefault(DATASETS, []).append(path)
            return self._claimed(path.name, path, "datasets", [DATASETS])
        if path.exists():
            raise UserError(f"{key}: {path} is a file; give the folder that it lies in.")
        if Path(name).expanduser().is_absolute() or name.startswith((".", "/")):
            raise UserError(f"{key}: {path} does not exist; give the folder of your images.")
        if not self.has_dataset(name):
            raise UserError(
                f"{key}: {name} does not exist, neither beside the job file nor in ComfyUI's input folder; "
                "give the folder of your images."
            )
        return name

    def _claimed(self, name: str, path: Path, key: str, kinds: Sequence[str]) -> str:
        """Return the name, and reserve it for `path`. Raises UserError if another path has it."""
        if any(self.owners.setdefault((kind, name), path) != path for kind in kinds):
            raise UserError(f"{key}: two files or folders are named {name!r}; rename one of them.")
        return name


def _place_references(entry: Settings, places: _Places, where: str, refusals: list[str]) -> None:
    """Name the folders of reference images of a dataset, in the order of their keys."""
    named = [(f"{where}control_path", name) for name in entry.pop("dataset.references", "").splitlines()]
    for number in (1, 2, 3):
        if name := entry.pop(f"may.references_{number}", ""):
            named.append((f"{where}control_path_{number}", name))
    found = []
    for key, name in named:
        with _noted(refusals):
            found.append(places.dataset(name, key))
    if found:
        entry["dataset.references"] = "\n".join(found)


def _place_models(base: dict[str, Any], places: _Places, refusals: list[str]) -> None:
    encoders = [key for key in TEXT_ENCODERS if key in base]
    if len(encoders) > 3:
        refusals.append(f"model: {len(encoders)} text encoders are given; a model takes at most three.")
    slots = {key: (f"text_encoder_{slot + 1}", key, ("text_encoders",)) for slot, key in enumerate(encoders)}
    files = {
        "model": ("model", "name_or_path", ("checkpoints", "diffusion_models")),
        "vae": ("vae", "vae_path", ("vae",)),
        **slots,
    }
    for name in [name for name in files if name in base]:
        slot, key, kinds = files[name]
        with _noted(refusals):
            base[slot] = places.file(base.pop(name), f"model.{key}", kinds)


def _with_config(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the file in ai-toolkit's layout. One without `config`, as EriDiffusion's README has it, is a
    process."""
    if "config" in document or not document.keys() & {"model", "network", "train", "datasets"}:
        return document
    process = {key: value for key, value in document.items() if key not in ("job", "meta", "name")}
    outside = {key: document[key] for key in ("job", "meta") if key in document}
    config = {"name": document.get("name") or name, "process": [{"type": "sd_trainer", **process}]}
    return {**outside, "config": config}


def _without_effect(inputs: Mapping[str, Mapping[str, Any]], origin: Mapping[str, str]) -> list[str]:
    """Return a refusal for every key of the file whose setting has no effect beside the others."""
    nodes = ("optimizer", "objective", "lora", "lora_settings")
    defaults = {name: value for node in nodes for name, value in NODES[node].inputs.items()}
    values = defaults | {name: value for node in nodes for name, value in inputs.get(node, {}).items()}
    keys = {target.partition(".")[2]: key for target, key in origin.items() if target not in EVERYWHERE}
    return [
        f"{keys[name]}: {name} {values[name]} {why}. Remove the key."
        for name, why in ineffective_settings(values, defaults).items()
        if name in keys
    ]


def _parts(
    document: Mapping[str, Any], refusals: list[str]
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """Return the process of a job file, and its datasets apart; a lack of datasets goes to `refusals`."""
    config = document.get("config")
    processes = config.get("process") if isinstance(config, Mapping) else None
    if not isinstance(processes, list) or len(processes) != 1 or not isinstance(processes[0], Mapping):
        raise UserError("config.process: expected one entry, as '- type: sd_trainer' and its keys.")
    process = dict(processes[0])
    datasets = process.pop("datasets", None)
    if not isinstance(datasets, list) or not datasets or not all(isinstance(d, Mapping) for d in datasets):
        refusals.append("datasets: expected a list with at least one '- folder_path: ...'.")
        return process, []
    return process, datasets


def _settings(
    values: Mapping[str, Any],
    table: Mapping[str, Read],
    refusals: list[str],
    origin: dict[str, str],
    where: str = "",
    *,
    before: Settings | None = None,
) -> Settings:
    """Return what the keys of `values` set, beside what was set before; `origin` notes the key of each.

    What cannot be set is added to `refusals`, also where two keys set one input to different values.
    """
    settings: Settings = dict(before or {})
    rows = list(flat(values, table, shown=where))
    given = {key: value for key, value, _ in rows}
    for key, value, read in rows:
        with _noted(refusals):
            if isinstance(read, Beside):
                if read.switch not in given and not is_off(value):
                    raise UserError(
                        f"{where}{key}: {value!r} has no effect without {where}{read.switch}: {read.why}. "
                        "Remove the key."
                    )
                read = read.beside(given.get(read.switch))
            for target, setting in read(value, f"{where}{key}").items():
                if setting is None:
                    continue
                if settings.get(target, setting) != setting:
                    other = origin[target]
                    raise UserError(f"{where}{key} and {other} ask for different things; keep one.")
                settings[target], origin[target] = setting, f"{where}{key}"
    return settings


def _preserve_class(entry: Settings, word: str | None, key: str) -> None:
    """Give a dataset the class word of preservation. Raises UserError where it has no trigger to replace."""
    if word is None or entry.get("dataset_settings.regularisation"):
        return
    if not entry.get("dataset.trigger"):
        raise UserError(
            f"{key}: train.diff_output_preservation replaces the trigger word in captions, and these images "
            "have none; add trigger_word."
        )
    entry["dataset_settings.class_word"] = word


def _require(settings: Settings, target: str, key: str, what: str, refusals: list[str]) -> bool:
    """Return whether a key is there, and note it where it is neither there nor refused already."""
    if settings.get(target):
        return True
    if not any(refusal.startswith(f"{key}:") for refusal in refusals):
        refusals.append(f"{key}: missing; it is {what}.")
    return False


def _by_node(settings: Settings) -> dict[str, dict[str, Any]]:
    nodes: dict[str, dict[str, Any]] = {}
    for target, value in settings.items():
        node, _, name = target.partition(".")
        nodes.setdefault(node, {})[name] = value
    return nodes


def _shared(value: Any, name: str, key: str = "") -> Any:
    """Return a part of the file, the value of `key`, as plain JSON values that may be given away.

    "[name]" becomes the job's name, and of a path only the last part is left: folders say who somebody is.
    """
    if isinstance(value, Mapping):
        return {str(inner): _shared(value[inner], name, str(inner)) for inner in value}
    if isinstance(value, list):
        return [_shared(entry, name, key) for entry in value]
    if isinstance(value, str):
        value = re.split(r"[\\/]", value.rstrip("\\/"))[-1] if PATH.fullmatch(key) else value
        return value.replace("[name]", name)
    return value if isinstance(value, int | float | bool | None) else str(value)


EVERYWHERE = ("lora.rank", "lora.alpha", "lora_settings.full_matrix")
"""What ai-toolkit's page writes beside every type of network."""

PATH = re.compile(r"training_folder|.*_path(_\d)?")
"""Keys whose value is a path."""
