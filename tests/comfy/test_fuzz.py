"""Node inputs of every kind through POST /prompt: never an error of the server, nothing outside its folders.

$GRAFT_FUZZ_PROMPTS sets how many prompts are sent, $GRAFT_FUZZ_SEED which ones.
"""

from __future__ import annotations

import json
import os
import random
import textwrap
import urllib.error
import urllib.request
import uuid

import pytest
from PIL import Image

from graft.commands.headless.server import server
from graft.nodes.all_nodes import ALL_NODES
from graft.tests.support.small_base import put_small_base

PROMPTS = int(os.environ.get("GRAFT_FUZZ_PROMPTS", 300))
SEED = int(os.environ.get("GRAFT_FUZZ_SEED", 0))
WITNESS = '''
    """Writes down which files outside the server's folders are opened: those there, and any for writing."""
    import os, sys, threading
    BASE, OUTSIDE, NOTES = {base!r}, {outside!r}, {notes!r}
    busy = threading.local()

    def note(event, arguments):
        if event != "open" or not isinstance(arguments[0], str) or getattr(busy, "now", False):
            return
        path, mode, flags = arguments
        writes = any(c in mode for c in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))
        where = os.path.realpath(path)
        inside = where.startswith(BASE + os.sep) or where.startswith("/dev/") or "__pycache__" in where
        if where.startswith(OUTSIDE) or (writes and not inside):
            busy.now = True
            with open(NOTES, "a") as file:
                file.write(where + "\\n")
            busy.now = False

    sys.addaudithook(note)
    NODE_CLASS_MAPPINGS = {{}}
'''


@pytest.fixture(scope="module")
def watched_server(comfyui, tmp_path_factory):
    """A ComfyUI that notes what is opened outside its folders, beside a folder with files to find."""
    top = tmp_path_factory.mktemp("fuzz").resolve()
    base, outside, notes = top / "base", top / "outside", top / "opened.txt"
    (base / "custom_nodes" / "witness").mkdir(parents=True)
    code = textwrap.dedent(WITNESS).format(base=str(base), outside=str(outside), notes=str(notes))
    (base / "custom_nodes" / "witness" / "__init__.py").write_text(code)
    put_small_base(base / "models" / "checkpoints")
    outside.mkdir()
    for folder in (base / "input" / "tiny", outside):
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), "red").save(folder / "red.png")
        (folder / "red.txt").write_text("red")
    (outside / "state.json").write_text("{}")
    (outside / "my_lora.safetensors").write_bytes(b"no weights")
    with server(comfyui, base, cpu=True) as running:
        notes.write_text("")  # what ComfyUI opened while it started
        yield running, outside, notes


def values(outside):
    """Strings, numbers and other things that a widget was not made for, and a few that it was."""
    climb = "../" * 8
    return (
        f"{climb}{outside.as_posix().lstrip('/')}", str(outside), f"{outside}/red.png", "../../outside",
        "..\\..\\outside", f"{outside}/my_lora.safetensors", "/etc/passwd", "~/x", "C:\\x",
        "file:///etc/passwd", "", " ", ".", "..", "a/../../b", "\x00", "a\nb", "\u202etxt", "\ud7ff",
        "\U0001f600", "x" * 5000, "con", "tiny", "my_lora", "none", "auto", "[trigger]", "{0}", "%s", "*",
        "[a-", "(?P<", "$(touch x)", "__import__('os')", 0, 1, 2, -1, 7.5, 1e300, -1e300, 2**63, 2**70,
        float("nan"), float("inf"), True, False, None,
        [], {}, [1, 2, 3], ["1"], ["1", 0], ["9", 0], ["1", 99],
        ["1", -1], ["1", "0"], {"a": {"b": []}}, [[["1", 0]]],
    )  # fmt: skip


SOURCES = {
    "GRAFT_DATASET": {"class_type": "GraftLoadDataset", "inputs": {"folder": "tiny", "resolution": "64"}},
    "GRAFT_LORA": {"class_type": "GraftBuildLora", "inputs": {}},
    "GRAFT_STATE": {"class_type": "GraftLoadTrainingState", "inputs": {"name": "nothing"}},
    "IMAGE": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0}},
}
"""Nodes that cost little, for sockets; the others get a wrong one or none."""


def prompt(draw, pool):
    """One of Graft's nodes with some widgets as they should be and others not, where ComfyUI runs it."""
    node = draw.choice(ALL_NODES)
    schema = node.define_schema()
    graph = {"1": {"class_type": schema.node_id, "inputs": {}}}
    for group, given in node.INPUT_TYPES().items():
        for name, spec in given.items():
            kind, options = spec[0], spec[1] if len(spec) > 1 and isinstance(spec[1], dict) else {}
            if kind in SOURCES and draw.random() < 0.9:
                number = str(len(graph) + 1)
                graph[number] = complete(SOURCES[kind])
                value = [number, 0]
            elif draw.random() < 0.8 and ("default" in options or isinstance(kind, list)):
                value = options.get("default", kind[0] if isinstance(kind, list) and kind else "")
            else:
                value = draw.choice(pool)
            if group == "hidden" and isinstance(value, list):
                continue  # ComfyUI does not validate it, and a link to no node ends its own worker thread
            if draw.random() < 0.97:
                graph["1"]["inputs"][name] = value
    graph["90"] = {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}
    return graph


def complete(entry):
    """Fill in the defaults of a source."""
    node = next((node for node in ALL_NODES if node.define_schema().node_id == entry["class_type"]), None)
    found = {}
    for given in node.INPUT_TYPES().values() if node else ():
        for name, spec in given.items():
            if len(spec) > 1 and "default" in spec[1]:
                found[name] = spec[1]["default"]
    return {"class_type": entry["class_type"], "inputs": {**found, **entry["inputs"]}}


def post(running, graph, extra):
    """Return (status, answer) of POST /prompt."""
    body = {"prompt": graph, "prompt_id": str(uuid.uuid4()), "extra_data": extra}
    request = urllib.request.Request(
        f"http://{running.address}/prompt", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=600
        ) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, {"text": error.read().decode(errors="replace")}


def test_no_prompt_ends_the_server_or_leads_out_of_its_folders(watched_server):
    running, outside, notes = watched_server
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    draw, pool, failed, queued = random.Random(SEED), values(outside), [], {}
    for _ in range(PROMPTS):
        graph = prompt(draw, pool)
        extra = draw.choice(({}, {"extra_pnginfo": draw.choice((None, [], "x", {"workflow": "x"}))}))
        status, answer = post(running, graph, extra)
        if status == 200:
            queued[answer["prompt_id"]] = graph
        elif status != 400:
            failed.append((status, graph, answer))
    assert failed == []
    assert len(queued) > PROMPTS // 20
    messages = [message(running, known, graph) for known, graph in queued.items()]
    print(
        f"{PROMPTS} prompts: {len(queued)} accepted, of which {messages.count('done')} ended without an error"
    )
    assert running.process.poll() is None and running.object_info()["GraftTrainSteps"]
    assert "done" in messages and any(text != "done" for text in messages)
    assert notes.read_text() == ""
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before


def message(running, prompt_id, graph):
    """Wait for a prompt; return "done" or the error that it ended with."""
    try:
        running.wait(prompt_id, timeout=600)
        return "done"
    except TimeoutError:
        raise AssertionError(f"does not end: {graph}") from None
    except RuntimeError as error:
        return str(error)
