"""Train Steps shows the run that was queued with the settings that stand there, and no other one's."""

from __future__ import annotations

import json

import pytest

from graft.commands.headless.server import find_comfyui, server
from graft.dev.make_workflows import editor_file
from graft.tests.support.editor import Editor

pytestmark = pytest.mark.browser
WORKFLOW = json.loads(editor_file("first_lora").read_text("utf-8"))
DATASET, LORA, TRAIN, LATENT, SAMPLER, SAVE_IMAGE = 2, 4, 5, 9, 10, 12
STATUS = "node.widgets.find(w => w.name === 'graft_chart').element.shadowRoot.querySelector('.status')"
REPORT = "node.widgets.find(w => w.name === 'graft_text').element.value"


def wait(editor, expression):
    return editor.page.wait_for(f"(node => {expression})(app.graph.getNodeById({TRAIN}))")


def train(editor, **values):
    editor.set(TRAIN, **values)
    editor.run()
    wait(editor, f"{REPORT}.includes('{values['name']}-')")
    editor.wait_until_idle()
    wait(editor, f"{STATUS}.title.includes('{values['name']}-')")


@pytest.fixture(scope="module")
def picture(editor, running):
    """The picture that the run "ada" ended with, before "leo" was trained on the same node."""
    editor.open()
    editor.load_new(WORKFLOW)
    editor.set(DATASET, folder="tiny", resolution="64")
    editor.set(LORA, rank=2)
    editor.set(LATENT, width=64, height=64, batch_size=1)
    editor.set(SAMPLER, steps=1)
    editor.set(SAVE_IMAGE, filename_prefix="ada")
    train(editor, name="ada", steps=3, batch_size=1)
    [found] = (running.base / "output").rglob("ada_00001_.png")
    train(editor, name="leo", steps=4, learning_rate=0.1)
    return found.relative_to(running.base / "output")


def open_picture(editor, picture):
    """Drop the picture on the editor."""
    query = f"type=output&filename={picture.name}&subfolder={picture.parent.as_posix()}"
    editor.page.evaluate(
        f"fetch('/view?{query}').then(answer => answer.blob()).then(blob => "
        f"app.handleFile(new File([blob], '{picture.name}', {{ type: 'image/png' }}))).then(() => true)"
    )
    wait(editor, "node.widgets.find(w => w.name === 'name').value === 'ada'")


def test_the_graph_in_a_picture_shows_its_own_run(editor, picture):
    open_picture(editor, picture)
    wait(editor, f"{STATUS}.title.includes('ada-') && {STATUS}.textContent.startsWith('step 3 / 3')")
    wait(editor, f"{REPORT}.startsWith('step 3') && {REPORT}.includes('ada-')")


def test_a_run_of_other_settings_is_labeled_and_its_report_is_not_shown(editor, picture):
    open_picture(editor, picture)
    editor.set(TRAIN, learning_rate=0.01)
    editor.load(editor.page.evaluate("app.graph.serialize()"))
    wait(editor, f"{STATUS}.title.includes('leo-') && {STATUS}.textContent.startsWith('other settings')")
    assert editor.node(TRAIN, REPORT) == ""


def test_a_later_server_fills_the_chart_from_the_runs_folder(editor, picture, running):
    open_picture(editor, picture)
    workflow = editor.page.evaluate("app.graph.serialize()")
    with server(find_comfyui(), running.base, cpu=True) as later, editor.page.another_tab() as page:
        assert later.request("/graft/runs")["runs"] == []
        tab = Editor(page, later.address)
        tab.open()
        tab.load(workflow)
        wait(tab, f"{STATUS}.title.includes('ada-') && {STATUS}.textContent.startsWith('step 3 / 3')")
