"""A picture of the editor: Train Steps with its panel, Sample Prompts beside it.

`GRAFT_WHOLE_TEMPLATE=1 GRAFT_ARTIFACTS=FOLDER pytest tests/browser/test_editor_picture.py` takes it when the
template is done, as FOLDER/editor.png; else it shows two steps.
"""

from __future__ import annotations

import json
import os

import pytest
from PIL import Image

from graft.dev.make_workflows import LAYOUTS

pytestmark = pytest.mark.browser
TRAIN, SAMPLER = 5, 10
PROMPTS = ("strawberry, sunburst style", "car, sunburst style", "teddy bear, sunburst style", "dog")
"""What the base draws and the dataset does not show."""
WHOLE = bool(os.environ.get("GRAFT_WHOLE_TEMPLATE"))
BOX = (75, 140, 1215, 850)
"""Of the page, in pixels: left, top, right, bottom."""

ADD_SAMPLE_PROMPTS = """(values => {
    const samples = LiteGraph.createNode('GraftSamplePrompts')
    samples.pos = [900, 870]
    app.graph.add(samples)
    for (const widget of samples.widgets) if (widget.name in values) widget.value = values[widget.name]
    const [base, train] = [1, 5].map(id => app.graph.getNodeById(id))
    base.connect(1, samples, 0)
    base.connect(2, samples, 1)
    samples.connect(0, train, train.inputs.findIndex(slot => slot.name === 'sample_prompts'))
    samples.setSize([320, 700])
    app.canvas.show_info = false
    app.canvas.ds.scale = 0.76
    app.canvas.ds.offset = [-777, 140]
    app.canvas.setDirty(true, true)
    return true
})"""


def test_the_picture_of_train_steps(editor, artifacts):
    editor.open()
    editor.open_template(LAYOUTS["first_lora"].title)
    values = {"prompts": "\n".join(PROMPTS), "width": 128, "height": 128, "steps": 24, "every": 30}
    values |= {} if WHOLE else {"steps": 2, "every": 2}
    editor.page.evaluate(f"{ADD_SAMPLE_PROMPTS}({json.dumps(values)})")
    if not WHOLE:
        editor.set(TRAIN, steps=2, batch_size=1, name="picture")
        editor.set(SAMPLER, steps=2)
    editor.run()
    editor.wait_until_idle(1200)
    panel = f"app.graph.getNodeById({TRAIN}).widgets.find(w => w.name === 'graft_chart').element.shadowRoot"
    editor.page.wait_for(
        f"[...{panel}.querySelectorAll('.samples img')].filter(i => i.naturalWidth).length === 4"
    )
    editor.page.wait_for("!document.querySelector('.p-toast-message')")
    editor.page.screenshot(artifacts / "editor.png")
    with Image.open(artifacts / "editor.png") as page:
        picture = page.convert("RGB").crop(BOX)
    assert len(picture.getcolors(1 << 24)) > 1000
    picture.save(artifacts / "editor.png", optimize=True)
