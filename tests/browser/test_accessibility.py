"""What Graft shows on nodes and in the images of a dataset, for people with a screen reader or a keyboard."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from graft.dev.make_workflows import editor_file
from graft.tests.support.axe import serious_faults
from graft.tests.support.drawn_runs import write_run
from graft.tests.support.editor import GRAFT_DIALOG as DIALOG

pytestmark = pytest.mark.browser
WORKFLOW = json.loads(editor_file("first_lora").read_text("utf-8"))
DATASET, TRAIN = 2, 5
ELEMENT = "node.widgets.find(w => w.name === '{}').element"
RUN = "anna-0123456789abcdef"


@pytest.fixture(scope="module")
def opened(editor, vue, running):
    """The editor with a dataset of good and bad images, a chart of a run, a plan and an error."""
    folder = running.base / "input" / "mixed"
    folder.mkdir(exist_ok=True)
    for name in ("cat", "dog", "bare", "owl", "fox", "hen"):
        Image.new("RGB", (300, 200), "teal").save(folder / f"{name}.png")
        if name != "bare":
            (folder / f"{name}.txt").write_text(f"a {name}\n")
    (folder / "bad.png").write_text("no image")
    if not (running.base / "output" / "graft" / RUN).is_dir():
        write_run(running.base / "output" / "graft" / RUN)
    editor.open()
    editor.load_new(WORKFLOW)
    editor.set(DATASET, folder="mixed", resolution="256")
    return editor


@pytest.fixture
def grid(opened):
    opened.node(DATASET, "(node.widgets.find(w => w.type === 'button').callback(), true)")
    opened.page.wait_for(f"{DIALOG}?.querySelectorAll('li').length === 7")
    yield lambda expression: opened.page.evaluate(f"(dialog => {expression})({DIALOG})")
    opened.page.evaluate(f"({DIALOG})?.close()")


def test_no_serious_fault_in_the_images_of_a_dataset(opened, grid):
    assert serious_faults(opened.page, f"({DIALOG}).getRootNode().host") == []
    grid("(dialog.querySelector('.scroll').append(document.createElement('button')), true)")
    [(rule, *_)] = serious_faults(opened.page, f"({DIALOG}).getRootNode().host")
    assert rule == "button-name", "a fault would be found"


def test_arrow_keys_go_through_the_images_and_escape_closes(opened, grid):
    name = "dialog.getRootNode().activeElement.closest('li').querySelector('.name').textContent"
    names = grid("[...dialog.querySelectorAll('li .name')].map(e => e.textContent)")
    columns = grid("getComputedStyle(dialog.querySelector('ul')).gridTemplateColumns.split(' ').length")
    grid("(dialog.querySelector('li button').focus(), true)")
    for key, at in (("ArrowRight", 1), ("ArrowDown", 1 + columns), ("ArrowUp", 1), ("ArrowLeft", 0)):
        opened.press(key)
        assert grid(name) == names[at]
    assert grid("getComputedStyle(dialog.getRootNode().activeElement).outlineStyle") == "solid"
    opened.press("ArrowLeft")
    assert grid(name) == names[0], "there is none before the first"
    opened.press("Escape")
    opened.page.wait_for(f"!({DIALOG})")


def test_no_serious_fault_in_the_chart_with_its_samples(opened):
    live = {"run": RUN, "step": 300, "last": 300, "running": False, "finishing": False, "same": True}
    show = "(await import('/scripts/api.js')).api.fetchApi"
    opened.page.evaluate(f"""(async () => {{
        const api = (await import('/scripts/api.js')).api, fetch = {show}
        const node = app.graph.getNodeById({TRAIN})
        api.fetchApi = async (path, options) => path === '/graft/runs' && options?.method === 'POST'
            ? new Response(JSON.stringify({{ runs: {{ [{TRAIN}]: {json.dumps(live)} }}, settings: {{}} }}))
            : fetch.call(api, path, options)
        await app.loadGraphData(app.graph.serialize())
        api.fetchApi = fetch
        const {{ pos }} = app.graph.getNodeById({TRAIN})
        Object.assign(app.canvas.ds, {{ scale: 1, offset: [400 - pos[0], 60 - pos[1]] }})
        app.canvas.setDirty(true, true)
    }})()""")
    chart = ELEMENT.format("graft_chart")
    opened.page.wait_for(
        f"(node => {chart}.shadowRoot.querySelectorAll('.samples img').length === 3)"
        f"(app.graph.getNodeById({TRAIN}))"
    )
    assert serious_faults(opened.page, f"(node => {chart})(app.graph.getNodeById({TRAIN}))") == []


def test_no_serious_fault_in_a_report_and_an_error_is_told_at_once(opened):
    node = f"app.graph.getNodeById({DATASET})"
    text = "checkpointing   base      peak\nnone            resident  4.2 GiB"
    opened.page.evaluate(f"({node}.onExecuted({{ text: [{json.dumps(text)}] }}), true)")
    report = f"(node => {ELEMENT.format('graft_text')})({node})"
    opened.page.wait_for(f"{report}.value.includes('GiB')")
    assert serious_faults(opened.page, report) == []
    opened.page.evaluate(f"""import('/scripts/api.js').then(({{ api }}) => api.dispatchCustomEvent(
        'execution_error', {{ node_id: '{DATASET}', exception_message: 'no images', traceback: [] }}))""")
    opened.page.wait_for(f"{report}.getAttribute('role') === 'alert' && {report}.value === 'no images'")
    assert serious_faults(opened.page, report) == []
