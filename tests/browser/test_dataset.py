"""A person with images on another machine: they reach a dataset by the browser, and are looked over there."""

from __future__ import annotations

import base64
import io
import json
import zipfile

import numpy as np
import pytest
from PIL import Image

from graft.dev.make_workflows import editor_file
from graft.tests.support.clips import write_clip
from graft.tests.support.editor import GRAFT_DIALOG as DIALOG

pytestmark = pytest.mark.browser
WORKFLOW = json.loads(editor_file("first_lora").read_text("utf-8"))
DATASET = 2
WIDGET = "node.widgets.find(w => w.name === '{}').value"


def picture(color, size=(300, 200)):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def input_folder(running):
    """input/pets: two usable images, one without a caption, a copy and a file that is no image."""
    folder = running.base / "input" / "pets"
    folder.mkdir()
    for name, color in (("cat", "red"), ("dog", "green"), ("twin", "green"), ("bare", "blue")):
        (folder / f"{name}.png").write_bytes(picture(color))
        if name != "bare":
            (folder / f"{name}.txt").write_text(f"a {name}\n")
    (folder / "bad.png").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def opened(editor, vue, input_folder):
    editor.open()
    editor.load_new(WORKFLOW)
    editor.set(DATASET, folder="pets", resolution="256")
    return editor


@pytest.fixture
def grid(opened):
    """The dialog that the node's button opens, closed afterwards."""
    opened.set(DATASET, folder="pets", leave_out="")
    opened.node(DATASET, "(node.widgets.find(w => w.type === 'button').callback(), true)")
    opened.page.wait_for(f"{DIALOG}?.querySelectorAll('li').length > 0")
    yield lambda expression: opened.page.evaluate(f"(dialog => {expression})({DIALOG})")
    opened.page.evaluate(f"({DIALOG})?.close()")
    opened.page.wait_for(f"!({DIALOG})")


def wait(editor, expression):
    return editor.page.wait_for(f"(dialog => {expression})({DIALOG})")


def card(name):
    return f"[...dialog.querySelectorAll('li')].find(li => li.querySelector('.name').title === '{name}')"


def drop(files, on):
    """JavaScript that drops {name: bytes} by the function `on` of a DataTransfer."""
    coded = json.dumps({name: base64.b64encode(content).decode() for name, content in files.items()})
    return f"""(transfer => {{
        for (const [name, text] of Object.entries({coded}))
            transfer.items.add(new File([Uint8Array.from(atob(text), c => c.charCodeAt(0))], name))
        return ({on})(transfer)
    }})(new DataTransfer())"""


ON_DIALOG = """transfer => dialog.dispatchEvent(
    new DragEvent('drop', { dataTransfer: transfer, bubbles: true, composed: true }))"""


def test_every_image_is_shown_with_what_is_wrong_with_it(opened, grid):
    assert grid("dialog.querySelector('.counts').textContent") == "5 images, 2 with problems"
    assert grid(f"{card('cat.png')}.querySelector('.size').textContent").startswith("300 \u00d7 200 \u2192 ")
    assert grid(f"{card('bad.png')}.querySelector('.badge').textContent").startswith("is not an image")
    assert grid(f"{card('bare.png')}.querySelector('.badge').textContent") == "No caption"
    assert grid(f"{card('twin.png')}.querySelector('.badge').textContent") == "same as dog.png"
    wait(opened, f"{card('cat.png')}.querySelector('img').naturalWidth === 300")
    size = "(box => [box.width, box.height])({}.querySelector('{}').getBoundingClientRect())"
    frame, crop = (grid(size.format(card("cat.png"), part)) for part in (".frame", ".frame i"))
    assert frame[0] / frame[1] == pytest.approx(1.5, rel=0.02) and crop[0] * crop[1] < frame[0] * frame[1]


@pytest.mark.feature(158)
def test_a_caption_is_edited_in_place(opened, grid, input_folder):
    box = f"{card('cat.png')}.querySelector('textarea')"
    text = f"a cat on a mat {id(grid)}"
    grid(f"({box}.value = '{text}', {box}.dispatchEvent(new Event('change')), true)")
    wait(opened, f"{card('cat.png')}.querySelector('.state').textContent === 'Saved'")
    assert (input_folder / "cat.txt").read_text() == f"{text}\n"
    (input_folder / "cat.txt").write_text("by another program")
    grid(f"({box}.value = 'mine', {box}.dispatchEvent(new Event('change')), true)")
    wait(opened, f"{card('cat.png')}.querySelector('.state').textContent.includes('by another program')")
    assert (input_folder / "cat.txt").read_text() == "by another program"


