"""Write the editor form of every workflow in example_workflows/api: places, sizes, groups and a note added.

The API form is the source; widgets that it does not name get their defaults. After a change there or in a
node's schema, start ComfyUI 0.3.75 with Graft and run
`python dev/make_workflows.py http://127.0.0.1:8188`. With `--thumbnails` behind it, every workflow is
also run at the size of the demo's base model, and its picture becomes <name>.jpg, labeled so. What belongs
to the eye alone stands below, the notes among it: change them here and not in the files.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

WORKFLOWS = Path(__file__).resolve().parents[1] / "example_workflows"
GAP, TITLE, HEADER, MARGIN = 40, 30, 60, 20
WIDTHS = {
    "CLIPTextEncode": 320,
    "GraftTrainSteps": 420,
    "SaveImage": 420,
    "PreviewImage": 420,
    "VAEDecode": 200,
}
HEIGHTS = {
    "CLIPTextEncode": 140,
    "EmptyLatentImage": 126,
    "EmptySD3LatentImage": 126,
    "FluxGuidance": 94,
    "GraftBuildLora": 372,
    "GraftCheckpointGrid": 204,
    "GraftCheckpointSettings": 240,
    "GraftEncodeDataset": 152,
    "GraftExtractLora": 264,
    "GraftInspectLora": 116,
    "GraftLoadBaseModel": 296,
    "GraftLoadDataset": 416,
    "GraftLoadTrainingState": 100,
    "GraftLossPlot": 64,
    "GraftMemorySettings": 206,
    "GraftMergeCheckpoint": 208,
    "GraftMergeLora": 212,
    "GraftObjectiveSettings": 704,
    "GraftOptimizerSettings": 560,
    "GraftResizeLora": 236,
    "GraftSamplePrompts": 590,
    "GraftSaveLora": 268,
    "GraftSaveTrainingState": 100,
    "GraftSplitDataset": 180,
    "GraftTrainSteps": 640,
    "GraftValidationLoss": 84,
    "GraftValidationSettings": 176,
    "KSampler": 272,
    "LoraLoaderModelOnly": 116,
    "LoraModelLoader": 136,
    "PreviewImage": 440,
    "SaveImage": 460,
    "VAEDecode": 62,
}
"""Pixels of a node's body, before a run, where it is tallest: mostly in Nodes 2.0 of ComfyUI 0.33. Nodes that
show images have room for them. `tests/browser/test_templates.py` says where one has become too small."""
REPORT, SAMPLES = 104, 90
"""Pixels that a report takes below a node that has run, and the newest sample images in Train Steps."""
SILENT = (
    "GraftLoadBaseModel",
    "GraftSplitDataset",
    "GraftLossPlot",
    "GraftSamplePrompts",
    "GraftCheckpointGrid",
)
"""Nodes of Graft that report nothing, beside those of settings."""
TALLEST = 660
"""Pixels of a column of nodes; a taller one goes on beside itself."""
COLORS = ("#8cc8f0", "#a5dba5", "#f0cd78", "#e6a0f0", "#b9b9f5")
"""Light, as a group's title is drawn in its color."""


@dataclass(frozen=True)
class Layout:
    note: str
    groups: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
    """(title, columns of node ids) from left to right."""


FIRST_LORA = """\
## Your first LoRA

Press **Run**. A small LoRA is trained on the pictures that come with Graft, on any computer, in a few \
minutes; then four pictures are drawn with it.

## With your own pictures

1. Put 10 to 30 of them into a folder inside ComfyUI's `input` folder, and beside each a text file of the \
same name that says what can be seen: `cat.png`, `cat.txt`.
2. **Load Dataset**: choose the folder; resolution 1024 for SDXL, SD3.5 and Flux; think up a trigger word.
3. **Load Base Model**: choose your model.
4. **Build LoRA**: clear *exclude*, which keeps this tiny model's attention and text half as they are; rank \
16.
5. **Train Steps**: 1000 steps at learning rate 0.0001 and batch size 1 are a fair start.
6. **Prompt** and **Empty Latent**: your own, in the model's size.
7. **KSampler**: *cfg* 1 for Flux, Turbo and Lightning models, else 4 to 7.

The LoRA is saved in `output/loras`. *Load LoRA* lists it after a press of `R`.

**Cancel** loses nothing: press Run again to go on from there. For more steps, raise *steps* and press Run."""

