"""What nodes tell when they have run is read on them, and what Graft adds to a node leaves ComfyUI's own
ways alone.
"""

from __future__ import annotations

import json

import pytest

from graft.dev.make_workflows import editor_file

pytestmark = pytest.mark.browser
WORKFLOW = json.loads(editor_file("first_lora").read_text("utf-8"))
DATASET, LORA, TRAIN, SAVE, LATENT, SAMPLER = 2, 4, 5, 6, 9, 10
REPORT = "node.widgets.find(w => w.name === 'graft_text').element"
SHADOW = "node.widgets.find(w => w.name === 'graft_chart').element.shadowRoot"

STATUS = f"{SHADOW}.querySelector('.status').textContent"

MIDDLE = (
    f"(b => [b.x + b.width / 2, b.y + b.height / 2])"
    f"({SHADOW}.querySelector('canvas').getBoundingClientRect())"
)
BEFORE = f"[...{SHADOW}.querySelectorAll('.before li')].map(li => li.textContent)"
BELL = f"[...{SHADOW}.querySelectorAll('button')].find(b => b.textContent === 'notify')"
NOTIFICATIONS = """(() => {
    window.graftTold = [], window.graftAsked = 0
    window.Notification = class {
        static permission = 'default'
        static async requestPermission() { graftAsked += 1; return this.permission = 'granted' }
        constructor(title, options) { graftTold.push([title, options.body]) }
    }
    return true
})()"""
"""A browser that lets itself be asked."""
CHECK = """new Promise(done => {
    dispatchEvent(new MouseEvent('mouseup'))
    requestAnimationFrame(() => requestAnimationFrame(() => done(true)))
})"""
"""Let ComfyUI look for edits."""


@pytest.fixture(scope="module")
def ran(editor, vue):
    """The template after sixty steps, in both renderings: true in Nodes 2.0; the graph, its nodes' sizes
    and what Train Steps said before; the name of the run.
    """
    name = "report2" if vue else "report"
    editor.open()
    editor.load_new(WORKFLOW)
    editor.page.evaluate("(app.canvas.ds.scale = 0.6, app.canvas.ds.offset = [150, 150], true)")
    editor.set(DATASET, folder="tiny", resolution="64")
    editor.set(LORA, rank=2)
    editor.set(TRAIN, steps=60, batch_size=1, name=name, seed=int(vue))
    editor.set(SAVE, name=name)
    editor.set(LATENT, width=64, height=64, batch_size=1)
    editor.set(SAMPLER, steps=1)
    before = [editor.page.evaluate("app.graph.serialize()"), sizes(editor)]
    editor.page.evaluate(CHECK)
    lines = f"(node => {BEFORE})(app.graph.getNodeById({TRAIN}))"
    editor.page.wait_for(f"{lines}.length === 4 && {lines}[0].includes('epochs of 4 images')")  # of this name
    before += [editor.page.evaluate(lines), name]
    editor.page.evaluate(NOTIFICATIONS)
    editor.page.evaluate(f"(node => {BELL}.click())(app.graph.getNodeById({TRAIN}))")
    editor.page.wait_for(f"(node => {BELL}.ariaPressed === 'true')(app.graph.getNodeById({TRAIN}))")
    editor.run()
    editor.page.wait_for(f"(node => {REPORT}.value)(app.graph.getNodeById({SAVE}))")
    editor.wait_until_idle()
    return vue, *before


def sizes(editor):
    return editor.page.evaluate("Object.fromEntries(app.graph.nodes.map(node => [node.id, [...node.size]]))")


def shortcut(editor, key):
    editor.page.evaluate("document.activeElement?.blur()")
    for kind in ("keyDown", "keyUp"):
        code = {"key": key, "code": f"Key{key.upper()}", "windowsVirtualKeyCode": ord(key.upper())}
        editor.page.call("Input.dispatchKeyEvent", type=kind, modifiers=2, **code)


