"""A job file (YAML), in the layout of EriDiffusion and ai-toolkit, as a graph of Graft's nodes.

The rule: every key of a file is either honoured or refused by name, with the nearest known one or the reason.
`job_keys.py` says what each key sets and `job_graph.py` what the graph is, so that the command line, the
Training Job node and an exported graph all do the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .config import unknown_key
from .family import CONVOLUTIONS
from .job_graph import NODES, Prompt, graph
from .job_keys import DATASET_KEYS, KEYS, NOISE, ROOT_KEYS, TEXT_ENCODERS, Read, Settings

DATASETS = "graft_datasets"
"""Kind of folder, in extra_model_paths.yaml, that holds images."""


@dataclass(frozen=True)
class Job:
    """What a job file asks for."""

    name: str
    prompt: Prompt
    folders: Mapping[str, tuple[Path, ...]]
    """Kind of file, as ComfyUI calls it -> folders outside ComfyUI that the job names."""
    output: Path
    """`training_folder`: ComfyUI's output folder for this job."""
    device: str = "cuda:0"
    log_every: int = 0
    document: Mapping[str, Any] = field(default_factory=dict)
    """The file as it was read; it goes into the LoRA's metadata."""

    def node(self, kind: str) -> str:
        """Return the number of the only node of class `kind`."""
        return next(number for number, node in self.prompt.items() if node["class_type"] == kind)

    def nodes(self, kind: str) -> list[dict[str, Any]]:
        """Return the nodes of class `kind`."""
        return [node for node in self.prompt.values() if node["class_type"] == kind]


def read_job(path: Path) -> Job:
    """Read the job file `path`. Paths in it are relative to its folder.

    Raises ValueError for YAML that cannot be read, a key that is not known, and a value that cannot be used.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: this is no readable YAML file: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path.name}: expected 'job:' and 'config:'; see example_workflows/jobs.")
    try:
        return compile_job(document, path.resolve().parent)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def compile_job(document: Mapping[str, Any], folder: Path) -> Job:
    """Return the job that the parsed file `document` in `folder` asks for."""
    around = _settings(document, ROOT_KEYS)
    process, datasets = _parts(document)
    settings = _settings(process, KEYS, before=around)
    sets = [_settings(entry, DATASET_KEYS, f"datasets[{i}].") for i, entry in enumerate(datasets)]
    _require(settings, "run.name", "config.name", "the name of the run")
    _require(settings, "run.type", "type", "sd_trainer")
    _require(settings, "base.model", "model.name_or_path", "the base model's file")
    for i, entry in enumerate(sets):
        _require(entry, "dataset.folder", f"datasets[{i}].folder_path", "the folder of the images")
        if "may.trigger" in settings:
            entry.setdefault("dataset.trigger", settings["may.trigger"])
    inputs = _by_node(derive(settings))
    run, places = inputs.pop("run"), _Places(folder)
    name = run["name"]
    _place_models(inputs["base"], places)
    for entry in sets:
        entry["dataset.folder"] = places.dataset(entry["dataset.folder"])
    prompt = graph(inputs, [_by_node(entry) for entry in sets])
    return Job(
        name,
        prompt,
        {kind: tuple(dict.fromkeys(found)) for kind, found in places.folders.items()},
        folder / run.get("output", "output"),
        run.get("device", "cuda:0"),
        run.get("log_every", 0),
        _replaced(document, name),
    )


def flat(
    values: Mapping[str, Any], where: str, known: Mapping[str, Any], *, shown: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested dicts; empty values (YAML's null) say nothing.

    Raises ValueError naming a key that leads to none of `known`, and the nearest that would.
    """
    for name, value in values.items():
        key = f"{where}{name}"
        if key in known:
            if value is not None:
                yield key, value
        elif not any(other.startswith(f"{key}.") for other in known):
            below = [other.removeprefix(where) for other in known if other.startswith(where)]
            siblings = dict.fromkeys(other.partition(".")[0] for other in below)
            raise unknown_key(str(name), siblings, where=shown + where)
        elif isinstance(value, Mapping):
            yield from flat(value, f"{key}.", known, shown=shown)
        elif value is not None:
            raise ValueError(f"{shown}{key}: expected keys below it, found {value!r}.")


