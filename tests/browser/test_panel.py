"""The panel on Train Steps: what it shows of a run, and that every page shows the same."""

from __future__ import annotations

import json
import math

import pytest
from PIL import Image

from graft.dev.make_workflows import editor_file
from graft.tests.support.editor import Editor
from graft.tests.support.sounds import wave, write_sound
from graft.training.config import ADDED
from graft.training.run.queued import run_settings

pytestmark = pytest.mark.browser
WORKFLOW = json.loads(editor_file("first_lora").read_text("utf-8"))
DATASET, LORA, TRAIN, SAVE, LATENT, SAMPLER = 2, 4, 5, 6, 9, 10
LONG, STEPS = "long-0123456789abcdef", 10_000
SHADOW = "node.widgets.find(w => w.name === 'graft_chart').element.shadowRoot"
STATUS = f"{SHADOW}.querySelector('.status').textContent"
LEGEND = f"{SHADOW}.querySelector('.legend').textContent"
DRAWN = f"""(c => c.width > 0 && c.getContext('2d').getImageData(0, 0, c.width, c.height).data
    .filter((value, i) => i % 4 === 3 && value > 0).length)({SHADOW}.querySelector('canvas'))"""


@pytest.fixture(scope="module", autouse=True)
def opened(editor):
    """The template on four squares of 64 pixels, with Train Steps in the middle of the page."""
    editor.open()
    editor.load_new(WORKFLOW)
    editor.set(DATASET, folder="tiny", resolution="64")
    editor.set(LORA, rank=2)
    editor.set(TRAIN, steps=1500, batch_size=1, name="panel")
    editor.set(SAVE, name="panel")
    editor.set(LATENT, width=64, height=64, batch_size=1)
    editor.set(SAMPLER, steps=1)
    show_train_steps(editor)


def show_train_steps(editor):
    editor.node(
        TRAIN,
        "(app.canvas.ds.scale = 1, app.canvas.ds.offset = [300 - node.pos[0], 60 - node.pos[1]], "
        "app.canvas.setDirty(true, true), true)",
    )


def wait(editor, expression):
    return editor.page.wait_for(f"(node => {expression})(app.graph.getNodeById({TRAIN}))")


def step(editor):
    """The step that the status line tells."""
    return int((editor.node(TRAIN, STATUS) or "step 0").split()[1])


def wait_for_step(editor, least):
    wait(editor, f"Number({STATUS}.split(/\\s+/)[1]) >= {least}")


def button(index):
    return f"(node => {SHADOW}.querySelectorAll('button')[{index}])(app.graph.getNodeById({TRAIN}))"


@pytest.mark.feature(99, 120)
def test_the_chart_moves_while_training_and_a_reload_refills_it(editor):
    assert not editor.node(TRAIN, f"{SHADOW}.querySelector('.empty').hidden")
    editor.run()
    wait_for_step(editor, 10)
    first, drawn = step(editor), editor.node(TRAIN, DRAWN)
    wait_for_step(editor, first + 20)
    assert drawn and editor.node(TRAIN, DRAWN) != drawn
    assert "loss" in editor.node(TRAIN, LEGEND) and "/ 1500" in editor.node(TRAIN, STATUS)
    reached = step(editor)
    editor.open()
    wait_for_step(editor, reached)
    show_train_steps(editor)
    wait(editor, DRAWN)


def test_a_second_tab_shows_the_same_run(editor):
    workflow = editor.page.evaluate("app.graph.serialize()")
    with editor.page.another_tab() as page:
        other = Editor(page, editor.url.removeprefix("http://").removesuffix("/"))
        other.open()
        other.load(workflow)
        wait_for_step(other, 1)
        assert step(other) >= 1


def test_a_run_of_another_workflow_is_ignored(editor):
    tell = """(async workflow => (await import('/scripts/api.js')).api.dispatchCustomEvent('graft.run',
        { run: 'other', node: '5', workflow, first: 0, last: 7, step: 7, running: true }))"""
    editor.page.evaluate(f"{tell}('someone else').then(() => {tell}(null)).then(() => true)")
    assert "panel-" in editor.node(TRAIN, f"{SHADOW}.querySelector('.status').title")


def test_finish_ends_the_training_and_the_lora_is_saved(editor, running):
    wait(editor, f"!{SHADOW}.querySelectorAll('button')[1].disabled")
    editor.page.click_on(button(1))
    editor.wait_until_idle()
    assert (running.base / "output" / "loras" / "panel.safetensors").is_file()
    assert running.request("/graft/runs")["runs"][-1]["step"] < 1500
    wait(editor, f"{SHADOW}.querySelectorAll('button')[1].disabled && {STATUS}.endsWith('stopped')")