def test_a_nodes_text_can_be_read_on_it_and_is_not_saved(editor, ran):
    _, saved, before, _, name = ran
    for node, words in ((SAVE, f"{name}.safetensors: step 60"), (TRAIN, "step 60, loss")):
        assert editor.node(node, f"{REPORT}.value").startswith(words)
        editor.page.wait_for(
            f"(node => {REPORT}.getBoundingClientRect().height > 5)(app.graph.getNodeById({node}))"
        )
    for node, (width, height) in sizes(editor).items():
        assert width == before[node][0] and height >= before[node][1] - 1
    values = {node["id"]: node.get("widgets_values") for node in saved["nodes"]}
    after = editor.page.evaluate("app.graph.serialize()")
    assert {node["id"]: node.get("widgets_values") for node in after["nodes"]} == values
    prompt = editor.page.evaluate("app.graphToPrompt().then(p => p.output)")
    assert not any("graft_text" in node["inputs"] for node in prompt.values())


def test_undo_and_redo_lead_past_a_run(editor, ran):
    name = f"app.graph.getNodeById({SAVE}).widgets.find(w => w.name === 'name').value"
    editor.set(SAVE, name="renamed")
    editor.page.evaluate(CHECK)
    shortcut(editor, "z")
    editor.page.wait_for(f"{name} === '{ran[-1]}'")
    editor.page.wait_for(f"(node => {REPORT}.value)(app.graph.getNodeById({SAVE}))")
    editor.page.wait_for(f"(node => {STATUS}.startsWith('step 60 / 60'))(app.graph.getNodeById({TRAIN}))")
    editor.page.evaluate(CHECK)
    shortcut(editor, "y")
    editor.page.wait_for(f"{name} === 'renamed'")


def test_before_a_run_its_epochs_time_memory_and_disk_are_shown(editor, ran):
    epochs, seconds, memory, disk = ran[3]
    assert epochs == "15 epochs of 4 images"
    assert seconds.startswith("about 0:") and " s a step" in seconds
    assert " memory (base resident" in memory and disk.startswith("up to ") and disk.endswith(" are free")


def test_what_may_be_regretted_is_shown_beside_the_chart(editor, ran):
    editor.set(SAVE, name=ran[-1])
    expected = ["a learning rate above", "Save LoRA will replace", "1 other run called"]
    for rate, texts in ((1.0, expected), (0.001, [])):
        editor.set(TRAIN, learning_rate=rate)
        editor.page.evaluate(CHECK)
        lines = f"(node => {BEFORE})(app.graph.getNodeById({TRAIN}))"
        editor.page.wait_for(
            f"(lines => lines.length === {len(texts)} && {json.dumps(texts)}"
            f".every((text, i) => lines[i].startsWith(text)))({lines})"
        )


def test_the_end_of_a_run_is_told_by_a_notification_that_was_asked_for_once(editor, ran):
    [(title, body)] = editor.page.evaluate("graftTold")
    assert title == "Training has ended" and body.startswith(f"{ran[-1]}-") and body.endswith(", step 60")
    assert editor.page.evaluate("graftAsked") == 1
    bell = f"(node => {BELL})(app.graph.getNodeById({TRAIN}))"
    editor.page.evaluate(f"{bell}.click()")
    editor.page.wait_for(f"{bell}.ariaPressed === 'false'")


def test_the_title_of_a_hidden_tab_is_marked_until_the_tab_is_shown(editor, ran):
    hidden = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true })"
    title, marked = editor.page.evaluate("document.title"), "document.title === '\u2713 ' + %s"
    editor.page.evaluate(f"""(async () => {{
        const {{ notify }} = await import('/extensions/graft/notify.js')
        {hidden % "true"}
        notify('Training has ended', 'run', 'step 3')
        return true
    }})()""")
    editor.page.wait_for(marked % json.dumps(title))
    editor.page.evaluate("document.title = 'another workflow'")
    editor.page.wait_for(marked % "'another workflow'")
    editor.page.evaluate(f"({hidden % 'false'}, document.dispatchEvent(new Event('visibilitychange')))")
    editor.page.wait_for("document.title === 'another workflow'")
    editor.page.evaluate(f"(document.title = {json.dumps(title)}, delete document.hidden)")


def test_numbers_show_all_their_digits(editor, ran):
    if not ran[0]:
        pytest.skip("only Nodes 2.0 shows fewer")
    shown = f"[...document.querySelectorAll('[data-node-id=\"{TRAIN}\"] input')].map(i => Number(i.value))"
    editor.set(TRAIN, learning_rate=0.0003)
    editor.page.wait_for(f"{shown}.includes(0.0003)")
    editor.set(TRAIN, learning_rate=0.001)


