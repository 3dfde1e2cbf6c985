"""The way from a new ComfyUI to the first picture by a LoRA of one's own: how many clicks, how long.

`GRAFT_WHOLE_TEMPLATE=1 pytest -n0 -s tests/browser/test_newcomer.py` runs the template as it is shipped, else
a few steps of it.
"""

from __future__ import annotations

import os
import time

import pytest

from graft.dev.make_workflows import LAYOUTS

pytestmark = pytest.mark.browser
TRAIN, SAVE, SAMPLER, SAVE_IMAGE = 5, 6, 10, 12
MOST_CLICKS = 5


@pytest.fixture(scope="session", autouse=True)
def seconds():
    """A function that says how long ago it was that ComfyUI's start was asked for."""
    begun = time.monotonic()
    return lambda: time.monotonic() - begun


def test_the_first_picture_takes_at_most_five_clicks(editor, running, seconds):
    page, told = editor.page, [("ComfyUI has started", seconds())]
    editor.open()
    told.append(("the editor is open", seconds()))
    before = page.clicks
    editor.open_template(LAYOUTS["first_lora"].title)
    for node in (TRAIN, SAVE):
        editor.set(node, name="newcomer")
    if not os.environ.get("GRAFT_WHOLE_TEMPLATE"):
        editor.set(TRAIN, steps=3, batch_size=1)
        editor.set(SAMPLER, steps=2)
    editor.run()
    clicks = page.clicks - before
    told.append((f"after {clicks} clicks the template runs", seconds()))
    editor.wait_until_idle(1200)
    page.wait_for(f"app.nodeOutputs[{SAVE_IMAGE}]?.images?.length")
    told.append(("the first pictures are there", seconds()))
    print("\n" + "\n".join(f"{when:6.1f} s  {what}" for what, when in told))
    assert clicks <= MOST_CLICKS
    assert (running.base / "output" / "loras" / "newcomer.safetensors").is_file()
