"""Templates in both renderings: no node lies over another or out of its group, before a run and after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import graft
from graft.dev.make_workflows import SILENT, editor_file

pytestmark = pytest.mark.browser
TEMPLATES = sorted((Path(graft.__file__).parent / "example_workflows").glob("*.json"))
FIRST_LORA = editor_file("first_lora")
DATASET, LORA, TRAIN, SAVE, LATENT, SAMPLER = 2, 4, 5, 6, 9, 10
SIZES = ((64, 64), (160, 64), (64, 160), (128, 80), (80, 128))
"""Of five images that go to five buckets at resolution 64."""
REPORT = "\n".join(
    [
        "5 images with 5 captions; an epoch has 5 showings in 5 steps of 1",
        *(f"Bucket {width} x {height}: 1 images, 1 showings in 1 steps" for width, height in SIZES),
        "Cropping cuts off 4.6% on average, at most 8.1% (a_photo_with_a_rather_long_name.png)",
        "Left out: 5",
        *(f"  bad_{i}.png: is not an image, whatever its extension .png says" for i in range(5)),
    ]
)
FAULTS = """(() => {
    const { scale, offset } = app.canvas.ds, page = app.canvas.canvas.getBoundingClientRect()
    const box = (title, x, y, width, height) => ({ title, x, y, right: x + width, bottom: y + height })
    const nodes = app.graph.nodes.map(node => {
        const element = document.querySelector(`[data-node-id="${node.id}"]`)
        const title = `${node.id} ${node.title}`, height = Math.max(node.size[1], node.computeSize()[1])
        if (!element) return box(title, node.pos[0], node.pos[1] - 30, node.size[0], height + 30)
        const at = element.getBoundingClientRect()
        return box(title, (at.x - page.x) / scale - offset[0], (at.y - page.y) / scale - offset[1],
            at.width / scale, at.height / scale)
    })
    const groups = app.graph._groups.map(({ title, pos, size }) => box(title, ...pos, ...size))
    const meet = (a, b) => a.x < b.right - 1 && b.x < a.right - 1 && a.y < b.bottom - 1 && b.y < a.bottom - 1
    const holds = (a, b) =>
        a.x <= b.x + 1 && a.y <= b.y + 1 && a.right >= b.right - 1 && a.bottom >= b.bottom - 1
    const faults = [nodes, groups].flatMap(all => all.flatMap((a, i) =>
        all.slice(i + 1).filter(b => meet(a, b)).map(b => `${a.title} over ${b.title}`)))
    for (const node of nodes) for (const group of groups.filter(group => meet(node, group)))
        if (!holds(group, node)) faults.push(`${node.title} out of ${group.title}`)
    for (const node of app.graph.nodes) {
        const report = node.widgets?.find(w => w.name === 'graft_text')?.element
        const element = document.querySelector(`[data-node-id="${node.id}"]`)
        if (!report?.value || !element) continue
        const inner = report.getBoundingClientRect(), outer = element.getBoundingClientRect()
        const short = report.clientHeight < Math.min(report.scrollHeight, 70) - 1
        if (short || inner.bottom > outer.bottom || inner.right > outer.right)
            faults.push(`the report of ${node.id} ${node.title} is cut off`)
    }
    const pen = document.createElement('canvas').getContext('2d')
    for (const { title, size, font_size } of app.graph._groups) {
        pen.font = `${font_size}px Arial`
        const width = pen.measureText(title).width + font_size
        if (width > size[0]) faults.push(`the title of ${title} is too long`)
    }
    return faults
})()"""


@pytest.fixture(scope="module")
def opened(editor, vue):
    editor.open()
    return editor


def show(editor, path):
    editor.load(json.loads(path.read_text("utf-8")), path.stem)
    editor.page.evaluate("(app.canvas.ds.scale = 0.4, app.canvas.ds.offset = [150, 150], true)")
    editor.page.evaluate("(app.canvas.setDirty(true, true), true)")
    if editor.page.evaluate("LiteGraph.vueNodesMode === true"):
        editor.page.wait_for("document.querySelectorAll('[data-node-id]').length >= app.graph.nodes.length")


def wait_for_no_fault(editor):
    try:
        editor.page.wait_for(f"{FAULTS}.length === 0")
    except TimeoutError:
        assert editor.page.evaluate(FAULTS) == []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_no_node_covers_another_before_or_after_its_report(opened, path):
    show(opened, path)
    wait_for_no_fault(opened)
    told = opened.page.evaluate(f"""app.graph.nodes.filter(node => node.type.startsWith('Graft')
        && !node.type.endsWith('Settings') && !{json.dumps(SILENT)}.includes(node.type))
        .map(node => node.onExecuted({{ text: [{json.dumps(REPORT)}] }}) ?? node.id).length""")
    assert told > 0
    wait_for_no_fault(opened)


def test_nothing_is_covered_after_a_run_with_five_buckets_and_five_bad_files(opened, running):
    folder = running.base / "input" / "five"
    folder.mkdir(exist_ok=True)
    for index, size in enumerate(SIZES):
        Image.new("RGB", size, "red").save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text("a square")
        (folder / f"bad_{index}.png").write_text("no image")
    show(opened, FIRST_LORA)
    opened.set(DATASET, folder="five", resolution="64", skip_bad_images=True)
    opened.set(LORA, rank=2)
    opened.set(TRAIN, steps=1, batch_size=1, name="five")
    opened.set(SAVE, name="five")
    opened.set(LATENT, width=64, height=64, batch_size=1)
    opened.set(SAMPLER, steps=1)
    opened.run()
    report = "app.graph.getNodeById(3).widgets.find(w => w.name === 'graft_text').element.value"
    opened.page.wait_for(f"{report}.includes('Left out: 5')")
    opened.page.wait_for("app.nodeOutputs[12]?.images?.length")
    opened.wait_until_idle()
    assert opened.page.evaluate(report).count("Bucket") == 5
    wait_for_no_fault(opened)