def model_paths(job: Job) -> dict[str, dict[str, str]]:
    """Return the content of an extra_model_paths.yaml that tells ComfyUI of the job's folders."""
    lines = {kind: "\n".join(map(str, folders)) for kind, folders in job.folders.items()}
    return {"graft_job": lines} if lines else {}


def derive(settings: Settings) -> Settings:
    """Return the settings with those resolved that several keys decide together ("may.*", read here)."""
    done = {name: value for name, value in settings.items() if not name.startswith("may.")}
    may = {name.removeprefix("may."): v for name, v in settings.items() if name.startswith("may.")}
    name, arch = done["run.name"], may.get("arch")
    if may.get("use_ema", "ema_decay" in may):
        done["optimizer.ema_decay"] = may.get("ema_decay", 0.99)
    if may.get("streaming"):
        done["memory.base"] = "offload"
        done |= {"memory.budget_gb": may["limit"]} if "limit" in may else {}
    elif "limit" in may:
        raise ValueError("train.streaming_memory_limit_gb: needs train.use_layer_streaming: true.")
    if may.get("quantize") and may.get("streaming"):
        raise ValueError(
            "model.quantize and train.use_layer_streaming are both true: the base is either rounded to 8 "
            "bits or kept in host memory; leave one out."
        )
    if may.get("low_vram") and not may.get("streaming"):
        done["memory.base"] = "offload"
    if may.get("quantize"):
        done["memory.base"] = "fp8"
    _train_convolutions(done, may)
    scheduler = may.get("noise_scheduler")
    if arch and scheduler and NOISE[arch] != scheduler:
        raise ValueError(
            f"train.noise_scheduler: {scheduler!r} does not go with model.arch {arch!r}, which is trained by "
            f"{NOISE[arch]!r}; leave it out: the model decides."
        )
    if arch == "flux" and any(name.startswith("sample.") for name in done):
        done["sample.cfg"] = 1.0
    if "guidance_scale" in may:
        done["sample.guidance" if arch == "flux" else "sample.cfg"] = may["guidance_scale"]
    if may.get("disable_sampling") or not any(key.startswith("sample.") for key in done):
        done = {key: value for key, value in done.items() if not key.startswith("sample.")}
    elif not done.get("sample.prompts"):
        raise ValueError("sample.prompts: nothing to draw; list some, or set train.disable_sampling: true.")
    if "optimizer.schedule" not in done and "optimizer.warmup_steps" in done:
        done["optimizer.schedule"] = "constant"
    return done | {"train.name": name, "save.name": name}


def _train_convolutions(done: Settings, may: Mapping[str, Any]) -> None:
    """Train convolutions too, where the file gives them a rank; their alpha is by default the same.

    1x1 convolutions count as linear layers (ai-toolkit, toolkit/lora_special.py).
    """
    if "conv" not in may:
        if "conv_alpha" in may:
            raise ValueError("network.conv_alpha: needs network.conv, the rank of convolutions.")
        return
    rank = done.get("lora.rank", NODES["lora"].inputs["rank"])
    conv, alpha = may["conv"], done.get("lora.alpha") or rank
    conv_alpha = may.get("conv_alpha") or conv
    done["lora.targets"] = "all"
    for name, value, linear in (("ranks", conv, rank), ("alphas", conv_alpha, alpha)):
        if value != linear:
            done[f"lora_settings.{name}"] = "\n".join(f"{part} = {value:g}" for part in CONVOLUTIONS)