SDXL_CHARACTER = """\
## A person or character for SDXL

Made for 12 GB and more: what fits is chosen before the first step.

1. 15 to 30 pictures of one person in `input/my_character`, each with a text file that says what else can be \
seen. No text files yet? Set *missing captions* to *trigger*: it works without, but better with them.
2. *trigger* in **Load Dataset**: a rare word and what it is, *ohwx woman* or *ohwx dog*. It is put before \
every caption, and you write it in your prompts.
3. **Load Base Model**: any SDXL checkpoint.
4. **Sample Prompts** draws two pictures every 250 steps: press *Finish* when they are good. Not yet good at \
the end? Raise *steps* and press Run: it goes on.

min-SNR weighting lets the noise levels that decide a face count more evenly."""

SD35_STYLE = """\
## A style for SD3.5 Medium

Made for 12 GB and more: what fits is chosen before the first step. For SD3.5 Large on 12 GB add **Memory \
Settings** with *base* nf4.

1. 30 to 100 pictures in the style, in `input/my_style`, with captions that say *what* is shown and not how.
2. **Load Base Model**: SD3.5 Medium or Large, and its three text encoders. Any of them may be left out.

**Split Dataset** holds a tenth of the pictures back, and every 200 steps the loss on them is measured: \
when it rises for long, the pictures are being learned by heart. *result* best in **Validation Settings** \
keeps the state of the lowest one. With fewer than 30 pictures leave these two nodes out."""

FLUX_12GB = """\
## Flux.1 Dev on a card of 12 GB

**Memory Settings**: the base in 4 bits (nf4) while training. This rounding never leaves the run: the LoRA \
is for the base as it is. It needs bitsandbytes: `python -m pip install bitsandbytes` with ComfyUI's own \
Python (portable: `python_embeded\\python.exe -m pip install bitsandbytes`), then a restart. With 24 GB \
choose *fp8*, or *auto*: it rounds nothing and copies the base from host memory in every \
step, of which it takes 24 GB more.

1. 10 to 30 pictures in `input/my_subject`, with captions. *trigger*: a rare word and what it is, *ohwx mug*.
2. **Load Base Model**: flux1-dev, CLIP-L, T5 (fp8 or fp16) and the VAE. One file with everything in it, as \
flux1-dev-fp8? Choose it, and set text encoders and vae to *from checkpoint*.

768 pixels are fast; 1024 should fit as well. Flux is trained at guidance 1, which is the default here, and \
sampled at 3.5."""

SCHNELL_ASSISTANT = """\
## A distilled base: Flux.1 Schnell with an assistant LoRA

Training on a base that was distilled to four steps undoes the distillation. An *assistant LoRA* undoes it \
beforehand, so that training has nothing to undo: **Load LoRA** puts it onto the MODEL that is trained on. \
Such patches apply while training and are no part of the result.

For Schnell there is *ostris/FLUX.1-schnell-training-adapter*: put its file into `models/loras`, under a \
name of your own, and choose it in **Load LoRA**. *base* fp8 is for 24 GB; with 12 GB take nf4. What is \
drawn below uses the base with the new LoRA, without the assistant.

Without one, train on Flux.1 Dev and use the LoRA on Schnell."""

RESUME = """\
## Go on with what was trained earlier

**Load Training State** reads what **Save Training State** kept in `output/graft/states`: weights, the \
optimizer's memory, the step. Going on is what one longer run would have been, on the same base, pictures \
and settings: bit for bit on the CPU, but for rounding on a GPU.

*name*: what you saved, or the folder of a run in `output/graft`. Connect the same **Optimizer Settings** \
and others as before.

For a run that was cancelled none of this is needed: queue its own workflow again."""

COMPARE = """\
## Two LoRAs side by side

The same pictures, seed and number of steps, once with rank 8 and once with rank 64. Each grid shows the \
run's checkpoints from top to bottom, a column a prompt: too little at the top, too much at the bottom.

Change one thing at a time: rank, learning rate, or layers."""

TRAIN_SAMPLE_TRAIN = """\
## Train, look, train on

Two **Train Steps** in a row: the second goes on from the first one's *state*. Both say 2000 *total steps*, \
over which the cosine schedule decays, so the two parts are exactly one run of 2000 steps.

The MODEL of each part goes straight into **KSampler**: no file in between. Queue again with other prompts, \
and nothing is trained twice. For more steps than *total steps*, raise it in both: over another length a \
decaying schedule is another run from its first step. With *schedule* constant, more steps simply go on."""

