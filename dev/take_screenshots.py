"""Pictures of the editor: `python dev/take_screenshots.py [WORD ...]` writes docs/screenshots.

Every template, the images of a dataset, a Dataset Report and the runs, in both renderings at 1440 x 900; with
words, only those whose name has one of them. It starts the ComfyUI of the tests (COMFYUI_PATH) and Chromium,
and trains a few steps of the starter model. Look at what it took before you commit it.
"""

from __future__ import annotations

import io
import json
import re
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "screenshots"
WIDTH, HEIGHT, QUALITY = 1440, 900, 72
LOOKS = {"classic": False, "nodes2": True}
TEMPLATES = ROOT / "example_workflows"
DATASET, ENCODE, LORA, TRAIN, PROMPTS = 2, 3, 4, 5, 13
"""Nodes of the first two templates."""
QUIET = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False}
"""ComfyUI's settings for what would lie over the nodes."""
PHOTOS, STEPS = "photos", 40
EXCHANGED = ("dog-noto-style", "whale-outline-drawing-style")
DIALOG = "[...document.body.children].map(e => e.shadowRoot?.querySelector('dialog')).find(Boolean)"
RUNS = "[...document.querySelectorAll('*')].map(e => e.shadowRoot).find(root => root?.querySelector('ul'))"
TOASTS = "document.querySelectorAll('.p-toast-close-button').forEach(button => button.click())"
BANNER = """[...document.querySelectorAll('button')].filter(b => b.textContent.trim() === 'Try it out')
    .forEach(b => [...b.parentElement.parentElement.querySelectorAll('button')].at(-1).click())"""
ADD_REPORT = f"""(() => {{
    const node = LiteGraph.createNode('GraftDatasetReport')
    const [base, encode, train] = [1, {ENCODE}, {TRAIN}].map(id => app.graph.getNodeById(id))
    for (const other of [...app.graph.nodes])
        if (Number(other.id) > {TRAIN} || !other.type.startsWith('Graft')) app.graph.remove(other)
    app.graph._groups.length = 0
    node.pos = [train.pos[0] + 560, train.pos[1]]
    node.size = [620, node.size[1]]
    app.graph.add(node)
    base.connect(0, node, 0)
    train.connect(0, node, 1)
    encode.connect(0, node, 2)
    return Number(node.id)
}})()"""
LOOK_AT_REPORT = f"""(([left, top]) => {{
    Object.assign(app.canvas.ds, {{ scale: 0.9, offset: [120 - left, 140 - top] }})
    app.canvas.setDirty(true, true)
}})(app.graph.getNodeById({TRAIN}).pos)"""


def take(words: list[str]) -> None:
    """Take the pictures and print their sizes."""
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()
    from graft.commands.headless.server import find_comfyui, server
    from graft.tests.support.chromium import chromium
    from graft.tests.support.editor import Editor

    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        base = Path(scratch) / "comfyui"
        with server(find_comfyui(), base, cpu=True) as running, chromium(Path(scratch) / "profile") as page:
            add_photos(base / "input" / PHOTOS)
            for name, value in QUIET.items():
                running.request("/settings", {name: value})
            take_all(Editor(page, running.address), running, words)


def take_all(editor: Any, running: Any, words: list[str]) -> None:
    """Take the pictures in an editor."""
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    editor.page.call("Emulation.setDeviceMetricsOverride", **size)
    for look, nodes2 in LOOKS.items():
        chosen = {f"{name}-{look}": show for name, show in pictures().items()}
        chosen = {n: show for n, show in chosen.items() if not words or any(word in n for word in words)}
        if not chosen:
            continue
        running.request("/settings", {"Comfy.VueNodes.Enabled": nodes2})
        editor.open()
        for name, show in chosen.items():
            show(editor)
            save(editor, FOLDER / f"{name}.webp")


def pictures() -> Mapping[str, Callable[[Any], None]]:
    """Return what brings the editor to each picture, by its name."""
    templates = {_slug(path): partial(show_template, path=path) for path in sorted(TEMPLATES.glob("*.json"))}
    return {**templates, "dataset": show_dataset, "dataset_report": show_report, "runs": show_runs}


