"""Write the editor form of every workflow in api/: the same graph with places, sizes, groups and a note.

The API form is the source. After a change there or in a node's schema, start ComfyUI with Graft and run
`python example_workflows/make.py http://127.0.0.1:8188`. What belongs to the eye alone stands below.
"""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GAP, TITLE, HEADER, MARGIN = 40, 30, 50, 20
WIDTHS = {
    "CLIPTextEncode": 320,
    "GraftTrainSteps": 420,
    "SaveImage": 420,
    "PreviewImage": 420,
    "VAEDecode": 200,
}
TALLER = {
    "CLIPTextEncode": 40,
    "GraftTrainSteps": 300,
    "SaveImage": 400,
    "PreviewImage": 400,
    "GraftSaveLora": 40,
}
"""Room for what a node shows while it runs: text, chart, pictures."""
COLOURS = ("#3f789e", "#8A8", "#b58b2a", "#a1309b", "#88A")


@dataclass(frozen=True)
class Layout:
    note: str
    groups: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
    """(title, columns of node ids) from left to right."""


FIRST_LORA = """\
## Your first LoRA

Press **Run**. A small LoRA is trained on the pictures that come with Graft, on any computer, in a few
minutes; \
then four pictures are drawn with it.

## With your own pictures

1. Put 10 to 30 of them into a folder inside ComfyUI's `input` folder, and beside each a text file of the \
same name that says what can be seen: `cat.png`, `cat.txt`.
2. **Load Dataset**: choose the folder; resolution 1024 for SDXL, SD3.5 and Flux; think up a trigger word.
3. **Load Base Model**: choose your model.
4. **Train Steps**: 1000 steps at learning rate 0.0001 and batch size 1 are a fair start.
5. **Prompt** and **Empty Latent**: your own, in the model's size.

The LoRA is saved in `output/loras`. *Load LoRA* lists it after a press of `R`.

**Cancel** loses nothing: press Run again to go on from there. For more steps, raise *steps* and press Run."""

LAYOUTS = {
    "first_lora": Layout(
        FIRST_LORA,
        (
            ("1  Base model and pictures", ((1, 2),)),
            ("2  What to train", ((3, 4),)),
            ("3  Train and save", ((5, 6),)),
            ("4  Draw with it", ((7, 8, 9), (10, 11), (12,))),
        ),
    ),
}


