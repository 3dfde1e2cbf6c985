"""A workflow that an older editor saved asks today's for the same graph."""

from __future__ import annotations

import json

import pytest

from graft.dev.make_workflows import BLUEPRINT
from graft.tests.contracts.make import HERE

pytestmark = pytest.mark.browser


def test_the_editor_sends_a_saved_workflow_as_it_was(editor):
    workflow, graph = (
        json.loads((HERE / name).read_text(encoding="utf-8")) for name in ("editor.json", "graph.json")
    )
    editor.open()
    editor.load(workflow)
    sent = editor.page.evaluate("app.graphToPrompt().then(({ output }) => output)")
    for key, values in graph.items():
        if values["class_type"].startswith("Graft"):
            sent_then = {name: sent[key]["inputs"][name] for name in values["inputs"]}
            assert sent_then == values["inputs"]  # inputs that came later are sent too


def test_the_blueprint_s_own_node_sends_what_it_shows(editor):
    whole = json.loads(BLUEPRINT.read_text(encoding="utf-8"))
    editor.open()
    editor.load(whole, "blueprint")
    editor.set(1, folder="tiny", resolution="64", rank=2, steps=3, name="from_blueprint")
    sent = editor.page.evaluate("app.graphToPrompt().then(({ output }) => output)")
    inputs = {entry["class_type"]: entry["inputs"] for entry in sent.values()}
    assert inputs["GraftLoadDataset"]["folder"] == "tiny"
    assert inputs["GraftLoadDataset"]["resolution"] == "64" and inputs["GraftBuildLora"]["rank"] == 2
    assert inputs["GraftTrainSteps"]["steps"] == 3 and inputs["GraftTrainSteps"]["learning_rate"] == 1e-4
    assert inputs["GraftTrainSteps"]["name"] == inputs["GraftSaveLora"]["name"] == "from_blueprint"
    assert len(sent) == 5
