"""From an empty installation and pictures on another machine to a LoRA of them, with the browser alone."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from graft.dev.make_workflows import LAYOUTS
from graft.tests.support.editor import GRAFT_DIALOG as DIALOG

pytestmark = pytest.mark.browser
DATASET, TRAIN, SAMPLER, ENOUGH = 2, 5, 10, 12
ORIENTATION = 274
"""Number of the EXIF tag."""
GIVE = """(async files => {
    const transfer = new DataTransfer()
    for (const [name, text] of Object.entries(files))
        transfer.items.add(new File([Uint8Array.from(atob(text), c => c.charCodeAt(0))], name))
    const input = dialog.querySelector('input[type=file]:not([webkitdirectory])')
    input.files = transfer.files
    input.dispatchEvent(new Event('change'))
})"""
"""What the browser's file dialog does once files are chosen in it."""


def odd_pictures():
    """{name: bytes} of twelve pictures of odd kinds."""
    noise = np.random.default_rng(0)

    def pixels(width, height, channels=3):
        return noise.integers(0, 255, (height, width, channels), dtype=np.uint8)

    turned = Image.Exif()
    turned[ORIENTATION] = 6
    deep = noise.integers(0, 65535, (90, 120), dtype=np.uint16)
    return {
        name: _coded(image, **options)
        for name, image, options in (
            ("small.webp", Image.fromarray(pixels(200, 150)), {"format": "WEBP"}),
            ("turned.jpg", Image.fromarray(pixels(160, 120)), {"format": "JPEG", "exif": turned}),
            ("clear.png", Image.fromarray(pixels(150, 150, 4), "RGBA"), {"format": "PNG"}),
            ("print.jpg", Image.fromarray(pixels(150, 150, 4), "CMYK"), {"format": "JPEG"}),
            ("tiny.png", Image.fromarray(pixels(40, 40)), {"format": "PNG"}),
            ("huge.jpg", Image.new("RGB", (5000, 4000), "navy"), {"format": "JPEG"}),
            ("deep gray.png", Image.fromarray(deep), {"format": "PNG"}),
            ("gray.png", Image.fromarray(pixels(130, 130)[..., 0]), {"format": "PNG"}),
            ("palette.png", Image.fromarray(pixels(140, 110)).quantize(8), {"format": "PNG"}),
            ("wide.bmp", Image.fromarray(pixels(300, 80)), {"format": "BMP"}),
            ("tall.tiff", Image.fromarray(pixels(80, 300)), {"format": "TIFF"}),
            ("ünï ☃.PNG", Image.fromarray(pixels(128, 128)), {"format": "PNG"}),
        )
    }


def _coded(image, **options):
    file = io.BytesIO()
    image.save(file, **options)
    return base64.b64encode(file.getvalue()).decode()


def test_odd_pictures_become_a_lora_within_twelve_clicks(editor, running, vue):
    page, name = editor.page, f"mine_{vue}"
    editor.open()
    before = page.clicks
    editor.open_template(LAYOUTS["my_pictures"].title)  # 3 clicks
    editor.set(DATASET, folder=name, trigger="ohwx")  # typed: a click each, counted below
    editor.set(TRAIN, steps=2, batch_size=1, name=name)  # for the time of this test alone
    editor.set(6, name=name)
    editor.set(SAMPLER, steps=2)
    editor.set(13, every=0)
    editor.node(DATASET, "(node.widgets.find(w => w.type === 'button').callback(), true)")
    page.clicks += 3  # two fields, and the node's button, which the canvas draws
    page.wait_for(f"{DIALOG}?.open")
    page.clicks += 2  # Add images, and Open in the browser's own dialog
    page.evaluate(f"(dialog => {GIVE}({json.dumps(odd_pictures())}))({DIALOG})")
    page.wait_for(f"{DIALOG}.querySelectorAll('li').length === 12")
    page.evaluate(f"{DIALOG}.close()")
    page.clicks += 1
    editor.run()
    saved = running.base / "output" / "loras" / f"{name}.safetensors"
    page.wait_for("app.nodeOutputs[12]?.images?.length")
    editor.wait_until_idle()
    assert page.clicks - before <= ENOUGH
    assert len(list((running.base / "input" / name).iterdir())) == ENOUGH
    metadata = safe_open(saved, "pt").metadata()
    assert metadata["ss_num_train_images"] == "12" and metadata["modelspec.trigger_phrase"] == "ohwx"
