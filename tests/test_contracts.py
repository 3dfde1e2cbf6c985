"""Files that older code wrote are opened by today's: the same keys, the same tensors, and the run goes on.

`tests/contracts/` holds them, `make.py` there says what they were made of. A new setting is a field of
`config.added(default)`: at its default it leaves every key as it was, and a field that is not marked so fails
here.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, fields, make_dataclass, replace

import pytest
import torch
from safetensors.torch import load_file

from graft.tests.support.runs import assert_same
from graft.training.config import ADDED, CheckpointConfig, TrainConfig, added, from_dict, to_dict
from graft.training.data import augment, cache, fingerprint, join, scan
from graft.training.files.lora.read import read_lora
from graft.training.files.lora.write import lora_tensors
from graft.training.job.read import read_job
from graft.training.loop import train
from graft.training.run.checkpoints import Checkpoints
from graft.training.run.execute import Run, execute
from graft.training.run.queued import read_queued, run_settings, settings_of
from graft.training.run.run_log import read_log
from graft.training.run.saved_state import load_state, open_state, save_state
from graft.training.tools.merge import digest as lora_digest

from .contracts import make
from .contracts.make import CONFIGS, HERE, PARTS, PICTURES, RUN, STATE, STEPS, go, tree
from .support.datasets import FakeEncoder
from .support.tiny import FAMILY, TinyDataset, TinyDenoiser, TinySamples

KNOWN = json.loads((HERE / "known.json").read_text(encoding="utf-8"))
[FOLDER] = (HERE / "run").iterdir()
STATES = [HERE / "state", *sorted((FOLDER / "checkpoints").iterdir())]
KINDS = {type(found).__name__: found for config in CONFIGS for found in tree(config)}


@pytest.fixture
def run(tmp_path):
    """A copy of the run's folder."""
    return shutil.copytree(FOLDER, tmp_path / FOLDER.name)


@pytest.fixture
def kept(tmp_path):
    """A copy of the cache."""
    return shutil.copytree(HERE / "cache", tmp_path / "cache")


def refuse(progress):
    raise AssertionError(f"step {progress.step} was trained again")


# What is there is read as it was written


def test_a_run_has_the_key_of_its_folder():
    assert FOLDER.name == f"tiny-{make.key_of(RUN)}"


@pytest.mark.parametrize("folder", STATES, ids=lambda folder: folder.name)
def test_a_checkpoint_has_its_tensors_bit_for_bit_and_is_written_the_same(folder, tmp_path):
    handle, [file] = open_state(folder), folder.glob("*.safetensors")
    state, raw = handle.load(), load_file(file)
    parts = {"weights": state.weights, "optimizer": state.optimizer.tensors, "ema": state.ema}
    held = {f"{part}/{name}": tensor for part, found in parts.items() for name, tensor in found.items()}
    assert held.keys() == raw.keys() and all(torch.equal(held[name], raw[name]) for name in raw)
    assert state.weights and state.optimizer.tensors
    again = save_state(state, tmp_path)
    assert again.digest == handle.digest
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in (file, folder / "state.json")
    }


def test_a_run_that_is_there_costs_no_step(run):
    assert go(run, STEPS, on_step=refuse) == replace(
        open_state(STATES[-1]), path=run / STATES[-1].relative_to(FOLDER)
    )


def test_a_run_goes_on_from_its_newest_checkpoint(run):
    seen = []
    reached = go(run, STEPS + 3, on_step=lambda progress, _: seen.append(progress.step)).load()
    assert seen == [STEPS + 1, STEPS + 2, STEPS + 3]
    options = {"steps": 3, "validation": TinySamples()}
    assert_same(reached, train(TinyDenoiser(), TinyDataset(), RUN, load_state(STATES[-1]), **options))
    assert reached.ema and reached.validations[:3] == load_state(STATES[-1]).validations
    assert [entry["step"] for entry in read_log(run / "log.jsonl")] == list(range(1, STEPS + 4))
    whole = train(TinyDenoiser(), TinyDataset(), RUN, None, steps=STEPS + 3, validation=TinySamples())
    assert_close(reached.weights, whole.weights)
    assert_close(reached.ema, whole.ema)