def _slug(path: Path) -> str:
    return re.sub(r"\W+", "_", path.stem.lower())


def first_lora() -> Path:
    return next(path for path in TEMPLATES.glob("*.json") if "first" in path.stem.lower())


def add_photos(folder: Path) -> None:
    """Write a dataset of the starter's own images, two of whose captions are exchanged."""
    if folder.is_dir():
        return
    shutil.copytree(ROOT / "starter" / "base_style", folder, ignore=shutil.ignore_patterns("LICENSE"))
    one, other = (folder / f"{name}.txt" for name in EXCHANGED)
    first, second = one.read_text(), other.read_text()
    one.write_text(second)
    other.write_text(first)


def show_template(editor: Any, path: Path) -> None:
    editor.load(json.loads(path.read_text(encoding="utf-8")), path.stem)
    settle(editor)


def show_dataset(editor: Any) -> None:
    show_template(editor, first_lora())
    editor.set(DATASET, folder=PHOTOS, resolution="128", trigger="ohwx")
    editor.node(DATASET, "(node.widgets.find(w => w.type === 'button').callback(), true)")
    editor.page.wait_for(f"[...{DIALOG}?.querySelectorAll('li img')].slice(0, 5).every(i => i.naturalWidth)")


def show_report(editor: Any) -> None:
    close_dialog(editor)
    show_template(editor, first_lora())
    editor.set(DATASET, folder=PHOTOS, resolution="128")
    editor.set(LORA, rank=8)
    editor.set(TRAIN, steps=STEPS, batch_size=2, name="photos")
    report = editor.page.evaluate(ADD_REPORT)
    editor.page.evaluate(LOOK_AT_REPORT)  # images out of view are not loaded
    editor.run()
    shown = f"app.graph.getNodeById({report}).widgets.find(w => w.name === 'graft_gallery')?.element"
    editor.page.wait_for(f"{shown}?.shadowRoot.querySelector('img')?.naturalWidth", 1800)
    editor.wait_until_idle()
    editor.page.evaluate(LOOK_AT_REPORT)


def show_runs(editor: Any) -> None:
    close_dialog(editor)
    show_template(editor, next(TEMPLATES.glob("02*.json")))
    editor.set(DATASET, folder=PHOTOS, resolution="128", trigger="ohwx")
    editor.set(PROMPTS, prompts="dog\ncar", width=128, height=128, steps=12, every=STEPS)
    for rank in (4, 16):
        editor.set(LORA, rank=rank)
        editor.set(TRAIN, steps=STEPS, batch_size=2, name=f"rank {rank}")
        editor.run()
        editor.wait_until_idle(1800)
    editor.page.evaluate("app.extensionManager.sidebarTab.toggleSidebarTab('graft-runs')")
    editor.page.wait_for(f"[...({RUNS})?.querySelectorAll('li') ?? []].length >= 2")


def close_dialog(editor: Any) -> None:
    editor.page.evaluate(f"({DIALOG})?.close()")


def close_messages(editor: Any) -> None:
    """Close what ComfyUI says of itself, in corners and above the canvas."""
    editor.page.evaluate(TOASTS)
    editor.page.evaluate(BANNER)


def settle(editor: Any) -> None:
    """Wait until the nodes are drawn."""
    editor.page.evaluate("(app.canvas.setDirty(true, true), true)")
    if editor.page.evaluate("LiteGraph.vueNodesMode === true"):
        editor.page.wait_for("document.querySelectorAll('[data-node-id]').length >= app.graph.nodes.length")


def save(editor: Any, path: Path) -> None:
    from PIL import Image

    close_messages(editor)
    time.sleep(2)  # the view moves to its place
    with tempfile.TemporaryDirectory() as scratch:
        editor.page.screenshot(Path(scratch) / "page.png")
        taken = (Path(scratch) / "page.png").read_bytes()
    with Image.open(io.BytesIO(taken)) as page:
        page.convert("RGB").save(path, "WEBP", quality=QUALITY, method=6)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    take(sys.argv[1:])
