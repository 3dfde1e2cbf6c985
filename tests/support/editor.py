"""ComfyUI's editor in a browser: what a person does in it, by its own buttons where it has them."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from graft.tests.support.chromium import PATIENCE, Page

GRAFT_DIALOG = "[...document.body.children].map(e => e.shadowRoot?.querySelector('dialog')).find(Boolean)"
"""The dialog that one of Graft's panels has opened, as JavaScript."""
DIALOG = ":is(.p-dialog, [role=dialog])"
"""In the frontends of ComfyUI 0.3.75 and of 0.33."""
WORKFLOW = "window.app?.extensionManager?.workflow?.activeWorkflow"
"""What the editor shows; at its start none, then the one it opens by itself."""
STEADY = """(async () => {
    const button = document.querySelector('.side-bar-button')
    let top, frames, since
    do {
        await new Promise(requestAnimationFrame)
        const now = button.getBoundingClientRect().top
        if (now !== top) [top, frames, since] = [now, 0, performance.now()]
        frames += 1
    } while (frames < 30 || performance.now() - since < 2000)
})()"""
"""Ends when nothing has pushed the page down for a while, as its banners do."""


class Editor:
    """The editor of one server in one page."""

    def __init__(self, page: Page, address: str):
        self.page, self.url = page, f"http://{address}/"

    def open(self) -> None:
        """Load, or reload, the page."""
        self.page.evaluate("window.graftLeft = true")
        self.page.goto(self.url)
        self.page.wait_for(
            f"!!(!window.graftLeft && {WORKFLOW}?.isLoaded && app.extensionManager.setting && "
            "document.querySelector('.side-bar-button'))"
        )
        self.page.wait_for("!document.querySelector('#splash-loader, .p-blockui-mask')")
        self.page.evaluate(STEADY)

    def open_template(self, name: str) -> None:
        """Templates > Extensions > graft > the card of that name."""
        graft, card = _text("graft", DIALOG), _text(name, DIALOG)
        opened = f"{WORKFLOW}.path.endsWith('/{name}.json')"
        for _ in self._attempts(opened):
            with contextlib.suppress(TimeoutError):  # a dialog that moves on while its pictures come
                self._click_until(_labeled("Templates"), f"!!({graft})")
                self._click_until(graft, f"!!({card})")
                self._click_until(card, f"!document.querySelector('{DIALOG}')")

    def _click_until(self, element: str, condition: str) -> None:
        for _ in self._attempts(condition) if not self.page.evaluate(condition) else ():
            self.page.click_on(element, 30)

    def _attempts(self, condition: str) -> Iterator[None]:
        """Let the caller click until the condition holds: clicks go astray, uncounted, while a page moves."""
        clicks, begun = self.page.clicks, time.monotonic()
        while time.monotonic() < begun + PATIENCE:
            self.page.clicks = clicks
            yield
            with contextlib.suppress(TimeoutError):
                self.page.wait_for(condition, 8)
                return
        raise TimeoutError(f"clicking never led to {condition}")

    def load(self, workflow: dict[str, Any], name: str = "test") -> None:
        self.page.evaluate(f"app.loadGraphData({json.dumps(workflow)}, true, true, {json.dumps(name)})")

    def load_new(self, workflow: dict[str, Any]) -> None:
        """Load a workflow under an id that no run of another test has."""
        self.load({**workflow, "id": str(uuid.uuid4())})

    def set(self, node: int, **values: Any) -> None:
        """Type values into a node's widgets."""
        for widget, value in values.items():
            self.page.evaluate(
                f"(w => {{ w.value = {json.dumps(value)}; w.callback?.(w.value) }})"
                f"({_node(node)}.widgets.find(w => w.name === {json.dumps(widget)}))"
            )

    def run(self) -> None:
        """Press Run, once no message lies over it."""
        self.page.wait_for("!document.querySelector('.p-toast-message')")
        self.page.click_on(_labeled("Run"))

    def cancel(self) -> None:
        self.page.click_on(_labeled("Cancel current run"))

    def watch_progress(self) -> None:
        """Collect [node, value, max] of the server's progress events in window.graftSeen."""
        self.page.evaluate("""(async () => {
            const { api } = await import('/scripts/api.js');
            window.graftSeen = [];
            window.graftWatch ??= api.addEventListener('progress', ({ detail }) =>
                window.graftSeen.push([Number(detail.node), detail.value, detail.max])) ?? true })()""")

    def idle(self) -> bool:
        queue = self.page.evaluate("fetch('/queue').then(r => r.json())")
        return not queue["queue_running"] and not queue["queue_pending"]

    def wait_until_idle(self, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not self.idle():
            assert time.monotonic() < deadline, "still running"
            time.sleep(0.3)

    def press(self, key: str) -> None:
        codes = {"Escape": 27, "r": 82, ".": 190, "Tab": 9, "Enter": 13, " ": 32, "End": 35, "ArrowLeft": 37}
        codes |= {"Home": 36, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        event = {"key": key, "code": {" ": "Space"}.get(key, key), "windowsVirtualKeyCode": codes[key]}
        written = {"text": text} if (text := {"Enter": "\r", " ": " "}.get(key)) else {}
        self.page.call("Input.dispatchKeyEvent", type="keyDown", **event, **written)
        self.page.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def node(self, number: int, expression: str) -> Any:
        """Evaluate an expression over `node`."""
        return self.page.evaluate(f"(node => {expression})({_node(number)})")


def _node(number: int) -> str:
    return f"app.graph.getNodeById({number})"


def _labeled(label: str) -> str:
    return (
        "[...document.querySelectorAll('button')].find("
        f"b => (b.getAttribute('aria-label') || b.textContent).trim() === {json.dumps(label)})"
    )


def _text(text: str, within: str) -> str:
    return (
        f"[...document.querySelectorAll({json.dumps(within + ' *')})].find("
        f"e => !e.children.length && e.textContent.trim() === {json.dumps(text)})"
    )