def editor_form(name: str, prompt: dict[str, Any], layout: Layout, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the workflow as the editor saves it, format 0.4."""
    nodes = {int(key): _node(int(key), entry, schemas[entry["class_type"]]) for key, entry in prompt.items()}
    links: list[list[Any]] = []
    for key, entry in prompt.items():
        for slot, entered in enumerate(nodes[int(key)]["inputs"]):
            value = entry["inputs"].get(entered["name"])
            if isinstance(value, list):
                source, output = nodes[int(value[0])], value[1]
                kind = source["outputs"][output]["type"]
                entered["link"] = len(links) + 1
                source["outputs"][output]["links"].append(len(links) + 1)
                links.append([len(links) + 1, int(value[0]), output, int(key), slot, kind])
    groups, note = _place(nodes, layout)
    for order, node in enumerate(_in_order(nodes, links)):
        node["order"] = order + 1
    every = [note, *nodes.values()]
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"graft-lora/{name}")),
        "revision": 0,
        "last_node_id": note["id"],
        "last_link_id": len(links),
        "nodes": every,
        "links": links,
        "groups": groups,
        "config": {},
        "extra": {"ds": {"scale": 0.72, "offset": [130, 200]}},
        "version": 0.4,
    }


def _node(number: int, entry: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    sockets, widgets, values = [], [], []
    for name, spec, optional in _inputs(schema):
        kind = "COMBO" if isinstance(spec[0], list) else spec[0]
        options = spec[1] if len(spec) > 1 else {}
        slot = {"name": name, "type": kind, **({"shape": 7} if optional else {}), "link": None}
        if kind not in ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN") or options.get("forceInput"):
            sockets.append(slot)
            continue
        widgets.append({**slot, "widget": {"name": name}})
        value = entry["inputs"].get(name, options.get("default"))
        values.append(options.get("default") if isinstance(value, list) else value)
        if options.get("control_after_generate"):
            values.append("fixed")
    outputs = [
        {"name": name, "type": "COMBO" if isinstance(kind, list) else kind, "links": []}
        for name, kind in zip(schema["output_name"], schema["output"])
    ]
    lines = sum(bool(spec[1].get("multiline")) for _, spec, _ in _inputs(schema) if len(spec) > 1)
    height = 20 * max(len(sockets), len(outputs)) + 24 * len(values) + 56 * lines + 20
    ours = schema["name"].startswith("Graft")
    return {
        "id": number,
        "type": schema["name"],
        "pos": [0, 0],
        "size": [WIDTHS.get(schema["name"], 320), height + TALLER.get(schema["name"], 0)],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": sockets + widgets,
        "outputs": outputs,
        "title": entry["_meta"]["title"],
        "properties": {
            "cnr_id": "graft-lora" if ours else "comfy-core",
            "ver": "0.1.0" if ours else "0.3.75",
            "Node name for S&R": schema["name"],
        },
        "widgets_values": values,
    }


def _inputs(schema: dict[str, Any]) -> list[tuple[str, list[Any], bool]]:
    return [
        (n, s, kind == "optional")
        for kind in ("required", "optional")
        for n, s in schema["input"].get(kind, {}).items()
    ]


def _place(nodes: dict[int, dict[str, Any]], layout: Layout) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Put the nodes in columns, frame the groups, and return the groups and the note, which stands first."""
    width, x, groups = 440, 0, []
    note = {
        "id": max(nodes) + 1, "type": "MarkdownNote", "pos": [x, HEADER + TITLE], "size": [width, 520],
        "flags": {},
        "order": 0, "mode": 0, "inputs": [], "outputs": [], "title": "Read me", "properties": {},
        "widgets_values": [layout.note], "color": "#432", "bgcolor": "#653",
    }  # fmt: skip
    x += width + GAP
    for number, (title, columns) in enumerate(layout.groups):
        left, bottom = x, 0
        x += MARGIN
        for column in columns:
            y = HEADER + TITLE
            for key in column:
                nodes[key]["pos"] = [x, y]
                y += nodes[key]["size"][1] + TITLE + MARGIN
            bottom = max(bottom, y - TITLE)
            x += max(nodes[key]["size"][0] for key in column) + GAP
        x += MARGIN - GAP
        groups.append(
            {"id": number + 1, "title": title, "bounding": [left, 0, x - left, bottom],
             "color": COLOURS[number % len(COLOURS)], "font_size": 24, "flags": {}}
        )  # fmt: skip
        x += GAP
    return groups, note


def _in_order(nodes: dict[int, dict[str, Any]], links: list[list[Any]]) -> list[dict[str, Any]]:
    """Return the nodes so that each comes after those it needs."""
    done: list[int] = []
    while len(done) < len(nodes):
        done += [
            key for key in nodes
            if key not in done and all(link[1] in done for link in links if link[3] == key)
        ]  # fmt: skip
    return [nodes[key] for key in done]


def main(address: str) -> None:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        f"{address}/object_info"
    ) as answer:
        schemas = json.load(answer)
    for name, layout in LAYOUTS.items():
        prompt = json.loads((HERE / "api" / f"{name}.json").read_text(encoding="utf-8"))
        text = _lines(editor_form(name, prompt, layout, schemas))
        (HERE / f"{name}.json").write_text(text, encoding="utf-8", newline="\n")


def _lines(workflow: dict[str, Any]) -> str:
    """Return JSON with one node, link or group a line."""
    entries = []
    for key, value in workflow.items():
        rows = [json.dumps(row, ensure_ascii=False) for row in value] if isinstance(value, list) else []
        entries.append(
            f"{json.dumps(key)}: " + ("[\n  " + ",\n  ".join(rows) + "\n]" if rows else json.dumps(value))
        )
    return "{\n" + ",\n".join(entries) + "\n}\n"


if __name__ == "__main__":
    main(sys.argv[1])
