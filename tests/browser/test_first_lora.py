"""The template in the editor, as a person uses it: open, run, watch, cancel, load the result."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import graft
from graft.dev.make_workflows import LAYOUTS

pytestmark = pytest.mark.browser
API = json.loads((Path(graft.__file__).parent / "example_workflows" / "api" / "first_lora.json").read_text())
DATASET, LORA, TRAIN, SAVE, LATENT, SAMPLER = 2, 4, 5, 6, 9, 10


@pytest.fixture(scope="module", autouse=True)
def opened(editor):
    editor.open()
    editor.open_template(LAYOUTS["first_lora"].title)


@pytest.fixture(scope="module")
def small(editor, opened):
    """The template on four squares of 64 pixels, three steps."""
    editor.set(DATASET, folder="tiny", resolution="64")
    editor.set(LORA, rank=2)
    editor.set(TRAIN, steps=3, batch_size=2, name="browser")
    editor.set(SAVE, name="browser")
    editor.set(LATENT, width=64, height=64, batch_size=1)
    editor.set(SAMPLER, steps=2)


def test_the_template_opens_as_the_api_workflow(editor):
    prompt = editor.page.evaluate("app.graphToPrompt().then(p => p.output)")
    assert prompt == API
    missing = """app.graph.nodes.map(n => n.type)
        .filter(type => !LiteGraph.registered_node_types[type] && !type.endsWith('Note'))"""
    assert editor.page.evaluate(missing) == []


def test_every_widget_of_graft_has_a_label_and_a_tooltip(editor):
    widgets = editor.page.evaluate("""app.graph.nodes.filter(n => n.type.startsWith('Graft')).flatMap(n => {
        const { required, optional } = n.constructor.nodeData.input
        const tooltip = w => (required?.[w.name] ?? optional?.[w.name])?.[1]?.tooltip ?? ''
        return n.widgets.filter(w => w.serialize !== false)
            .map(w => [n.type, w.label || w.name, tooltip(w)]) })""")
    assert len(widgets) > 20
    assert [w for w in widgets if not w[1] or len(w[2]) < 10] == []


def test_run_trains_shows_progress_saves_and_draws(editor, small, running):
    editor.watch_progress()
    editor.run()
    editor.page.wait_for("window.graftSeen.length")
    editor.wait_until_idle()
    assert [TRAIN, 3, 3] in editor.page.evaluate("window.graftSeen")
    assert (running.base / "output" / "loras" / "browser.safetensors").is_file()
    editor.page.wait_for("app.nodeOutputs[12]?.images?.length")  # drawn when it is in view


def test_the_saved_lora_can_be_chosen_in_load_lora(editor, small):
    editor.press("r")
    editor.page.wait_for("""(() => {
        const { widgets } = LiteGraph.createNode('LoraLoader')
        const { values } = widgets.find(w => w.name === 'lora_name').options
        return values.includes('browser.safetensors') })()""")


def test_cancel_stops_at_once_and_run_again_goes_on(editor, small, running):
    logged = len(running.log())
    editor.watch_progress()
    editor.set(TRAIN, steps=2000, seed=1)
    editor.run()
    editor.page.wait_for("window.graftSeen.some(([node, value]) => node === 5 && value > 3)")
    editor.cancel()
    editor.wait_until_idle()
    reached = max(value for node, value, _ in editor.page.evaluate("window.graftSeen") if node == TRAIN)
    assert 3 < reached < 2000
    editor.set(TRAIN, steps=reached + 40)
    editor.run()
    editor.wait_until_idle()
    resumed = [int(step) for step in re.findall(r"resuming at step (\d+)", running.log()[logged:])]
    assert len(resumed) == 1 and reached <= resumed[0] < reached + 40  # not every step is told to the page


def test_graft_says_nothing_bad_on_the_console(editor):
    ours = [
        text
        for level, text in editor.page.messages
        if level in ("error", "warning") and "graft" in text.lower()
    ]
    assert [text for text in ours if "api.comfy.org" not in text] == []  # registry look-ups, offline here
