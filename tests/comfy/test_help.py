"""Every node explains itself: a help page, tooltips, and its names in every language that Graft comes in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import graft
from graft.nodes.all_nodes import ALL_NODES

ROOT = Path(graft.__file__).parent
LANGUAGES = ("en", "zh", "ja", "de")
WIDGETS = {"COMBO", "INT", "FLOAT", "STRING", "BOOLEAN"}
SCHEMAS = {node.define_schema().node_id: node.define_schema() for node in ALL_NODES}


def inputs(schema):
    return {entry.id: entry for entry in schema.inputs}


@pytest.fixture(scope="module", params=LANGUAGES)
def names(request):
    path = ROOT / "locales" / request.param / "nodeDefs.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_node_has_a_help_page_that_names_each_input_and_nothing_else_has_one():
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "web" / "docs").glob("*.md")}
    assert pages.keys() == SCHEMAS.keys()
    for node, text in pages.items():
        assert text.startswith(f"# {SCHEMAS[node].display_name}\n") and "## Example" in text
        listed = re.findall(r"^\| ([^|]+?) \|", text.replace("| input |", ""), re.MULTILINE)
        assert listed == [name.replace("_", " ") for name in inputs(SCHEMAS[node])], node


def test_every_language_names_every_node_and_its_inputs_alone(names):
    assert names.keys() == SCHEMAS.keys()
    for node, entry in names.items():
        assert entry["display_name"] and entry["inputs"].keys() == inputs(SCHEMAS[node]).keys(), node
        outputs = {str(number) for number, _ in enumerate(SCHEMAS[node].outputs)}
        given = entry.get("outputs", {})
        assert given.keys() <= outputs and all(
            named["name"] for named in (*entry["inputs"].values(), *given.values())
        ), node


def test_no_text_holds_what_the_editor_takes_for_a_placeholder(names):
    texts = re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(names, ensure_ascii=False))
    assert [text for text in texts if re.search(r"[{}@$|]", text)] == []


def test_english_names_are_those_of_the_schemas():
    english = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    for node, schema in SCHEMAS.items():
        assert english[node]["display_name"] == schema.display_name
        assert {k: v["name"] for k, v in english[node]["inputs"].items()} == {
            name: name.replace("_", " ") for name in inputs(schema)
        }
        shown = {str(i): output.display_name.replace("_", " ") for i, output in enumerate(schema.outputs)}
        given = {number: output["name"] for number, output in english[node].get("outputs", {}).items()}
        assert {**shown, **given} == shown


def test_no_output_is_shown_by_the_name_of_a_type_that_only_graft_has():
    shown = [name for node in ALL_NODES for name in node.RETURN_NAMES]
    assert "state" in shown and not [name for name in shown if name.startswith("GRAFT_")]


def test_every_widget_has_a_tooltip_and_every_node_a_description():
    bare = [
        (node, entry.id)
        for node, schema in SCHEMAS.items()
        for entry in schema.inputs
        if entry.io_type in WIDGETS and len(entry.tooltip or "") < 10
    ]
    assert bare == [] and all(len(schema.description) > 20 for schema in SCHEMAS.values())