def assert_close(these, others):
    """Kinds of CPU differ in the last bits; whatever forgot the optimizer's state differs by much more."""
    for name, tensor in these.items():
        assert (tensor - others[name]).norm() <= 1e-3 * others[name].norm(), name


def test_a_state_goes_on_in_two_parts_as_at_once():
    def further(state, steps):
        return train(TinyDenoiser(), TinyDataset(), STATE, state, steps=steps)

    start = load_state(HERE / "state")
    assert start.loss_scale is not None and start.step == 3
    assert_same(further(further(start, 1), 2), further(start, 3))


def test_every_file_of_a_run_is_read():
    run = Run(FOLDER)
    assert from_dict(TrainConfig, json.loads((FOLDER / "config.json").read_text())) == RUN
    checkpoints = Checkpoints(run)
    leading = checkpoints.leading_to(open_state(STATES[-1]))
    assert checkpoints.steps() == [3, 4, 6] == [handle.step for handle in leading]
    assert [entry["step"] for entry in read_log(FOLDER / "log.jsonl")] == list(range(1, STEPS + 1))
    graph = json.loads((HERE / "graph.json").read_text())
    assert read_queued(FOLDER) == {run_settings(graph, make.TRAIN_STEPS): STEPS}


@pytest.mark.parametrize("step", (3, 4, 6))
def test_a_runs_lora_is_the_average_of_its_checkpoint_in_bf16(step):
    run = Run(FOLDER)
    file, state = load_file(run.lora(step)), load_state(run.checkpoint(step))
    expected = lora_tensors(replace(state, weights=state.result()), FAMILY, torch.bfloat16)
    assert file.keys() == expected.keys() and all(torch.equal(file[name], expected[name]) for name in file)


def test_a_lora_file_has_the_digest_that_merges_know_it_by():
    assert lora_digest(read_lora(Run(FOLDER).lora(STEPS))) == KNOWN["lora"]


def test_cached_pictures_are_found_again(kept):
    encoder = FakeEncoder()
    data = make.encoded(HERE / "pictures", kept, encoder)
    assert found_again(encoder) and make.known(FOLDER, data)["datasets"] == KNOWN["datasets"]


def test_a_graph_has_the_settings_that_its_runs_are_known_by():
    graph = json.loads((HERE / "graph.json").read_text(encoding="utf-8"))
    assert settings_of(graph) == KNOWN["graph"]