def test_an_image_is_left_out_and_put_back_by_its_button_alone(opened, vue, grid):
    if vue:
        drawn = f"document.querySelector('[data-node-id=\"{DATASET}\"]')?.innerHTML ?? ''"
        opened.page.wait_for(f"({drawn}).includes('references')")
        assert not opened.page.evaluate(f"({drawn}).includes('leave_out')")
    grid(f"{card('bad.png')}.querySelector('button').click()")
    wait(opened, f"{card('bad.png')}.classList.contains('out')")
    sent = opened.page.evaluate("app.graphToPrompt().then(({ output }) => output['2'].inputs.leave_out)")
    assert sent == "bad.png"
    grid(f"{card('bad.png')}.querySelector('button').click()")
    wait(opened, f"!{card('bad.png')}.classList.contains('out')")
    assert opened.node(DATASET, WIDGET.format("leave_out")) == ""


def test_dropped_files_are_added_and_others_named(opened, grid, input_folder):
    files = {"new.png": picture("teal"), "new.txt": b"a teal thing", "film.mp4": b"x", "fake.png": b"x"}
    files |= {"dog.txt": b"another dog"}
    grid(drop(files, ON_DIALOG))
    wait(opened, f"{card('new.png')} && !!dialog.querySelector('.intake pre')")
    told = grid("dialog.querySelector('.intake').innerText")
    assert "film.mp4: neither an image" in told and "fake.png: is not an image" in told
    assert "Already there, with other content: 1 (dog.txt)" in told
    assert (input_folder / "dog.txt").read_text() == "a dog\n"
    grid("[...dialog.querySelectorAll('.intake button')].find(b => b.textContent === 'Replace').click()")
    wait(opened, f"{card('dog.png')}.querySelector('textarea').value === 'another dog'")
    (input_folder / "dog.txt").write_text("a dog\n")
    for name in ("new.png", "new.txt"):
        (input_folder / name).unlink()


def test_a_zip_that_is_dropped_on_the_node_becomes_a_new_folder(opened, running):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("birds/owl.png", picture("brown"))
        archive.writestr("birds/owl.txt", "an owl")
    on = "transfer => app.graph.getNodeById(2).onDragDrop(new DragEvent('drop', { dataTransfer: transfer }))"
    assert opened.page.evaluate(drop({"birds.zip": content.getvalue()}, on))
    wait(opened, "dialog?.querySelector('.intake form input').value === 'birds'")
    opened.page.evaluate(f"({DIALOG}).querySelector('.intake form').requestSubmit()")
    wait(opened, card("owl.png") + " && true")
    assert opened.node(DATASET, WIDGET.format("folder")) == "birds"
    assert (running.base / "input" / "birds" / "owl.txt").read_text() == "an owl"
    opened.page.evaluate(f"({DIALOG}).close()")


def test_everything_has_a_name_and_escape_closes(opened, grid):
    unnamed = """[...dialog.querySelectorAll('button, textarea, input:not([hidden]), img, progress')].filter(
        e => !(e.ariaLabel || e.alt || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"""
    assert grid(unnamed) == [] and grid("dialog.matches(':modal') && dialog.ariaLabel") == "Images"
    opened.press("Escape")
    opened.page.wait_for(f"!({DIALOG})")


