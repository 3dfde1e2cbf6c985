"""The runs in the sidebar: seen, compared, continued, used and deleted, by mouse and by keyboard."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest

from graft.dev.make_workflows import editor_file
from graft.tests.support.axe import serious_faults
from graft.tests.support.drawn_runs import write_run
from graft.tests.support.editor import GRAFT_DIALOG as DIALOG

pytestmark = pytest.mark.browser
WORKFLOW = json.loads(editor_file("first_lora").read_text("utf-8"))
DATASET, LORA, TRAIN, SAVE, LATENT, SAMPLER = 2, 4, 5, 6, 9, 10
ANNA, BETTER, REX = (f"{name}-{i:016x}" for i, name in enumerate(("people/anna", "people/anna", "rex")))
LIST = "[...document.querySelectorAll('*')].map(e => e.shadowRoot).find(root => root?.querySelector('ul'))"


@pytest.fixture(scope="module")
def runs(running):
    """Three runs on disk: anna's, anna's at a higher rate, and rex's."""
    root = running.base / "output" / "graft"
    for run, lr in ((ANNA, 1e-4), (BETTER, 3e-4), (REX, 1e-4)):
        write_run(root / run, lr=lr)
    return root


@pytest.fixture(scope="module")
def opened(editor, vue, running, runs):
    """The editor with the list of runs in its sidebar."""
    running.request("/settings", {"Comfy.Sidebar.Size": "normal"})
    editor.page.call(
        "Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False
    )
    editor.open()
    editor.load_new(WORKFLOW)
    editor.page.evaluate("app.extensionManager.sidebarTab.toggleSidebarTab('graft-runs')")
    editor.page.wait_for(f"({LIST})?.querySelectorAll('li').length >= 3")
    yield editor
    editor.page.call("Emulation.clearDeviceMetricsOverride")


@pytest.fixture(autouse=True)
def closed(editor):
    """No dialog and no tick is left behind."""
    yield
    editor.page.evaluate(
        f"({DIALOG})?.close(), ({LIST})?.querySelectorAll(':checked').forEach(box => box.click())"
    )


def listed(editor, expression):
    return editor.page.evaluate(f"(list => {expression})({LIST})")


def card(run):
    return f"[...list.querySelectorAll('li')].find(li => li.querySelector('.run').title === '{run}')"


def shown(editor, expression):
    """Wait until an expression over the `dialog` holds, and return its value."""
    return editor.page.wait_for(f"(dialog => dialog && {expression})({DIALOG})")


def view(editor, *runs):
    """Open one run, or several that are ticked first."""
    if len(runs) == 1:
        listed(editor, f"({card(runs[0])}.querySelector('.run').click(), true)")
    else:
        for run in runs:
            listed(editor, f"({card(run)}.querySelector('input').click(), true)")
        listed(editor, "([...list.querySelectorAll('.bar button')].at(-1).click(), true)")
    shown(editor, "dialog.querySelector('table') && dialog.querySelector('.chart p').textContent === ''")


def press(editor, text):
    button = f"[...dialog.querySelectorAll('button')].find(b => b.lastChild.data === '{text}')"
    editor.page.wait_for(f"(dialog => !!{button})({DIALOG})")
    editor.page.evaluate(f"(dialog => ({button}.click(), true))({DIALOG})")


def test_every_run_is_listed_with_its_picture_and_what_differs(opened):
    text = listed(opened, f"{card(BETTER)}.textContent")
    assert "people/anna" in text and "step 300 / 300" in text and "loss 0.25" in text and " kB" in text
    assert listed(opened, f"{card(BETTER)}.querySelector('.differs').textContent") == "lr 1e-4 \u2192 3e-4"
    assert "rank 8" in listed(opened, f"{card(REX)}.textContent")
    listed(opened, f"({card(REX)}.scrollIntoView(), true)")
    opened.page.wait_for(f"(list => {card(REX)}.querySelector('img').naturalWidth)({LIST})")
    listed(opened, "(list.querySelector('.bar input').value = 'rex', true)")
    listed(opened, "list.querySelector('.bar input').dispatchEvent(new Event('input'))")
    assert listed(opened, "list.querySelectorAll('li').length") == 1
    listed(opened, "(list.querySelector('.bar input').value = '', true)")
    listed(opened, "list.querySelector('.bar input').dispatchEvent(new Event('input'))")


