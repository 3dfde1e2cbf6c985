"""A headless Chromium driven over its own debugging protocol: no driver and no library beyond aiohttp.

Protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --no-proxy-server "
    "--hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync --disable-dev-shm-usage "
    "--remote-debugging-port=0 --remote-allow-origins=* --window-size=1600,1000 --force-color-profile=srgb"
).split()

PATIENCE = 180.0
"""Seconds until what a test waits for is a fault, also on a machine that has twenty other things to do."""

CLICK = """(async element => {
    element?.scrollIntoView({ block: 'nearest' })
    const { x, y, width, height } = element?.getBoundingClientRect() ?? {}
    await new Promise(done => setTimeout(done, 150))
    const after = element?.getBoundingClientRect() ?? {}
    const on = width && element.getRootNode().elementFromPoint(x + width / 2, y + height / 2)
    const reached = on && (element.contains(on) || on.contains(element))
    if (!reached || x !== after.x || y !== after.y) return false
    element.click()
    return true
})"""
"""element -> whether it was clicked, which it is only where a click on its middle reaches it. The page itself
does so: what a mouse does arrives later, when something else may lie there."""


def executable() -> str | None:
    """Return the Chromium on this machine, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Run Chromium with a fresh profile and yield its one page."""
    command = [executable() or "chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with contextlib.closing(Page(_debugging_port(process, profile))) as page:
            yield page
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Page:
    """One tab: `goto`, `evaluate`, `wait_for`, `click_on`, `screenshot`; `messages` are its console's."""

    def __init__(self, port: int, target: str = ""):
        self.messages: list[tuple[str, str]] = []
        """(level, text with the address it came from) of console calls, uncaught errors and failed
        requests.
        """
        self.clicks = 0
        """How often `click_on` was asked for."""
        self._loop = asyncio.new_event_loop()
        self._ids = itertools.count(1)
        self._port = port
        self._loop.run_until_complete(self._connect(target))
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result; raises RuntimeError with Chromium's words."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), PATIENCE))

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, javascript: str) -> Any:
        """Return the value of an expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=javascript, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if details := answer.get("exceptionDetails"):
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait_for(self, javascript: str, seconds: float = PATIENCE) -> Any:
        """Evaluate until the value is truthy and return it; raises TimeoutError naming the expression."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # not there yet
                if value := self.evaluate(javascript):
                    return value
            time.sleep(0.2)
        raise TimeoutError(f"after {seconds} s still not: {javascript}\n{self.messages[-5:]}")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click_on(self, element: str, seconds: float = PATIENCE) -> None:
        """Scroll to what a JavaScript expression gives, and click it once it is there, lies still and nothing
        covers it.
        """
        self.wait_for(f"{CLICK}({element})", seconds)
        self.clicks += 1

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    @contextlib.contextmanager
    def another_tab(self) -> Iterator[Page]:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        with contextlib.closing(Page(self._port, target)) as page:
            yield page
        self.call("Target.closeTarget", targetId=target)

    def close(self) -> None:
        self._loop.run_until_complete(self._http.close())
        self._loop.close()

    async def _connect(self, target: str) -> None:
        self._http = aiohttp.ClientSession(trust_env=False)
        async with self._http.get(f"http://127.0.0.1:{self._port}/json") as answer:
            pages = [tab for tab in await answer.json() if tab["type"] == "page"]
        tab = next(tab for tab in pages if not target or tab["id"] == target)
        self._socket = await self._http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async for frame in self._socket:
            message = json.loads(frame.data)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            if message.get("method") == "Page.javascriptDialogOpening":  # "leave this page?"
                leave = {"id": next(self._ids), "method": "Page.handleJavaScriptDialog"}
                await self._socket.send_json({**leave, "params": {"accept": True}})
            self._note(message.get("method"), message.get("params"))
        raise RuntimeError("Chromium has ended")

    def _note(self, event: str | None, data: Any) -> None:
        if event == "Runtime.consoleAPICalled":
            frames = data.get("stackTrace", {}).get("callFrames", [])
            text = " ".join(str(a.get("value", a.get("description", ""))) for a in data["args"])
            self.messages.append((data["type"], f"{text} {frames[0]['url'] if frames else ''}"))
        elif event == "Runtime.exceptionThrown":
            details = data["exceptionDetails"]
            text = details.get("exception", {}).get("description") or details["text"]
            self.messages.append(("error", f"{text} {details.get('url', '')}"))
        elif event == "Log.entryAdded":
            entry = data["entry"]
            self.messages.append((entry["level"], f"{entry['text']} {entry.get('url', '')}"))


def _debugging_port(process: subprocess.Popen[bytes], profile: Path, seconds: float = PATIENCE) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int((profile / "DevToolsActivePort").read_text().split()[0])
        time.sleep(0.1)
    raise RuntimeError(f"Chromium did not start (exit code {process.poll()})")