def test_of_a_thousand_images_only_those_in_view_are_drawn(opened, running):
    folder = running.base / "input" / "many"
    if not folder.is_dir():
        folder.mkdir()
        for index in range(1000):
            Image.new("RGB", (16, 16), (index % 256, index // 256, 0)).save(folder / f"{index:04}.png")
            (folder / f"{index:04}.txt").write_text("x")
    opened.set(DATASET, folder="many")
    opened.node(DATASET, "(node.widgets.find(w => w.type === 'button').callback(), true)")
    wait(opened, "dialog?.querySelectorAll('li').length === 1000")
    wait(opened, "dialog.querySelector('li img').naturalWidth > 0")
    assert opened.page.evaluate(f"[...{DIALOG}.querySelectorAll('img')].filter(i => i.complete).length") < 120
    opened.page.evaluate(f"(box => box.scrollTo(0, box.scrollHeight))({DIALOG}.querySelector('.scroll'))")
    wait(opened, "[...dialog.querySelectorAll('li img')].at(-1).naturalWidth > 0")
    opened.page.evaluate(f"({DIALOG}).close()")


ADD_REPORT = """(() => {
    const node = LiteGraph.createNode('GraftDatasetReport')
    node.pos = [-600, 0]
    app.graph.add(node)
    app.graph.getNodeById(3).connect(0, node, node.inputs.findIndex(slot => slot.name === 'dataset'))
    app.canvas.ds.scale = 0.8
    app.canvas.ds.offset = [900, 200]
    app.canvas.setDirty(true, true)
    return Number(node.id)
})()"""
WORST_FIRST = (("dog", "misfit"), ("twin", "notLearned"), ("cat", "learned"))


def test_the_gallery_of_a_report_leads_to_its_images_the_worst_first(opened, input_folder):
    opened.set(DATASET, folder="pets", leave_out="")
    report = opened.page.evaluate(ADD_REPORT)
    rows = [
        {"key": f"{name}.png".encode().hex(), "name": f"{name}.png", "source": 0, "stamp": "1-1"}
        | {"verdict": verdict, "note": "learned 3%, caption helps -9%"}
        for name, verdict in WORST_FIRST
    ]
    opened.node(report, f"node.onExecuted({{ text: ['table'], graft_report: {json.dumps(rows)} }}) ?? 1")
    buttons = f"[...app.graph.getNodeById({report}).widgets.find(w => w.name === 'graft_gallery')"
    buttons += ".element.shadowRoot.querySelectorAll('button')]"
    opened.page.wait_for(f"{buttons}.filter(b => b.querySelector('img').naturalWidth === 300).length === 3")
    labels = opened.page.evaluate(f"{buttons}.map(b => b.ariaLabel)")
    assert labels == ["dog.png, caption does not fit", "twin.png, not learned", "cat.png, learned"]
    opened.page.click_on(f"{buttons}[0]")
    names = "[...dialog.querySelectorAll('li .name')].map(e => e.title)"
    wait(opened, f"{names}.length === 5")
    assert opened.page.evaluate(f"(dialog => {names})({DIALOG})")[:3] == ["dog.png", "twin.png", "cat.png"]
    box = f"{card('dog.png')}.querySelector('textarea')"
    wait(opened, f"dialog.getRootNode().activeElement === {box}")
    badge = f"{card('dog.png')}.querySelector('.badge').textContent"
    wait(opened, f"{badge} === 'caption does not fit: learned 3%, caption helps -9%'")
    opened.page.evaluate(
        f"(dialog => ({box}.value = 'a dog that runs', {box}.dispatchEvent(new Event('change'))))({DIALOG})"
    )
    wait(opened, f"{card('dog.png')}.querySelector('.state').textContent === 'Saved'")
    assert (input_folder / "dog.txt").read_text() == "a dog that runs\n"
    opened.page.evaluate(f"(dialog => {card('twin.png')}.querySelector('button').click())({DIALOG})")
    wait(opened, f"{card('twin.png')}.classList.contains('out')")
    assert opened.node(DATASET, WIDGET.format("leave_out")) == "twin.png"
    opened.page.evaluate(f"({DIALOG}).close()")
    opened.page.wait_for(f"{buttons}.map(b => b.className).join() === ',out,'")
    (input_folder / "dog.txt").write_text("a dog\n")
    opened.set(DATASET, leave_out="")


COLORS = (255, 0, 0), (0, 0, 255)
PREVIEWS = """(folders => {
    app.graph.clear()
    const make = (type, left, top, values = {}) => {
        const node = LiteGraph.createNode(type)
        node.pos = [left, top]
        app.graph.add(node)
        for (const [name, value] of Object.entries(values))
            node.widgets.find(widget => widget.name === name).value = value
        return node
    }
    const base = make('CheckpointLoaderSimple', 0, 0, { ckpt_name: 'graft_tiny_sd3.safetensors' })
    return folders.map((folder, index) => {
        const dataset = make('GraftLoadDataset', 340, 560 * index, { resolution: '64', ...folder })
        const preview = make('GraftPreviewDataset', 700, 560 * index)
        const image = make('PreviewImage', 1000, 560 * index)
        dataset.connect(0, preview, 'dataset')
        base.connect(0, preview, 'model')
        preview.connect(0, image, 0)
        app.canvas.ds.scale = 0.5
        app.canvas.ds.offset = [100, 100]
        return image.id
    })
})"""
"""Makes a preview of each dataset and returns the ids of the nodes that show them."""


def test_preview_dataset_shows_pairs_side_by_side_and_the_frames_of_clips(opened, running):
    folder = running.base / "input"
    for name, color in zip(("sources", "targets"), COLORS):
        (folder / name).mkdir(exist_ok=True)
        Image.new("RGB", (64, 64), color).save(folder / name / "a.png")
    (folder / "targets" / "a.txt").write_text("make it blue")
    frames = np.stack([np.full((64, 64, 3), level, np.uint8) for level in (0, 80, 160, 240)])
    write_clip(folder / "clips" / "a.mp4", frames)
    datasets = [{"folder": "targets", "references": "sources"}, {"folder": "clips", "frames": 4}]
    ids = opened.page.evaluate(f"{PREVIEWS}({json.dumps(datasets)})")
    opened.run()
    shown = '(node.imgs?.[0] ?? document.querySelector(`[data-node-id="${node.id}"] img`))'
    for node in ids:
        opened.page.wait_for(f"(node => {shown}?.naturalWidth > 300)(app.graph.getNodeById({node}))")
    pair, clip = (np.asarray(sheet(opened, running, node)).astype(int) for node in ids)
    half = pair.shape[1] // 2
    has = [[(side == color).all(-1).any() for side in (pair[:, :half], pair[:, half:])] for color in COLORS]
    assert has == [[True, False], [False, True]]
    levels = {round(value / 80) for value in clip[..., 0].flatten() if value % 80 < 8 or value % 80 > 72}
    assert levels >= {0, 1, 2, 3}


def sheet(editor, running, node):
    """Return the image that a node of the page shows."""
    [shown] = editor.page.evaluate(f"app.nodeOutputs[{node}].images")
    return Image.open(running.base / "temp" / shown["subfolder"] / shown["filename"]).convert("RGB")