def test_runs_are_compared_by_curve_sample_and_setting(opened):
    view(opened, ANNA, BETTER)
    colors = """(canvas => {
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
        const pixels = Array.from({ length: data.length / 4 }, (_, i) => data.slice(4 * i, 4 * i + 3).join())
        return [...new Set(pixels)]
    })(dialog.querySelector('canvas'))"""
    assert set(shown(opened, colors)) >= {"63,155,255", "255,154,60"}
    names = "[...dialog.querySelectorAll('table th')].map(th => th.textContent)"
    assert shown(opened, names) == ["Setting", BETTER, ANNA, "lr"]
    sheets = (
        "[...dialog.querySelectorAll('section')].map(s => [...s.querySelectorAll('img')].map(i => i.title))"
    )
    assert shown(opened, sheets) == [[f"Sample {n} of step 300" for n in (1, 2, 3)]] * 2
    slide = "slider => (slider.value = 0, slider.dispatchEvent(new Event('input')), true)"
    shown(opened, f"({slide})(dialog.querySelector('[type=range]'))")
    assert shown(opened, sheets)[1][0] == "Sample 1 of step 100"
    shown(opened, "[...dialog.querySelectorAll('.sheet img')].every(i => i.naturalWidth)")


def test_a_run_is_deleted_only_after_a_question(opened, runs):
    doomed = runs / "doomed-0123456789abcdef"
    write_run(doomed)
    listed(opened, "(list.querySelector('header button').click(), true)")
    opened.page.wait_for(f"(list => !!{card(doomed.name)})({LIST})")
    view(opened, doomed.name)
    press(opened, "Delete")
    assert "with its checkpoints" in shown(opened, "dialog.querySelector('[role=alert]').textContent")
    assert shown(opened, "dialog.getRootNode().activeElement.lastChild.data") == "Keep it"
    press(opened, "Keep it")
    press(opened, "Delete")
    assert doomed.is_dir()
    press(opened, "Delete it")
    opened.page.wait_for(f"!({DIALOG}) && (list => !{card(doomed.name)})({LIST})")
    assert not doomed.exists() and (runs / REX).is_dir()


def test_the_keyboard_reaches_everything(opened):
    listed(opened, "(list.querySelector('.bar input').focus(), true)")
    opened.press("Tab")
    assert listed(opened, "list.activeElement.matches('li .run')")
    assert listed(opened, "getComputedStyle(list.activeElement).outlineStyle") == "solid"
    opened.press("Home")
    first = "list.querySelector('li .run')"
    assert listed(opened, f"list.activeElement === {first}")
    opened.press("ArrowDown")
    assert listed(opened, "list.activeElement === list.querySelectorAll('li .run')[1]")
    opened.press("ArrowRight")
    opened.press(" ")
    assert listed(opened, "list.activeElement.checked && list.activeElement.type === 'checkbox'")
    opened.press("End")
    opened.press("ArrowLeft")
    opened.press("Tab")
    opened.press("Tab")
    assert listed(opened, "list.activeElement === null"), "one run is a stop of Tab, not each"
    listed(opened, f"({first}.focus(), true)")
    opened.press("Enter")
    shown(opened, "!!dialog.querySelector('table')")
    opened.press("Escape")
    opened.page.wait_for(f"!({DIALOG})")


def test_no_serious_fault_of_accessibility_in_the_list_or_a_run(opened):
    assert serious_faults(opened.page, f"({LIST}).host") == []
    view(opened, ANNA, REX)
    press(opened, "Delete")
    assert serious_faults(opened.page, f"({DIALOG}).getRootNode().host") == []


def test_of_two_hundred_runs_only_those_in_view_are_drawn(opened, runs):
    for number in range(200):
        if not (folder := runs / f"many/run{number}-{number:016x}").is_dir():
            write_run(folder, steps=3, samples=1)
    listed(opened, "(list.querySelector('header button').click(), true)")
    opened.page.wait_for(f"(list => list.querySelectorAll('li').length >= 203)({LIST})")
    listed(opened, "(list.querySelector('ul').scrollTo(0, 0), true)")
    opened.page.wait_for(f"({LIST}).querySelector('li img').naturalWidth > 0")
    assert listed(opened, "[...list.querySelectorAll('img')].filter(i => i.complete).length") < 60
    listed(opened, "(list.querySelector('ul').scrollTo(0, 1e6), true)")
    opened.page.wait_for(f"[...({LIST}).querySelectorAll('li img')].at(-1).naturalWidth > 0")
    listed(opened, "(list.querySelector('ul').scrollTo(0, 0), true)")


SAMPLE_PROMPTS = """(() => {
    const node = LiteGraph.createNode('GraftSamplePrompts')
    const [base, train] = [1, 5].map(id => app.graph.getNodeById(id))
    app.graph.add(node)
    base.connect(1, node, node.inputs.findIndex(({ name }) => name === 'clip'))
    base.connect(2, node, node.inputs.findIndex(({ name }) => name === 'vae'))
    node.connect(0, train, train.inputs.findIndex(({ name }) => name === 'sample_prompts'))
    const size = { width: 64, height: 64, steps: 1 }
    const values = { prompts: 'red square', every: 0, before_training: false, ...size }
    for (const [name, value] of Object.entries(values)) node.widgets.find(w => w.name === name).value = value
    return true
})()"""