def test_the_chart_has_a_logarithmic_scale_and_values_under_the_pointer(editor):
    drawn = editor.node(TRAIN, DRAWN)
    editor.page.click_on(button(0))
    wait(editor, f"{SHADOW}.querySelector('[aria-pressed=true]') && {DRAWN} !== {drawn}")
    x, y, width = editor.node(
        TRAIN, f"(b => [b.x, b.y, b.width])({SHADOW}.querySelector('canvas').getBoundingClientRect())"
    )
    editor.page.move(x + width / 2, y + 30)
    wait(editor, f"/^step \\d+/.test({LEGEND})")
    editor.page.move(10, 10)
    wait(editor, f"!/^step/.test({LEGEND})")


@pytest.fixture(scope="module")
def long_run(running):
    """A run of 10,000 steps on disk, with checkpoints and samples: an edit, a clip and a sound."""
    folder = running.base / "output" / "graft" / LONG
    (folder / "samples").mkdir(parents=True)
    for at in range(2000, STEPS + 1, 2000):
        (folder / "checkpoints" / f"step-{at:08d}").mkdir(parents=True)
        frames = [Image.new("RGB", (96, 96), (at // 40, 90 * number, 160)) for number in range(3)]
        frames[0].save(folder / "samples" / f"step-{at:08d}-0.png")
        clip = folder / "samples" / f"step-{at:08d}-1.webp"
        frames[0].save(clip, save_all=True, append_images=frames[1:], duration=100)
        write_sound(folder / "samples" / f"step-{at:08d}-2.flac", wave(0.5), caption=None)
    Image.new("RGB", (96, 96), "white").save(folder / "samples" / "input-0.png")
    with (folder / "log.jsonl").open("w") as file:
        for at in range(1, STEPS + 1):
            loss = 0.3 + math.exp(-at / 2000)
            entry = {"step": at, "loss": loss + 0.2 * math.sin(at * at), "smoothed": loss, "seconds": 0.6}
            entry |= {"lr": 1e-4 * (1 - at / STEPS), "validation": loss + 0.1 if at % 1000 == 0 else None}
            entry |= {"time_left": 0.0, "memory": 7 << 30, "plan": "offload, block"}
            file.write(json.dumps(entry) + "\n")
    return LONG


def newer_inputs(editor):
    """Return by class the inputs that are newer than people's graphs, with their defaults."""
    nodes = editor.page.evaluate("fetch('/object_info').then(answer => answer.json())")
    inputs = {
        kind: [item for part in node["input"].values() for item in part.items()]
        for kind, node in nodes.items()
        if kind.startswith("Graft")
    }
    return {
        kind: {name: spec[1]["default"] for name, spec in items if spec[1:] and ADDED in spec[1]}
        for kind, items in inputs.items()
    }


def assert_samples_are_shown(editor):
    images, sound = (f"[...{SHADOW}.querySelectorAll('.samples {kind}')]" for kind in ("img", "audio"))
    wait(
        editor, f"{images}.length === 3 && {images}.every(i => i.naturalWidth === 96 && i.clientHeight > 40)"
    )
    titles = editor.node(TRAIN, f"{images}.map(i => i.title)")
    assert titles == ["input 1", f"step {STEPS}, 1", f"step {STEPS}, 2"]
    wait(editor, f"{sound}.length === 1 && {sound}[0].controls && {sound}[0].clientHeight > 20")
    editor.node(TRAIN, f"({sound}[0].preload = 'auto', true)")
    wait(editor, f"{sound}[0].duration > 0.4")


def test_samples_appear_with_the_run_that_was_queued_with_these_settings(editor, running, long_run):
    editor.set(TRAIN, name="long")
    graph = editor.page.evaluate("app.graphToPrompt().then(p => p.output)")
    newer = newer_inputs(editor)
    queued = {run_settings(graph, str(TRAIN), lambda kind: newer.get(kind, {})): STEPS}
    (running.base / "output" / "graft" / long_run / "queued.json").write_text(json.dumps(queued))
    editor.load(editor.page.evaluate("app.graph.serialize()"))
    wait_for_step(editor, STEPS)
    running.shown = editor.page.evaluate("app.graph.serialize()")
    assert_samples_are_shown(editor)
    assert all(word in editor.node(TRAIN, STATUS) for word in ("10000 / 10000", "7.0 GB", "offload, block"))
    assert all(word in editor.node(TRAIN, LEGEND) for word in ("validation", "samples", "learning rate"))
    assert editor.node(TRAIN, "node.size[1] >= node.computeSize()[1]")
    show_train_steps(editor)


def test_ten_thousand_steps_are_drawn_as_few_points_with_their_extremes(editor):
    found = editor.page.evaluate("""(async () => {
        const { thinned } = await import('/extensions/graft/series.js')
        const steps = Array.from({ length: 10000 }, (_, i) => i + 1)
        const values = steps.map(step => step === 5000 ? 9 : step === 7000 ? -9 : Math.sin(step * step))
        const points = thinned(steps, values, 1, 10000, 300)
        const ys = points.map(point => point[1])
        return [points.length, Math.max(...ys), Math.min(...ys), points[0], points.at(-1)[0]] })()""")
    assert found[0] <= 1204 and found[1:3] == [9, -9]
    assert found[3][0] == 0 and found[4] == pytest.approx(300)


FRAMES = """((canvas, count) => {
    const brush = CanvasRenderingContext2D.prototype, { lineTo, moveTo } = brush
    const next = window.requestAnimationFrame, { left, top, width } = canvas.getBoundingClientRect()
    let frame = null, points = 0
    const draw = i => {
        const place = { clientX: left + (i / count) * width, clientY: top + 20 }
        canvas.dispatchEvent(new PointerEvent('pointermove', place))
        const start = performance.now()
        frame()
        canvas.getContext('2d').getImageData(0, 0, 1, 1)
        return performance.now() - start
    }
    window.requestAnimationFrame = callback => { frame = callback; return 1 }
    try {
        const times = Array.from({ length: count }, (_, i) => draw(i)).sort((a, b) => a - b)
        for (const [name, plain] of Object.entries({ lineTo, moveTo }))
            brush[name] = function (...at) { points++; plain.apply(this, at) }
        draw(count / 2)
        return [points, canvas.clientWidth, times[count >> 1]]
    } finally {
        window.requestAnimationFrame = next
        Object.assign(brush, { lineTo, moveTo })
        canvas.dispatchEvent(new PointerEvent('pointerleave'))
    }
})"""
"""(canvas, count) -> points put on the canvas in a frame, its width in pixels, and the median over `count`
frames of the ms from the callback's start to the last pixel drawn."""


def test_a_frame_draws_as_many_points_as_there_are_pixels_and_not_as_there_are_steps(editor):
    canvas = f"(node => {SHADOW}.querySelector('canvas'))(app.graph.getNodeById({TRAIN}))"
    points, width, median = editor.page.evaluate(f"{FRAMES}({canvas}, 500)")
    print(f"a frame of {STEPS} steps, {width} pixels wide: {points} points, {median:.2f} ms")
    assert width < points < 3 * 4 * width < 3 * STEPS


def test_a_run_inside_a_subgraph_is_shown_there(editor):
    editor.set(TRAIN, steps=3, name="inside")
    editor.page.evaluate(
        f"app.canvas.graph.convertToSubgraph(new Set([app.graph.getNodeById({TRAIN})])) && true"
    )
    inner = (
        "app.graph.nodes.find(n => n.subgraph)?.subgraph.nodes.find(n => n.comfyClass === 'GraftTrainSteps')"
    )
    editor.run()
    status = f"(node => {SHADOW}.querySelector('.status').title)({inner})"
    editor.page.wait_for(f"{status}.includes('inside-')")
    editor.wait_until_idle()
    editor.page.wait_for(f"(node => {STATUS}.startsWith('step 3 / 3'))({inner})")


def test_a_subgraph_shows_the_chart_and_exposes_steps_and_name(editor):
    outer = "app.graph.nodes.find(n => n.subgraph)"
    editor.page.wait_for(f"(node => {STATUS}.startsWith('step 3 / 3'))({outer})")
    values = (
        f"Object.fromEntries({outer}.widgets.filter(w => w.serialize !== false).map(w => [w.name, w.value]))"
    )
    assert editor.page.evaluate(values).items() >= {"steps": 3, "name": "inside"}.items()
    editor.load(editor.page.evaluate("app.graph.serialize()"))
    editor.page.wait_for(f"(node => {STATUS}.startsWith('step 3 / 3'))({outer})")
    assert editor.page.evaluate(values).items() >= {"steps": 3, "name": "inside"}.items()


def test_the_panel_and_its_samples_live_in_vue_nodes(editor, running):
    running.request("/settings", {"Comfy.VueNodes.Enabled": True})
    try:
        editor.open()
        editor.load(running.shown)
        show_train_steps(editor)
        wait(editor, f"{SHADOW}.querySelector('canvas').getBoundingClientRect().width > 200")
        assert_samples_are_shown(editor)
        assert editor.page.evaluate("!!document.querySelector('[data-node-id]')")
    finally:
        running.request("/settings", {"Comfy.VueNodes.Enabled": False})


def test_the_panel_goes_with_its_node(editor):
    editor.page.evaluate(f"window.removed = app.graph.getNodeById({TRAIN}).widgets.at(-1).element, true")
    editor.node(TRAIN, "app.graph.remove(node) || true")
    editor.page.wait_for("!window.removed.isConnected")
