"""Graphs, schemas and LoRA files that older code wrote, as today's nodes in ComfyUI have them.

What saved graphs need: the editor keeps the values of a node's widgets as a list without names, and puts
them into the widgets in order (LGraphNode.configure). It finds input sockets by name and outputs by position.
A graph in API form names its inputs, and ComfyUI refuses one that lacks a required input. So node ids, names
and types stay; a new widget is optional and stands behind all others of its node, made by `widgets.added`; a
new socket is optional; a new output comes last; a menu loses no choice.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import comfy.lora
import folder_paths
import pytest
import torch
from comfy_api.latest import io
from safetensors import safe_open
from safetensors.torch import load_file

from graft.nodes.all_nodes import ALL_NODES
from graft.nodes.node import Files
from graft.nodes.widgets import added, widget
from graft.tests.contracts.make import HERE, TRAIN_STEPS
from graft.training import config as settings
from graft.training.comfy import paths
from graft.training.comfy.files.initial_lora import save_initial_state
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.loading import load_base
from graft.training.comfy.run import chart_run as shown
from graft.training.comfy.run.chart_run import added_inputs
from graft.training.comfy.run.graph_run import QueuedNode
from graft.training.config import AdapterConfig, TrainConfig, from_dict
from graft.training.data import resolve_dataset
from graft.training.files.lora.read import read_lora
from graft.training.files.lora.write import lora_tensors
from graft.training.run.queued import run_settings, settings_of
from graft.training.tools.merge import digest as lora_digest

pytestmark = pytest.mark.usefixtures("whole_base")

LORA = HERE / "lora.safetensors"
CHECKPOINT = "from checkpoint"


def read(name):
    """Return what a file of the contracts holds."""
    return json.loads((HERE / name).read_text(encoding="utf-8"))


KINDS, KNOWN = read("nodes.json"), read("known_comfy.json")
NEWER = {
    *("GraftDatasetFromLatents", "GraftDatasetFromVideos", "GraftDatasetReport"),
    *("GraftSliderFromPairs", "GraftSliderFromWords"),
    *("GraftCaptionDataset", "GraftDatasetImages"),
}
"""Nodes that came after the saved workflow."""


def described(node):
    """What saved graphs rely on: inputs as the editor shows them, required ones first, and outputs."""
    schema = node.GET_SCHEMA()
    inputs = sorted(schema.inputs, key=lambda entry: entry.optional)
    return {
        "inputs": [described_input(entry) for entry in inputs],
        "outputs": [[output.id, output.get_io_type()] for output in schema.outputs],
    }


def described_input(entry):
    found = {"name": entry.id, "type": entry.get_io_type(), "optional": entry.optional}
    if isinstance(entry, io.WidgetInput):
        found["default"] = None if isinstance(entry, Files) else entry.default
    if isinstance(entry, io.Combo.Input) and not isinstance(entry, Files):
        found["options"] = list(entry.options)
    return found


def widgets(inputs):
    return [entry for entry in inputs if "default" in entry]


def test_no_node_is_missing_and_none_is_unknown(graft_nodes):
    assert {node.GET_SCHEMA().node_id for node in ALL_NODES} == KINDS.keys(), "list a new node in nodes.json"


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_has_all_that_it_had_in_the_same_order(kind, graft_nodes):
    before, now = KINDS[kind], described(graft_nodes[kind])
    assert now["outputs"][: len(before["outputs"])] == before["outputs"]
    assert [entry["name"] for entry in widgets(before["inputs"])] == [
        entry["name"] for entry in widgets(now["inputs"])[: len(widgets(before["inputs"]))]
    ]
    today = {entry["name"]: entry for entry in now["inputs"]}
    for entry in before["inputs"]:
        found = today.pop(entry["name"])
        assert set(entry.pop("options", ())) <= set(found.pop("options", ()))
        assert set(entry.pop("type").split(",")) <= set(found.pop("type").split(","))
        assert found == entry or found == {**entry, "optional": True}
    marked = added_inputs(kind)
    for name, entry in today.items():
        assert entry["optional"] and ("default" not in entry or name in marked), f"widgets.added makes {name}"


def test_a_saved_workflow_is_the_same_graph(graft_nodes):
    workflow, graph = read("editor.json"), read("graph.json")
    links = {link[0]: link for link in workflow["links"]}
    assert {node["type"] for node in workflow["nodes"]} >= KINDS.keys() - NEWER
    for node in workflow["nodes"]:
        if node["type"] not in KINDS:
            continue
        names = [name for entry in schema_inputs(graft_nodes[node["type"]]) for name in slots(entry)]
        values = dict(zip(names, node.get("widgets_values", ())))
        values.pop(None, None)
        for slot in node["inputs"]:
            if slot["link"] is not None:
                _, source, output, *_ = links[slot["link"]]
                values[slot["name"]] = [str(source), output]
        assert values == graph[str(node["id"])]["inputs"], node["type"]


def schema_inputs(node):
    return sorted(node.GET_SCHEMA().inputs, key=lambda entry: entry.optional)


def slots(entry):
    """The names of what an input puts into `widgets_values`, None for the extra value behind a seed."""
    if isinstance(entry, io.WidgetInput):
        yield entry.id
        if getattr(entry, "control_after_generate", None):
            yield None


def test_every_wire_of_a_saved_graph_fits(graft_nodes):
    graph = read("graph.json")
    for values in graph.values():
        if values["class_type"] not in KINDS:
            continue
        accepted = {entry["name"]: entry for entry in described(graft_nodes[values["class_type"]])["inputs"]}
        assert values["inputs"].keys() <= accepted.keys()
        for name, value in values["inputs"].items():
            source = graph[value[0]]["class_type"] if isinstance(value, list) else ""
            if source in KINDS:
                _, kind = described(graft_nodes[source])["outputs"][value[1]]
                assert kind in accepted[name]["type"].split(",")


@pytest.mark.parametrize("name", ("demo/dataset", "demo/validation", "demo/base_style"))
def test_the_pictures_of_saved_graphs_are_there(name, graft_nodes):
    folder = resolve_dataset(name, paths.dataset_roots())
    assert sorted(path.name for path in folder.glob("*.png")) == KNOWN["pictures"][name]


def test_the_files_of_saved_graphs_are_in_the_menus(graft_nodes):
    [model, encoder, *_] = graft_nodes["GraftLoadBaseModel"].GET_SCHEMA().inputs
    assert "graft_tiny_sd3.safetensors" in model.options
    assert "graft_tiny_clip_l.safetensors" in encoder.options
    [folder] = (e for e in graft_nodes["GraftLoadDataset"].GET_SCHEMA().inputs if e.id == "folder")
    assert isinstance(folder, Files)  # a menu where a name that it does not show may be given


# The starter model: its runs and its LoRAs


def first_lora(**train):
    """The graph that every newcomer has queued, up to the LoRA."""
    graph = {key: node for key, node in read("first_lora.json").items() if int(key) <= 6}
    graph["5"]["inputs"] |= {"steps": 1, **train}
    return graph


@pytest.fixture(scope="module")
def starter(graft_nodes):
    """The starter model as a denoiser, and the LoRA in models/loras."""
    loras = Path(folder_paths.get_folder_paths("loras")[0])
    loras.mkdir(exist_ok=True)
    shutil.copy(LORA, loras / LORA.name)
    model, _, _ = load_base("graft_tiny_sd3.safetensors", [], CHECKPOINT, "auto")
    return ComfyDenoiser(model)


def test_the_first_run_of_everybody_is_found_again(execute, base):
    execute(first_lora(name="contract"))
    [run] = (base / "output" / "graft").glob("contract-*")
    other = "another starter model makes other runs: then make.write_starter()"
    assert run.name == f"contract-{KNOWN['run']}", other


def test_a_loras_metadata_say_what_it_was_trained_on(starter):
    with safe_open(LORA, "pt") as file:
        metadata = file.metadata()
    assert metadata["graft_base"] == KNOWN["base"] == starter.fingerprint
    adapter = from_dict(AdapterConfig, json.loads(metadata["graft_adapter"]))
    config = from_dict(TrainConfig, json.loads(metadata["graft_config"]))
    assert (
        config.adapter == adapter == AdapterConfig(rank=1, alpha=0.5, include=("*joint_blocks.0.x_block*",))
    )
    assert (config.seed, config.optimizer.lr, metadata["trained_words"]) == (5, 0.001, '["p3r5on"]')
    assert json.loads(metadata["prompt"])["6"]["class_type"] == "GraftSaveLora"


def test_a_lora_is_read_bit_for_bit_by_starting_from_it_and_by_comfyuis_loader(starter):
    assert lora_digest(read_lora(LORA)) == KNOWN["lora"]
    config = AdapterConfig(start_from=LORA.name, include=("*joint_blocks.0.x_block*",))
    handle, left_out = save_initial_state(starter, config, seed=0)
    state, tensors = handle.load(), load_file(LORA)
    assert handle.path.name == KNOWN["start"] and not left_out and handle.step == 0
    written = lora_tensors(state, starter.family)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    keys = comfy.lora.model_lora_keys_unet(starter.patcher.model, {})
    assert len(comfy.lora.load_lora(tensors, keys, log_missing=False)) == len(tensors) // 3 == 4


# A new widget leaves the runs of saved graphs where they are


def test_a_new_widget_at_its_default_leaves_the_settings_of_a_graph_as_they_were(graft_nodes, monkeypatch):
    @dataclass(frozen=True)
    class Newer(AdapterConfig):
        newer: int = settings.setting(3, "New.", added=True)

    graph, node = read("graph.json"), graft_nodes["GraftOptimizerSettings"]
    schema = node.GET_SCHEMA()
    made = [widget(Newer, "newer"), added(io.Combo.Input("menu", options=["a", "b"], default="b"))]
    assert [entry.optional for entry in made] == [True, True] and "newer" not in added_inputs(
        "GraftOptimizerSettings"
    )
    monkeypatch.setattr(node, "SCHEMA", replace(schema, inputs=[*schema.inputs, *made]))
    [key] = (key for key, values in graph.items() if values["class_type"] == "GraftOptimizerSettings")
    before = settings_of(graph)

    def with_values(**values):
        changed = {**graph, key: {**graph[key], "inputs": {**graph[key]["inputs"], **values}}}
        return settings_of(changed, added_inputs)

    assert with_values() == with_values(newer=3) == with_values(newer=3, menu="b") == before
    for other in (with_values(newer=4), with_values(menu="a")):
        assert {name for name in before if other[name] != before[name]} >= {key, TRAIN_STEPS}


def test_a_training_is_asked_for_by_the_settings_without_new_widgets(graft_nodes, monkeypatch):
    """Train Steps, its chart and the server's route know a run by the same digest."""
    graph, node = read("graph.json"), graft_nodes["GraftTrainSteps"]
    schema = node.GET_SCHEMA()
    newer = added(io.Int.Input("newer", default=3))
    monkeypatch.setattr(node, "SCHEMA", replace(schema, inputs=[*schema.inputs, newer]))
    before = run_settings(graph, TRAIN_STEPS)
    live = {"run": "mine", "settings": before, "node": TRAIN_STEPS, "workflow": ""}
    monkeypatch.setattr(shown, "known_runs", lambda: [live])
    for value, same in ((3, True), (4, False)):
        graph[TRAIN_STEPS]["inputs"]["newer"] = value
        assert (QueuedNode(TRAIN_STEPS, graph, {}).settings == before) is same
        assert shown.chart_runs(graph, None)[TRAIN_STEPS]["same"] is same