@pytest.fixture(scope="module")
def trained(opened, runs):
    """A run that was asked in the sidebar to draw and to save while it trained, and ended by Finish."""
    opened.load_new(WORKFLOW)
    opened.set(DATASET, folder="tiny", resolution="64")
    opened.set(LORA, rank=2)
    name = f"live{uuid4().hex[:6]}"
    opened.set(TRAIN, steps=5000, batch_size=1, name=name)
    opened.set(SAVE, name=name)
    opened.set(LATENT, width=64, height=64, batch_size=1)
    opened.set(SAMPLER, steps=1)
    assert opened.page.evaluate(SAMPLE_PROMPTS)
    opened.run()
    opened.page.wait_for(f"(list => !!list.querySelector('.live'))({LIST})")
    run = listed(opened, "list.querySelector('.live').closest('.run').title")
    assert run.startswith(name)
    return run


def test_a_run_under_way_draws_and_saves_on_request(opened, runs, trained):
    folder = runs / trained
    view(opened, trained)
    assert shown(opened, "[...dialog.querySelectorAll('.actions button')].map(b => b.lastChild.data)") == [
        *("Continue", "Use in Load LoRA", "Draw now", "Save now")
    ]
    press(opened, "Save now")
    shown(opened, "dialog.querySelector('[role=status]').textContent.startsWith('This step is saved')")
    press(opened, "Draw now")
    shown(opened, "dialog.querySelector('.sheet img')?.naturalWidth === 64")
    assert len(list((folder / "checkpoints").glob("step-*/kept"))) == 1
    assert len(list((folder / "loras").glob("*.safetensors"))) >= 1
    press(opened, "Use in Load LoRA")
    opened.page.wait_for(f"!({DIALOG})")
    [name] = opened.page.evaluate(
        "app.graph.nodes.filter(n => n.comfyClass === 'LoraLoader').map(n => n.widgets[0].value)"
    )
    assert name.startswith(trained.rpartition("-")[0])
    assert (runs.parent / "loras" / name).is_file()
    opened.page.evaluate(f"fetch('/graft/finish/{trained}', {{ method: 'POST' }}).then(a => a.ok)")
    opened.wait_until_idle()


@pytest.mark.feature(160)
def test_a_run_is_continued_from_its_folder_alone(opened, runs, trained):
    folder = runs / trained
    reached = max(int(path.name[5:]) for path in (folder / "checkpoints").iterdir())
    opened.load({"last_node_id": 0, "last_link_id": 0, "nodes": [], "links": [], "version": 0.4}, "empty")
    listed(opened, "(list.querySelector('header button').click(), true)")
    opened.page.wait_for(f"(list => !{card(trained)}.querySelector('.live'))({LIST})")
    view(opened, trained)
    press(opened, "Continue")
    opened.page.wait_for(f"!({DIALOG})")
    assert opened.node(TRAIN, "node.widgets.find(w => w.name === 'steps').value") == 5000 + reached
    opened.set(TRAIN, steps=reached + 2)
    opened.run()
    opened.wait_until_idle()
    assert (folder / "checkpoints" / f"step-{reached + 2:08d}").is_dir()


def start_of(editor):
    """Return what Train Steps goes on from, as [class, name]."""
    return editor.page.evaluate("""(train => {
        const start = train.inputs.findIndex(({ name }) => name === 'start')
        const node = train.getInputNode(start)
        return [node?.comfyClass, node?.widgets[0].value]
    })(app.graph.nodes.find(node => node.comfyClass === 'GraftTrainSteps'))""")


def test_a_run_whose_graph_is_unknown_gets_one_with_its_settings_and_state(opened):
    view(opened, REX)
    press(opened, "Continue")
    opened.page.wait_for(f"!({DIALOG})")
    assert start_of(opened) == ["GraftLoadTrainingState", REX]
    rate = "node.widgets.find(w => w.name === 'learning_rate').value"
    assert opened.node(5, rate) == 1e-4 and opened.node(5, "node.isInputConnected(0)")


def test_a_run_whose_schedule_has_ended_goes_on_from_its_state(opened):
    opened.page.evaluate(f"""(async () => {{
        const {{ continueRun }} = await import('/extensions/graft/continue_run.js')
        const found = {{ workflow: {json.dumps(WORKFLOW)}, node: '5', how: 'from state', steps: 0 }}
        await continueRun({json.dumps(BETTER)}, found)
    }})()""")
    assert start_of(opened) == ["GraftLoadTrainingState", BETTER]
    [steps, *_] = next(node["widgets_values"] for node in WORKFLOW["nodes"] if node["id"] == TRAIN)
    assert opened.node(TRAIN, "node.widgets.find(w => w.name === 'steps').value") == steps