def test_a_preview_below_the_panel_is_not_shown_again(editor, ran):
    before = editor.node(TRAIN, "node.size[1]")
    editor.page.evaluate("""(async () => {
        const { api } = await import('/scripts/api.js')
        const canvas = Object.assign(document.createElement('canvas'), { width: 64, height: 64 })
        const blob = await new Promise(done => canvas.toBlob(done, 'image/jpeg'))
        const detail = { blob, nodeId: '5', displayNodeId: '5', parentNodeId: '5', realNodeId: '5' }
        api.dispatchCustomEvent('b_preview_with_metadata', { ...detail, jobId: 'x', promptId: 'x' })
    })()""")
    editor.page.wait_for("app.nodePreviewImages['5']?.length")
    if ran[0]:
        images = f"""[...document.querySelectorAll('[data-node-id="{TRAIN}"] img')]"""
        editor.page.wait_for(f"{images}.length && {images}.every(i => !i.offsetParent)")
    editor.page.evaluate(CHECK)  # two frames
    assert editor.node(TRAIN, "node.size[1]") == pytest.approx(before, abs=2)


def test_the_wheel_zooms_over_the_chart(editor, ran):
    if ran[0]:
        pytest.skip("Nodes 2.0 sees to it")
    x, y = editor.node(TRAIN, MIDDLE)
    scale = editor.page.evaluate("app.canvas.ds.scale")
    editor.page.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-120)
    editor.page.wait_for(f"app.canvas.ds.scale > {scale}")


def test_the_middle_button_moves_the_canvas_over_the_chart(editor, ran):
    if ran[0]:
        pytest.skip("Nodes 2.0 sees to it")
    x, y = editor.node(TRAIN, MIDDLE)
    offset = editor.page.evaluate("app.canvas.ds.offset[1]")
    for kind, dy in (("mousePressed", 0), ("mouseMoved", 20), ("mouseMoved", 40), ("mouseReleased", 40)):
        held = 0 if kind == "mouseReleased" else 4
        editor.page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y + dy, button="middle", buttons=held)
    editor.page.wait_for(f"app.canvas.ds.offset[1] > {offset}")


def test_a_lost_connection_leaves_no_run_that_runs_for_ever(editor, ran):
    told = """(async () => { const { api } = await import('/scripts/api.js')
        const run = { run: 'gone', last: 7, step: 3, running: true, same: true }
        api.fetchApi = async () => new Response(JSON.stringify({ runs: { 5: run }, settings: { 5: '' } }))
        api.dispatchCustomEvent('reconnected') })()"""
    editor.page.evaluate(told)
    finish = f"(node => {SHADOW}.querySelectorAll('button')[1])(app.graph.getNodeById({TRAIN}))"
    editor.page.wait_for(f"!{finish}.disabled")
    editor.page.evaluate("import('/scripts/api.js').then(({ api }) => delete api.fetchApi)")
    editor.page.evaluate(f"{finish}.click()")  # of a run that the server does not know
    editor.page.wait_for(f"!{finish}.disabled && {finish}.textContent === 'Finish'")
    editor.page.evaluate(
        "import('/scripts/api.js').then(({ api }) => api.dispatchCustomEvent('reconnected'))"
    )
    editor.page.wait_for(f"{finish}.disabled")


def test_an_error_is_shown_on_its_node_until_the_next_run(editor, ran):
    editor.set(DATASET, resolution="abc")
    editor.run()
    error = f"(node => {REPORT})(app.graph.getNodeById({DATASET}))"
    editor.page.wait_for(f"{error}.value.startsWith(\"resolution: 'abc' is not a number of pixels\")")
    assert editor.page.evaluate(f"{error}.getAttribute('role')") == "alert"
    editor.wait_until_idle()
    editor.press("Escape")  # ComfyUI's own dialog
    editor.page.evaluate(
        "import('/scripts/api.js').then(({ api }) => api.dispatchCustomEvent('execution_start', {}))"
    )
    editor.page.wait_for(f"{error}.value === ''")