MERGE = """\
## Files: merge, extract, resize, look inside

Four graphs that have nothing to do with each other; mute (Ctrl+M) those you do not want.

- **Merge LoRA** into a MODEL, to draw with it; into a checkpoint file in `output/checkpoints`.
- **Extract LoRA**: the difference between two checkpoints as a LoRA.
- **Resize LoRA** to a smaller rank; **Inspect LoRA** says what is in a file."""

WAN22 = """\
## Clips for Wan 2.2, with both experts

Wan 2.2 (14B) is two models: one draws from pure noise down to a noise level of 0.875, the other from there \
to the clip. So two **Train Steps** make two LoRA files. *noise range* cut in **Objective Settings** gives \
each its own part of the noise levels, as it sees them when it draws; *squeeze* would bend the distribution.

1. 10 to 50 clips of a few seconds in `input/my_clips`, `walk.mp4` beside `walk.txt`. Images among them are \
trained as one frame.
2. **Load Dataset**: *frames* 33 are two seconds at the 16 *fps* of **Dataset Settings**, which are Wan's. \
For longer clips, *chunks* there trains all of each.
3. **Load Base Model**: both files of the same model. The text encoder and the VAE are loaded once.

For image to video take the two i2v files and 0.9 for 0.875: every clip's first frame is then given to the \
model. A movement is mostly learned by the expert for high noise, a face by the other: train one alone if \
that is all you need.

**KSampler** changes over at step 11 of 20, where a shift of 8 crosses 0.875."""


LAYOUTS = {
    "first_lora": Layout(
        FIRST_LORA,
        (
            ("1  Base model and images", ((1, 2),)),
            ("2  What to train", ((3, 4),)),
            ("3  Train and save", ((5, 6),)),
            ("4  Draw with it", ((7, 8, 9), (10, 11), (12,))),
        ),
    ),
    "sdxl_character": Layout(
        SDXL_CHARACTER,
        (
            ("1  Base model and images", ((1, 2), (3, 4))),
            ("2  How to train", ((5,), (6,), (7,))),
            ("3  Train and save", ((8, 9), (10, 11))),
            ("4  Draw with it", ((12, 13, 14), (15, 16), (17,))),
        ),
    ),
    "sd35_style": Layout(
        SD35_STYLE,
        (
            ("1  Base model and images", ((1, 2), (3, 4))),
            ("2  How to train", ((5, 6), (7,))),
            ("3  Train, measure and save", ((8, 9), (10, 11))),
            ("4  Draw with it", ((12, 13, 14), (16, 17), (18,))),
        ),
    ),
    "flux_12gb": Layout(
        FLUX_12GB,
        (
            ("1  Base model and images", ((1, 2), (3, 4))),
            ("2  How to train in 12 GB", ((5, 6),)),
            ("3  Train and save", ((7, 8),)),
            ("4  Draw with it", ((9, 10, 11, 12), (14, 15), (16,))),
        ),
    ),
    "schnell_assistant": Layout(
        SCHNELL_ASSISTANT,
        (
            ("1  Base model, assistant and images", ((1, 2), (3, 4))),
            ("2  Train on the MODEL with the assistant", ((5, 6), (7, 8))),
            ("3  Draw without the assistant", ((9, 10, 11, 12), (14, 15), (16,))),
        ),
    ),
    "resume": Layout(
        RESUME,
        (
            ("1  Base model and images, as before", ((1, 2), (3,))),
            ("2  Where to go on, and how far", ((4, 5),)),
            ("3  Keep", ((6, 7),)),
            ("4  Draw with it", ((8, 9, 10), (11, 12), (13,))),
        ),
    ),
    "compare_two_loras": Layout(
        COMPARE,
        (
            ("1  Base model and images", ((1, 2), (3, 5), (4,))),
            ("2  Rank 8", ((6, 7), (8, 9))),
            ("3  Rank 64", ((10, 11), (12, 13))),
        ),
    ),
    "train_sample_train": Layout(
        TRAIN_SAMPLE_TRAIN,
        (
            ("1  Base model and images", ((1, 2), (3, 4, 5))),
            ("2  First part", ((6,), (7, 8, 9), (10, 11), (12,))),
            ("3  Second part", ((13, 17), (14, 15), (16,))),
        ),
    ),
    "wan22": Layout(
        WAN22,
        (
            ("1  Both experts, and clips", ((1, 2), (3, 4), (5, 6))),
            ("2  High noise", ((7,), (9, 11))),
            ("3  Low noise", ((8,), (10, 12))),
            ("4  Draw with both", ((13, 14, 15), (16, 17), (18, 19))),
        ),
    ),
    "merge_and_extract": Layout(
        MERGE,
        (
            ("1  Draw with a merged LoRA", ((1, 2), (3, 4, 5), (6, 7), (8,))),
            ("2  Into a checkpoint", ((9,),)),
            ("3  From two checkpoints", ((10,),)),
            ("4  LoRA files", ((11, 12),)),
        ),
    ),
}


