"""Every node explains itself, and a setting is written once: in the field of its config."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from comfy_api.latest import io

import graft
from graft.dev.write_help import files
from graft.nodes.all_nodes import ALL_NODES
from graft.nodes.sockets import OptimizerSettings, Saving
from graft.training.config import AdapterConfig, MemoryConfig, ObjectiveConfig, TrainConfig
from graft.training.data.config import DatasetConfig

ROOT = Path(graft.__file__).parent
LANGUAGES = ("en", "zh", "ja", "de")
SCHEMAS = {node.define_schema().node_id: node.define_schema() for node in ALL_NODES}


def inputs(schema):
    return {entry.id: entry for entry in schema.inputs}


@pytest.fixture(scope="module", params=LANGUAGES)
def names(request):
    path = ROOT / "locales" / request.param / "nodeDefs.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.feature(142)
def test_every_node_has_a_help_page_and_nothing_else_has_one():
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "web" / "docs").glob("*.md")}
    assert pages.keys() == SCHEMAS.keys()
    for node, text in pages.items():
        assert text.startswith(f"# {SCHEMAS[node].display_name}\n") and "## Example" in text


@pytest.mark.parametrize(
    ("path", "text"), list(files(list(SCHEMAS.values()))), ids=lambda p: Path(p).stem[:30]
)
def test_tables_of_help_pages_and_english_names_are_those_of_the_schemas(path, text):
    assert path.read_text(encoding="utf-8") == text, "run python dev/write_help.py"


def test_a_language_names_only_what_there_is(names):
    """What it lacks is shown in English."""
    assert names.keys() <= SCHEMAS.keys()
    for node, entry in names.items():
        outputs = {str(number) for number, _ in enumerate(SCHEMAS[node].outputs)}
        given = entry.get("outputs", {})
        assert entry["inputs"].keys() <= inputs(SCHEMAS[node]).keys() and given.keys() <= outputs, node
        assert entry["display_name"] and all(
            named["name"] for named in (*entry["inputs"].values(), *given.values())
        ), node


def test_no_text_holds_what_the_editor_takes_for_a_placeholder(names):
    texts = re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(names, ensure_ascii=False))
    assert [text for text in texts if re.search(r"[{}@$|]", text)] == []


def test_no_output_is_shown_by_the_name_of_a_type_that_only_graft_has():
    shown = [name for node in ALL_NODES for name in node.RETURN_NAMES]
    assert "state" in shown and not [name for name in shown if name.startswith("GRAFT_")]


@pytest.mark.feature(142)
def test_every_input_has_a_tooltip_and_every_node_a_description():
    bare = [
        (node, entry.id)
        for node, schema in SCHEMAS.items()
        for entry in schema.inputs
        if len(entry.tooltip or "") < 6
    ]
    assert bare == [] and all(len(schema.description) > 20 for schema in SCHEMAS.values())


SETTINGS = {
    "GraftDatasetSettings": DatasetConfig(),
    "GraftOptimizerSettings": OptimizerSettings(),
    "GraftObjectiveSettings": ObjectiveConfig(),
    "GraftMemorySettings": MemoryConfig(),
    "GraftCheckpointSettings": Saving(),
}
"""Node of settings -> what it gives with every widget as it is."""


@pytest.mark.parametrize("name", SETTINGS)
def test_the_widgets_of_a_node_of_settings_are_its_configs_fields(name, graft_nodes):
    """Other values of all widgets are other values of as many fields."""
    node, default = graft_nodes[name], SETTINGS[name]
    shown = {entry.id: entry.default for entry in SCHEMAS[name].inputs}
    assert node.execute(**shown).args == node.execute().args == (default,)
    for entry in SCHEMAS[name].inputs:
        [changed] = node.execute(**{**shown, entry.id: other_than_default(entry)}).args
        assert type(changed) is type(default) and len(differences(default, changed)) == 1, entry.id


def other_than_default(entry):
    if isinstance(entry, io.Combo.Input):
        return next(option for option in entry.options if option != entry.default)
    if isinstance(entry, io.Boolean.Input):
        return not entry.default
    if isinstance(entry, io.String.Input):
        return "#000000" if entry.id == "background" else "other"
    between = entry.default + (entry.max - entry.default) / 4 if entry.default < entry.max else entry.max / 2
    return int(between) if isinstance(entry, io.Int.Input) else between


def differences(one, other):
    """The paths of the values in which two configs differ."""
    if dataclasses.is_dataclass(one):
        found = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)}
        return [f"{name}.{path}" for name, pair in found.items() for path in differences(*pair)]
    return [""] if one != other else []


@pytest.mark.parametrize("config", [AdapterConfig, DatasetConfig, ObjectiveConfig, TrainConfig])
def test_a_config_is_made_by_the_names_of_its_fields_alone(config):
    with pytest.raises(TypeError, match="positional argument"):
        config(dataclasses.astuple(config())[0])


CONFIGS = {
    "MemoryConfig": ("config.py", "GraftMemorySettings", "memory"),
    "AdapterConfig": ("config.py", "GraftLoraSettings", "lora_settings"),
    "ScheduleConfig": ("config.py", "GraftOptimizerSettings", "optimizer"),
    "CaptionConfig": ("data/config.py", "GraftDatasetSettings", "dataset_settings"),
}
"""Config -> its file in training/, the node that shows it, and the name of that node in jobs."""
LINE = '    made_up: int = setting(3, "Made up for a test.", low=1, high=9, added=True)\n'
LOOK = """
import json, runpy, sys
runpy.run_path("__main__.py")["import_graft"]()
from graft.dev import write_help
write_help.main()
from graft.nodes.all_nodes import ALL_NODES
from graft.training.config import AdapterConfig
from graft.training.job.graph import NODES
nodes, found = {node.define_schema().node_id: node for node in ALL_NODES}, {}
for config, (_, name, job) in json.loads(sys.argv[1]).items():
    widget = nodes[name].define_schema().inputs[-1]
    wires = {"lora": AdapterConfig()} if config == "AdapterConfig" else {}
    found[config] = {
        "widget": [widget.id, widget.get_io_type(), widget.optional, widget.as_dict()],
        "default": repr(nodes[name].execute(**wires).args[0]),
        "given": repr(nodes[name].execute(**wires, made_up=5).args[0]),
        "job": NODES[job].inputs["made_up"],
        "in the graph of a job": "made_up" in NODES[job].written,
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory, comfyui):
    """A copy of Graft in which each of CONFIGS has one more line, and what it then shows."""
    copy = tmp_path_factory.mktemp("graft")
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / name, copy)
    for room in ("training", "nodes", "commands", "starter", "dev", "web", "locales"):
        left_out = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.png")
        shutil.copytree(ROOT / room, copy / room, ignore=left_out)
    for config, (file, _, _) in CONFIGS.items():
        path = copy / "training" / file
        before, fields = path.read_text(encoding="utf-8").split(f"class {config}:", 1)
        fields = fields.replace("\n    def __post_init__", f"{LINE}\n    def __post_init__", 1)
        path.write_text(f"{before}class {config}:{fields}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps(CONFIGS)],
        cwd=copy, env={**os.environ, "COMFYUI_PATH": str(comfyui)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return copy, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("config", CONFIGS)
def test_a_new_setting_is_one_line_in_its_config(config, copy):
    """The line alone makes the last widget of a node, a row of its help page, a name, and jobs' default."""
    copy, found = copy[0], copy[1][config]
    name, kind, optional, widget = found["widget"]
    assert (name, kind, optional) == ("made_up", "INT", True)
    assert (widget["default"], widget["min"], widget["max"]) == (3, 1, 9)
    assert widget["tooltip"] == "Made up for a test."
    assert "made_up=3" in found["default"] and "made_up=5" in found["given"]
    assert found["job"] == 3 and not found["in the graph of a job"]
    page = (copy / "web" / "docs" / f"{CONFIGS[config][1]}.md").read_text(encoding="utf-8")
    assert "- **made up** (3): Made up for a test.\n" in page
    english = json.loads((copy / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    assert english[CONFIGS[config][1]]["inputs"]["made_up"]["name"] == "made up"