class _Places:
    """Where the files are that a job names, and by which name ComfyUI will find them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folders: dict[str, list[Path]] = {}

    def file(self, name: str, key: str, kinds: Sequence[str]) -> str:
        """Return ComfyUI's name of a model file: its own, where the file lies outside ComfyUI."""
        if not name.endswith((".safetensors", ".sft")):
            raise ValueError(
                f"{key}: {name!r} is no .safetensors file; give the path of one on this machine, or its name "
                "in ComfyUI's models folder. Nothing is downloaded."
            )
        path = self.folder / Path(name).expanduser()
        if not path.is_file():
            if Path(name).is_absolute() or name.startswith("."):
                raise ValueError(f"{key}: there is no file {path}.")
            return name
        for kind in kinds:
            self.folders.setdefault(kind, []).append(path.resolve().parent)
        return path.name

    def dataset(self, name: str) -> str:
        """Return the name of a folder of images: its last part, where it lies outside ComfyUI."""
        path = self.folder / Path(name).expanduser()
        if not path.is_dir():
            return name
        path = path.resolve()
        known = self.folders.setdefault(DATASETS, [])
        if any(other.name == path.name and other != path for other in known):
            raise ValueError(f"datasets: two folders are called {path.name!r}; rename one of them.")
        known.append(path)
        return path.name


def _place_models(base: dict[str, Any], places: _Places) -> None:
    base["model"] = places.file(base["model"], "model.name_or_path", ("checkpoints", "diffusion_models"))
    if "vae" in base:
        base["vae"] = places.file(base["vae"], "model.vae_path", ("vae",))
    given = [(key, base.pop(key)) for key in TEXT_ENCODERS if key in base]
    if len(given) > 3:
        raise ValueError(f"model: {len(given)} text encoders are given; a model takes at most three.")
    for slot, (key, name) in enumerate(given):
        base[f"text_encoder_{slot + 1}"] = places.file(name, f"model.{key}", ("text_encoders",))


def _parts(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """Return the process of a job file, and its datasets apart."""
    config = document.get("config")
    processes = config.get("process") if isinstance(config, Mapping) else None
    if not isinstance(processes, list) or len(processes) != 1 or not isinstance(processes[0], Mapping):
        raise ValueError("config.process: expected one entry, as '- type: sd_trainer' and its keys.")
    process = dict(processes[0])
    datasets = process.pop("datasets", None)
    if not isinstance(datasets, list) or not datasets or not all(isinstance(d, Mapping) for d in datasets):
        raise ValueError("datasets: expected a list with at least one '- folder_path: ...'.")
    return process, datasets


def _settings(
    values: Mapping[str, Any], table: Mapping[str, Read], where: str = "", *, before: Settings | None = None
) -> Settings:
    """Return what the keys of `values` set, beside what was set before.

    Raises ValueError when two keys set one input to different values.
    """
    settings: Settings = dict(before or {})
    origin: dict[str, str] = {}
    for key, value in flat(values, "", table, shown=where):
        for target, setting in table[key](value, f"{where}{key}").items():
            if setting is None:
                continue
            if settings.get(target, setting) != setting:
                other = origin.get(target, "a key under meta")
                raise ValueError(f"{where}{key} and {other} ask for different things; keep one.")
            settings[target], origin[target] = setting, f"{where}{key}"
    return settings


def _require(settings: Settings, target: str, key: str, what: str) -> None:
    if not settings.get(target):
        raise ValueError(f"{key}: missing; it is {what}.")


def _by_node(settings: Settings) -> dict[str, dict[str, Any]]:
    nodes: dict[str, dict[str, Any]] = {}
    for target, value in settings.items():
        node, _, name = target.partition(".")
        nodes.setdefault(node, {})[name] = value
    return nodes


def _replaced(value: Any, name: str) -> Any:
    """Return a part of the file with "[name]" replaced by the job's name, as plain JSON values."""
    if isinstance(value, Mapping):
        return {str(key): _replaced(inner, name) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, name) for inner in value]
    if isinstance(value, str):
        return value.replace("[name]", name)
    return value if isinstance(value, int | float | bool | None) else str(value)