def test_a_job_asks_for_the_same_graph():
    job = json.loads((HERE / "job.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(make.plain(read_job(HERE / "job.yaml")))) == job


def found_again(encoder):
    """Whether everything was in the cache. One that earlier versions wrote may lack the empty caption."""
    return not encoder.images and set(encoder.texts) <= {""}


# A new setting at its default leaves every key as it was


def test_every_setting_is_as_old_as_the_files_or_added():
    for kind in (*map(type, KINDS.values()), *PARTS):
        newer = {field.name for field in fields(kind) if ADDED in field.metadata}
        unmarked = [field.name for field in fields(kind) if field.name not in newer]
        assert unmarked == KNOWN["fields"].get(kind.__name__), (
            f"{kind.__name__}: a new setting is config.setting(..., added=True), and an old one stays; list "
            "the fields of a new class in known.json"
        )


@pytest.mark.parametrize("name", KINDS)
def test_defaults_have_the_digest_that_they_had(name):
    assert make.digest(KINDS[name]) == KNOWN["defaults"][name]


def newer(value, **changes):
    """Return `value` with the setting "newer", which came later and has the default 3."""
    return newer_kind(type(value))(**{f.name: getattr(value, f.name) for f in fields(value)}, **changes)


def newer_kind(kind):
    extra = [("newer", int, added(3))]
    return make_dataclass(kind.__name__, extra, bases=(kind,), frozen=True, repr=False)


def everywhere(config, path=()):
    """Yield the path of a config and of each in it."""
    yield path
    for field in fields(config):
        if hasattr(value := getattr(config, field.name), "__dataclass_fields__"):
            yield from everywhere(value, (*path, field.name))


def with_newer(config, path, **changes):
    """Return `config` with a newer setting in the config at `path`."""
    if not path:
        return newer(config, **changes)
    return replace(config, **{path[0]: with_newer(getattr(config, path[0]), path[1:], **changes)})


def shown(path):
    return ".".join(path) or "itself"


@pytest.mark.parametrize("path", list(everywhere(RUN)), ids=shown)
def test_a_new_setting_at_its_default_finds_the_old_run(path, run):
    config = with_newer(RUN, path)
    assert make.key_of(config) == make.key_of(RUN)
    options = {"steps": STEPS, "on_step": refuse, "validation": TinySamples()}
    saving = CheckpointConfig(minutes=60)
    assert execute(Run(run, saving), TinyDenoiser(), TinyDataset(), config, None, **options).step == STEPS


@pytest.mark.parametrize("path", list(everywhere(RUN)), ids=shown)
def test_another_value_of_a_new_setting_is_another_run(path):
    assert make.key_of(with_newer(RUN, path, newer=4)) != make.key_of(RUN)


@pytest.mark.parametrize("path", list(everywhere(PICTURES)), ids=shown)
def test_a_new_setting_of_pictures_at_its_default_leaves_them_as_they_were(path, kept):
    config, encoder = with_newer(PICTURES, path), FakeEncoder()
    data = cache.encode(join([scan(HERE / "pictures", c) for c in (config, make.PLAIN)]), encoder, kept)
    assert found_again(encoder) and data.fingerprint == KNOWN["datasets"][0]
    before = fingerprint(HERE / "pictures", PICTURES)
    assert fingerprint(HERE / "pictures", config) == before
    assert fingerprint(HERE / "pictures", with_newer(PICTURES, path, newer=4)) != before


@pytest.mark.parametrize("module, name", ((augment, "Jitter"), (cache, "SourceRules")))
def test_a_new_part_of_a_key_counts_at_other_values_alone(module, name, kept, monkeypatch):
    kind = newer_kind(getattr(module, name))
    monkeypatch.setattr(module, name, kind)
    encoder = FakeEncoder()
    assert make.encoded(HERE / "pictures", kept, encoder).fingerprint == KNOWN["datasets"][0]
    assert found_again(encoder)
    monkeypatch.setattr(module, name, lambda *values: kind(*values, newer=4))
    assert make.encoded(HERE / "pictures", kept, encoder).fingerprint != KNOWN["datasets"][0]


def test_a_state_of_a_newer_adapter_at_its_default_has_the_same_digest(tmp_path):
    state = load_state(HERE / "state")
    digests = [
        save_state(replace(state, adapter=newer(state.adapter, newer=value)), tmp_path / str(value)).digest
        for value in (3, 4)
    ]
    assert digests[0] == open_state(HERE / "state").digest != digests[1]


@pytest.mark.parametrize("value", (3, 4))
def test_a_new_setting_is_read_as_it_was_written(value):
    config = newer(RUN.adapter, newer=value)
    assert from_dict(type(config), to_dict(config)) == config and asdict(config)["newer"] == value


def test_a_new_input_at_its_default_leaves_the_settings_of_a_graph_as_they_were():
    graph = json.loads((HERE / "graph.json").read_text(encoding="utf-8"))
    lora = next(node for node, values in graph.items() if values["class_type"] == "GraftBuildLora")

    def with_input(value):
        inputs = {**graph[lora]["inputs"], "newer": value}
        changed = {**graph, lora: {**graph[lora], "inputs": inputs}}
        return settings_of(changed, lambda kind: {"newer": 3.0} if kind == "GraftBuildLora" else {})

    assert with_input(3) == with_input(3.0) == KNOWN["graph"]
    assert with_input(4)[lora] != KNOWN["graph"][lora]
    assert with_input(4)[make.TRAIN_STEPS] != KNOWN["graph"][make.TRAIN_STEPS]


def test_the_files_are_small_and_name_no_place_of_the_machine_that_made_them():
    files = [path for path in HERE.rglob("*") if path.is_file() and path.suffix not in (".pyc",)]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    assert not [path for path in files if os.fsencode(HERE.parents[1]) in path.read_bytes()]