def completed(prompt: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the API form with every widget named, those that it leaves out at their defaults."""
    changed = copy.deepcopy(prompt)
    for entry in changed.values():
        inputs, ordered = entry["inputs"], {}
        for name, spec, _ in _inputs(schemas[entry["class_type"]]):
            options = spec[1] if len(spec) > 1 else {}
            if name in inputs:
                ordered[name] = inputs[name]
            elif _is_widget(spec) and "default" in options:
                ordered[name] = options["default"]
        newer = {name: value for name, value in inputs.items() if name not in ordered}
        assert not (newer and entry["class_type"].startswith("Graft")), (entry["class_type"], sorted(newer))
        entry["inputs"] = {**ordered, **newer}  # stock nodes gain inputs from one version to the next
    return changed


def written(schemas: dict[str, Any]) -> dict[Path, str]:
    """Return every workflow's two files and what is to stand in them; `schemas` are the server's
    /object_info."""
    texts = {}
    for name, layout in LAYOUTS.items():
        path = WORKFLOWS / "api" / f"{name}.json"
        prompt = completed(json.loads(path.read_text(encoding="utf-8")), schemas)
        texts[path] = _api_lines(prompt)
        texts[WORKFLOWS / f"{name}.json"] = _lines(editor_form(prompt, layout, schemas))
    return texts


PROMPTS = ("red apple", "bear")
"""What the demo's base model can draw."""


def at_demo_size(prompt: dict[str, Any], *, steps: int, lora: str, tuned: str) -> dict[str, Any]:
    """Return a workflow as the demo's base model and pictures can run it, in `steps` optimizer steps a node.

    `lora` and `tuned` are a LoRA and a checkpoint of that base, for the nodes that ask for such files.
    """
    model = {"model": "graft_tiny_sd3.safetensors"}
    others = dict.fromkeys(("text_encoder_1", "text_encoder_2", "text_encoder_3", "vae"), "from checkpoint")
    size = {"width": 128, "height": 128}
    changes: Mapping[str, Mapping[str, Any]] = {
        "GraftLoadBaseModel": {**model, **others, "dtype": "auto"},
        "GraftLoadDataset": {"folder": "starter/dataset", "resolution": "128", "trigger": ""},
        "GraftTrainSteps": {"steps": steps, "learning_rate": 0.001, "batch_size": 4},
        "GraftSamplePrompts": {**size, "prompts": "\n".join(PROMPTS), "steps": 12, "cfg": 4.0},
        "GraftValidationSettings": {"every": max(1, steps // 2), "patience": 0, "limit": 2},
        "GraftCheckpointSettings": {"steps": max(1, steps // 4)},
        "EmptyLatentImage": size,
        "EmptySD3LatentImage": size,
        "KSampler": {"steps": 16, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple"},
        "KSamplerAdvanced": {"cfg": 4.0},
        "GraftMergeCheckpoint": {"checkpoint": model["model"]},
        "GraftExtractLora": {"original": model["model"], "tuned": tuned, "rank": 4},
    }
    changed = copy.deepcopy(prompt)
    for entry in changed.values():
        kind, inputs = entry["class_type"], entry["inputs"]
        inputs |= changes.get(kind, {})
        if kind == "EmptyHunyuanLatentVideo":  # the demo's base model draws images
            entry |= {"class_type": "EmptySD3LatentImage", "inputs": {**size, "batch_size": 1}}
        if "lora_name" in inputs:
            inputs["lora_name"] = lora
        if "total_steps" in inputs and inputs["total_steps"]:
            inputs["total_steps"] = 2 * steps
        if kind == "CLIPTextEncode":
            negative = entry["_meta"]["title"].startswith("Negative")
            inputs["text"] = "" if negative else PROMPTS[0]
        if kind == "GraftSamplePrompts" and inputs["every"]:
            inputs["every"] = max(1, steps // 2)
    return changed


def editor_form(prompt: dict[str, Any], layout: Layout, schemas: dict[str, Any]) -> dict[str, Any]:
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
        "revision": 0,
        "last_node_id": note["id"],
        "last_link_id": len(links),
        "nodes": every,
        "links": links,
        "groups": groups,
        "config": {},
        "extra": {"ds": {"scale": 0.6, "offset": [60, 120]}},
        "version": 0.4,
    }


def _node(node_id: int, entry: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    sockets, widgets, values = [], [], []
    for name, spec, optional in _inputs(schema):
        kind = "COMBO" if isinstance(spec[0], list) else spec[0]
        options = spec[1] if len(spec) > 1 else {}
        slot = {"name": name, "type": kind, **({"shape": 7} if optional else {}), "link": None}
        if not _is_widget(spec):
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
    height = 20 * max(len(sockets), len(outputs)) + 28 * len(values) + 80 * lines + 80  # of those not listed
    ours = schema["name"].startswith("Graft")
    return {
        "id": node_id,
        "type": schema["name"],
        "pos": [0, 0],
        "size": [WIDTHS.get(schema["name"], 320), HEIGHTS.get(schema["name"], height)],
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


def _is_widget(spec: list[Any]) -> bool:
    kind = "COMBO" if isinstance(spec[0], list) else spec[0]
    plain = kind in ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")
    return plain and not (len(spec) > 1 and spec[1].get("forceInput"))


def _inputs(schema: dict[str, Any]) -> list[tuple[str, list[Any], bool]]:
    return [
        (n, s, kind == "optional")
        for kind in ("required", "optional")
        for n, s in schema["input"].get(kind, {}).items()
    ]


def _place(nodes: dict[int, dict[str, Any]], layout: Layout) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Put the nodes in two rows of groups, and return the groups and the note, which stands first."""
    groups = [(title, _split(nodes, columns)) for title, columns in layout.groups]
    widths = [_width(nodes, columns) for _, columns in groups]
    note = {
        "id": max(nodes) + 1, "type": "MarkdownNote", "pos": [0, TITLE], "size": [NOTE, 0], "flags": {},
        "order": 0, "mode": 0, "inputs": [], "outputs": [], "title": "Read me", "properties": {},
        "widgets_values": [layout.note], "color": "#2b2f36", "bgcolor": "#353a42",
    }  # fmt: skip
    splits = range(1, len(groups) + 1)
    longest = {n: max(NOTE + GAP + _row(widths[:n]), _row(widths[n:])) for n in splits}
    first = min(splits, key=lambda n: (longest[n], -n))
    framed, height = _place_row(nodes, groups[:first], NOTE + GAP, 0)
    framed += _place_row(nodes, groups[first:], 0, height + GAP)[0]
    note["size"] = [NOTE, height - TITLE]
    for index, group in enumerate(framed):
        group |= {"id": index + 1, "color": COLORS[index % len(COLORS)], "font_size": 26, "flags": {}}
    return framed, note


NOTE = 460
Columns = tuple[tuple[int, ...], ...]


def _split(nodes: dict[int, dict[str, Any]], columns: Columns) -> Columns:
    """Return the columns of a group, those that are too tall in two or more."""
    found: list[tuple[int, ...]] = []
    for column in columns:
        filled: tuple[int, ...] = ()
        for key in column:
            if filled and sum(_space(nodes[k]) for k in (*filled, key)) > TALLEST:
                found.append(filled)
                filled = ()
            filled += (key,)
        found.append(filled)
    return tuple(found)


def _space(node: dict[str, Any]) -> int:
    """Return the height that a node takes up in its column, once it has run."""
    kind = node["type"]
    reports = kind.startswith("Graft") and not kind.endswith("Settings") and kind not in SILENT
    return int(node["size"][1] + TITLE + MARGIN + REPORT * reports + SAMPLES * (kind == "GraftTrainSteps"))


def _width(nodes: dict[int, dict[str, Any]], columns: Columns) -> int:
    return 2 * MARGIN - GAP + sum(GAP + max(nodes[key]["size"][0] for key in column) for column in columns)


def _row(widths: list[int]) -> int:
    return sum(widths) + GAP * max(0, len(widths) - 1)


def _place_row(
    nodes: dict[int, dict[str, Any]], groups: list[tuple[str, Columns]], x: int, top: int
) -> tuple[list[dict[str, Any]], int]:
    """Put groups beside one another from `x` on, and return them and the row's height."""
    height = HEADER + max(
        (sum(_space(nodes[key]) for key in column) for _, columns in groups for column in columns), default=0
    )
    framed = []
    for title, columns in groups:
        width = _width(nodes, columns)
        framed.append({"title": title, "bounding": [x, top, width, height]})
        left = x + MARGIN
        for column in columns:
            y = top + HEADER + TITLE
            for key in column:
                nodes[key]["pos"] = [left, y]
                y += _space(nodes[key])
            left += max(nodes[key]["size"][0] for key in column) + GAP
        x += width + GAP
    return framed, height


def _in_order(nodes: dict[int, dict[str, Any]], links: list[list[Any]]) -> list[dict[str, Any]]:
    """Return the nodes so that each comes after those it needs."""
    done: list[int] = []
    while len(done) < len(nodes):
        done += [
            key for key in nodes
            if key not in done and all(link[1] in done for link in links if link[3] == key)
        ]  # fmt: skip
    return [nodes[key] for key in done]


def main(address: str, *options: str) -> None:
    for path, text in written(json.loads(_ask(f"{address}/object_info"))).items():
        path.write_text(text, encoding="utf-8", newline="\n")
    if "--thumbnails" in options:
        for name in ("first_lora", *(name for name in LAYOUTS if name != "first_lora")):
            _thumbnail(address, name)


THUMBNAIL_STEPS = 30
TUNED = "graft_thumbnail.safetensors"


def _thumbnail(address: str, name: str) -> None:
    """Run a workflow at demo size and write the last picture that it saves, with a label, as <name>.jpg."""
    prompt = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    prompt = at_demo_size(prompt, steps=THUMBNAIL_STEPS, lora="first_lora.safetensors", tuned=TUNED)
    if name == "merge_and_extract":  # what it reads besides the LoRA that first_lora saved
        del prompt["10"]
    if name == "first_lora":  # what `resume` goes on from
        inputs = {"state": ["5", 2], "name": "my_lora"}
        prompt["90"] = {"class_type": "GraftSaveTrainingState", "inputs": inputs}
    outputs = _run(address, prompt)
    saved = [outputs[key]["images"] for key in sorted(outputs, key=int) if "images" in outputs[key]]
    saved = [images for images in saved if images[0]["type"] == "output"]
    asked = [urllib.parse.urlencode(image) for image in saved[-1][:4]]
    pictures = [Image.open(io.BytesIO(_ask(f"{address}/view?{image}"))).convert("RGB") for image in asked]
    _labeled(pictures).save(WORKFLOWS / f"{name}.jpg", quality=85)


def _labeled(pictures: list[Image.Image], side: int = 384) -> Image.Image:
    """Return pictures side by side in a square, with a line that says what drew them."""
    columns = 2 if len(pictures) > 1 else 1
    sheet = Image.new("RGB", (side, side + 24), "white")
    cell = side // columns
    for index, picture in enumerate(pictures):
        scale = cell / max(picture.size)
        small = picture.resize((round(picture.width * scale), round(picture.height * scale)))
        left, top = (index % columns) * cell, (index // columns) * cell
        sheet.paste(small, (left + (cell - small.width) // 2, top + (cell - small.height) // 2))
    ImageDraw.Draw(sheet).text((6, side + 6), "drawn with the tiny demo base model, 128 px", fill="black")
    return sheet


def _run(address: str, prompt: dict[str, Any]) -> dict[str, Any]:
    """Queue a prompt, wait for it, and return what its nodes put out. Raises RuntimeError with ComfyUI's
    message."""
    answer = json.loads(_ask(f"{address}/prompt", json.dumps({"prompt": prompt}).encode()))
    while True:
        time.sleep(1)
        history = json.loads(_ask(f"{address}/history/{answer['prompt_id']}"))
        if entry := history.get(answer["prompt_id"]):
            if entry["status"]["status_str"] != "success":
                raise RuntimeError(json.dumps(entry["status"]["messages"][-1])[:2000])
            return dict(entry["outputs"])


def _ask(url: str, body: bytes | None = None) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data=body)) as answer:
        return bytes(answer.read())


def _api_lines(prompt: dict[str, Any]) -> str:
    """Return the API form with one node a line."""
    rows = [f"  {json.dumps(key)}: {json.dumps(entry, ensure_ascii=False)}" for key, entry in prompt.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


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
    main(*sys.argv[1:])
