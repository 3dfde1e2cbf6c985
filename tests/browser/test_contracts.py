"""A workflow that an older editor saved asks today's for the same graph."""

from __future__ import annotations

import json

import pytest

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
