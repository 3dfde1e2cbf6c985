"""Write the editor form of every workflow in example_workflows/api: places, sizes, groups and a note added.
It writes the blueprint in subgraphs/ too.

The API form is the source; widgets that it does not name get their defaults. After a change there or in a
node's schema, start ComfyUI 0.3.75 with Graft and run
`python dev/make_workflows.py http://127.0.0.1:8188`. With `--thumbnails`, every workflow, or those named
behind it, is also run at the size of the demo's base model, and its picture becomes its thumbnail, labeled
so. What belongs to the eye alone stands below, the notes among it: change them here and not in the files.
"""

from __future__ import annotations

import copy
import io
import json
import re
import sys
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

WORKFLOWS = Path(__file__).resolve().parents[1] / "example_workflows"
BLUEPRINT = WORKFLOWS.with_name("subgraphs") / "Train a LoRA on a folder.json"
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
    "StringConcatenate": 240,
    "VAEDecode": 62,
}
"""Pixels of a node's body, before a run, where it is tallest: mostly in Nodes 2.0 of ComfyUI 0.33. Nodes that
show images have room for them. `tests/browser/test_templates.py` says where one has become too small."""
IN_NODES_2 = {"GraftLoadDataset": 540, "GraftSamplePrompts": 700, "SaveImage": 580}
"""Heights of nodes that Nodes 2.0 draws taller."""
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
COLORS = ("#ffe9a8", "#cfe6fa", "#d3efd3", "#f3d6f9", "#dcdcfb")
"""Light, as a group's title is drawn in its color."""
NOTE = 380
WINDOW, CORNER = (1130, 740), (80, 150)
"""Pixels of a window of 1440 x 900 between ComfyUI's bars, for nodes that are a fifth larger in Nodes 2.0 of
0.3.75, and where they begin."""
ZOOM = (0.62, 0.8)
"""Of the first view: text is not drawn below it, and nothing is gained above."""
Columns = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    title: str
    """Name of the editor form's file: all that ComfyUI shows of a template beside its picture."""
    note: str
    change: Columns
    """Columns of the nodes that a reader sets. They are numbered, and in view beside the note at first."""
    groups: tuple[tuple[str, Columns], ...]
    """(title, columns of node ids) of the others from left to right, in a row below."""
    subject: str
    """What its thumbnail shows, in the words of the starter's captions; "" for one that its base model cannot
    run: a picture made by hand."""


FIRST_LORA = """\
# Your first LoRA

Press **Run**. A small LoRA is trained on pictures that come with Graft, on any computer, in a few minutes. \
Then four pictures are drawn with it, below.

# What to change

**1** Images: another *folder*, or drop your own onto the node. *Show and add images* has their captions.

**2** The base model. This tiny one comes with Graft; *02 Train on my pictures* is made for yours.

**3** How long and how fast it learns.

The LoRA is in *output/loras*; *Load LoRA* lists it after a press of R.

**Cancel** loses nothing: press Run again to go on. For more steps, raise *steps* and press Run."""

MY_PICTURES = """\
# Train on my pictures

**1** *Show and add images*: add 10 to 30 pictures, and describe what else can be seen in each. *trigger*: \
a rare word and what it is, such as *ohwx dog*. It is put before every caption, into the prompts and into \
the file.

**2** Your model. The tiny one that is set runs on any computer and shows that all works.

**3** Press **Run**. With SDXL, SD3.5 or Flux first set: *steps* 1000, *learning rate* 0.0001, *batch size* \
1; and 1024 for the *resolution* in 1 and the sizes in Sample Prompts and Empty Latent.

Sample images appear on 3 while it trains; *Finish* ends it when they are good. The LoRA is in \
*output/loras*."""

SDXL_CHARACTER = """\
# A person or character for SDXL

For 12 GB and more: what fits is chosen before the first step.

**1** 15 to 30 pictures of one person: *Show and add images*. Captions say what else can be seen; without \
any, set *missing captions* to *trigger*. *trigger*: a rare word and what it is, *ohwx woman*. It is put \
before every caption, and you write it in your prompts.

**2** Any SDXL checkpoint.

**3** Two samples every 250 steps: press *Finish* when they are good. Not yet good at the end? Raise \
*steps* and press Run: it goes on.

min-SNR weighting lets the noise levels that decide a face count more evenly."""

SD35_STYLE = """\
# A style for SD3.5 Medium

For 12 GB and more: what fits is chosen before the first step. For SD3.5 Large on 12 GB add **Memory \
Settings** with *base* nf4.

**1** 30 to 100 pictures in the style: *Show and add images*. Captions say *what* is shown and not how.

**2** SD3.5 Medium or Large, and its three text encoders. Any of them may be left out.

**3** How long and how fast.

**Split Dataset** holds a tenth of the pictures back, and every 200 steps the loss on them is measured: \
when it rises for long, the LoRA is overfitted. *result* best in **Validation Settings** keeps the state of \
the lowest one. With fewer than 30 pictures leave these two nodes out."""

FLUX_12GB = """\
# Flux.1 Dev with 12 GB

**1** 10 to 30 pictures: *Show and add images*. *trigger*: a rare word and what it is, *ohwx mug*. 768 \
pixels are fast; 1024 should fit as well.

**2** flux1-dev, CLIP-L, T5 (fp8 or fp16) and the VAE. One file with everything in it, as flux1-dev-fp8? \
Set text encoders and vae to *from checkpoint*.

**3** How long and how fast. Flux is trained at guidance 1, the default here, and sampled at 3.5.

**Memory Settings**: the base in 4 bits (nf4) while training; the LoRA is for the base as it is. It needs \
bitsandbytes: *python -m pip install bitsandbytes* with ComfyUI's own Python (portable: \
*python_embeded\\python.exe*), then a restart. With 24 GB choose *fp8*, or *auto*: it quantizes nothing and \
copies the base from 24 GB of host memory in every step."""

SCHNELL_ASSISTANT = """\
# Flux.1 Schnell with an assistant LoRA

Training on a base that was distilled to four steps undoes the distillation. An *assistant LoRA* undoes it \
beforehand, so that training has nothing to undo. It applies while training and is no part of the result.

**1** Your pictures: *Show and add images*.

**2** Flux.1 Schnell. With 12 GB take *base* nf4 in **Memory Settings**; fp8 is for 24 GB.

**3** The assistant: put the file of *ostris/FLUX.1-schnell-training-adapter* into *models/loras* under a \
name of your own, and choose it.

What is drawn below uses the base with the new LoRA, without the assistant. Without one, train on Flux.1 \
Dev and use the LoRA on Schnell."""

RESUME = """\
# Go on with what was trained earlier

**1** *name*: what you saved with **Save Training State**, or the folder of a run in *output/graft*. It \
holds the weights, the optimizer's state and the step.

**2**, **3** The same images and base model as before. Connect the same **Optimizer Settings** and others.

**4** The steps to add. The result is that of one longer run: bit for bit on the CPU, but for rounding on a \
GPU.

For a run that was cancelled none of this is needed: queue its own workflow again."""

COMPARE = """\
# Two LoRAs side by side

**1**, **2**, **3** Your images, your model, and the prompts to compare by.

The same pictures, seed and number of steps, once with rank 8 and once with rank 64. Each grid shows the \
run's checkpoints from top to bottom, a column a prompt: too little at the top, too much at the bottom.

Change one thing at a time: rank, learning rate, or layers."""

TRAIN_SAMPLE_TRAIN = """\
# Train, look, train on

**1**, **2**, **3** Your images, your model, your prompt.

Two **Train Steps** in a row: the second goes on from the first one's *state*. Both say 2000 *total steps*, \
over which the cosine schedule decays, so the two parts are exactly one run of 2000 steps.

The MODEL of each part goes straight into **KSampler**: no file in between. Queue again with other prompts, \
and nothing is trained twice. For more steps than *total steps*, raise it in both: over another length a \
decaying schedule is another run from its first step. With *schedule* constant, more steps simply go on."""

MERGE = """\
# Merge, extract, resize, look inside

Four graphs that have nothing to do with each other; mute (Ctrl+M) those you do not want.

**Merge LoRA** into a MODEL, to draw with it; or into a checkpoint file in *output/checkpoints*.

**Extract LoRA**: the difference between two checkpoints as a LoRA.

**Resize LoRA** to a smaller rank; **Inspect LoRA** says what is in a file."""

WAN22 = """\
# Clips for Wan 2.2, with both experts

Wan 2.2 (14B) is two models: one draws from pure noise down to a noise level of 0.875, the other from there \
to the clip. So two **Train Steps** make two LoRA files. *noise range* cut in **Objective Settings** gives \
each its own part of the noise levels, as it sees them when it draws; *squeeze* would bend the distribution.

**1** 10 to 50 clips of a few seconds, *walk.mp4* beside *walk.txt*. Images among them are trained as one \
frame. *frames* 33 are two seconds at the 16 *fps* of **Dataset Settings**, which are Wan's. For longer \
clips, *chunks* there trains all of each.

**2**, **3** Both files of the same model. The text encoder and the VAE are loaded once.

For image to video take the two i2v files and 0.9 for 0.875: every clip's first frame is then given to the \
model. A movement is mostly learned by the expert for high noise, a face by the other: train one alone if \
that is all you need.

**KSampler** changes over at step 11 of 20, where a shift of 8 crosses 0.875."""


QWEN_EDIT = """\
# An edit for Qwen-Image-Edit, from pairs

What to do with a picture: clean up a drawing, dress a person, age a photo. Each pair is a picture, and what \
is to become of it.

**1** *folder*: 10 to 50 results, *house.png* beside *house.txt*, which says what is done: *turn the drawing \
into a painting*. *references*: the folder of what they are made from, under the same names. Two or three \
folders, one a line, give each result several originals.

**2** The model, its text encoder and its VAE. What fits is chosen before the first step; **Memory \
Settings** with *base* nf4 needs the least.

**3** A picture that is not among the pairs. It is edited every 250 steps, and at the end.

For **Flux.2**, **Klein** and **Flux Kontext** take *10 Flux.2 Klein edit from pairs*."""

WAN22_5B_I2V = """\
# Image to video: a movement for Wan 2.2 5B

Every clip's first frame is given to the model, so the LoRA learns how a picture goes on: a turn of the \
camera, a dance, something that melts.

**1** 10 to 50 clips of two seconds and more, *turn.mp4* beside a *turn.txt* that says what happens. \
*frames* 49 are two seconds; fewer, or a smaller *resolution*, need less memory.

**2** The model, its text encoder and its VAE.

**3** The picture that the samples, and the clip at the end, begin with.

**Dataset Settings**: *first frame* 1 gives it always; 0.5 trains text to video in the other half. *fps* 24 \
is this model's. For the two experts of Wan 2.2 14B take *07 Wan 2.2 clips* with the two i2v files."""

KLEIN_EDIT = """\
# An edit for Flux.2 Klein, from pairs

What to do with a picture: clean up a drawing, dress a person, age a photo. Each pair is a picture, and what \
is to become of it.

**1** *folder*: 10 to 50 results, *house.png* beside *house.txt*, which says what is done: *turn the drawing \
into a painting*. *references*: the folder of what they are made from, under the same names. Two or three \
folders, one a line, give each result several originals.

**2** The **base** model of Klein, its text encoder and its VAE. The LoRA also works on the distilled Klein: \
to see how, load that in a second **Load Base Model** and connect it to *model* of **Sample Prompts**, with \
4 *steps* there.

**3** A picture that is not among the pairs. It is edited every 250 steps, and at the end.

**Flux Kontext**: choose *flux1-dev-kontext*, CLIP-L, T5 and *ae*; draw at *cfg* 1, with *Flux Guidance* 2.5 \
behind the prompt and *Empty SD3 Latent*. **Flux.2 Dev**: choose its files, and draw at *cfg* 1."""

ACE_STEP = """\
# Songs for ACE-Step

A voice, an instrument or a genre, from your own songs.

**1** 10 to 50 songs, *night.mp3* beside *night.txt* with its tags: *soul, piano, female voice, slow*. The \
words that are sung go into *night_lyrics.txt*, with *[verse]* and *[chorus]* on lines of their own. The \
first *seconds* of each song are trained, so write the lyrics of those alone. Shorter songs are named before \
anything is trained.

**2** *ace_step_v1_3.5b* has everything in one file.

**3** A sample plays on the node every 500 steps. In **Sample Prompts** *[lyrics]* comes between tags and \
words, and a stroke between two lines.

Fewer *seconds*, here and there, take less memory."""


LAYOUTS = {
    "first_lora": Layout(
        "01 First LoRA, no download",
        FIRST_LORA,
        ((2,), (1,), (5,)),
        (
            ("How it is trained", ((3, 4),)),
            ("Draw with it", ((7, 8), (9, 10), (11, 12))),
            ("Save", ((6,),)),
        ),
        "strawberry, sunburst style",
    ),
    "my_pictures": Layout(
        "02 Train on my pictures",
        MY_PICTURES,
        ((2,), (1,), (5,)),
        (
            ("How it is trained", ((3, 4), (13,))),
            ("Draw with it", ((14, 7), (8, 9), (10, 11), (12,))),
            ("Save", ((6,),)),
        ),
        "fox, sunburst style",
    ),
    "sdxl_character": Layout(
        "03 SDXL character, 12 GB",
        SDXL_CHARACTER,
        ((2,), (1,), (8,)),
        (
            ("How it is trained", ((3, 4), (5,), (6,), (7,))),
            ("Draw with it", ((12, 13, 14), (15, 16), (17,))),
            ("Save", ((9,), (10, 11))),
        ),
        "mibo waving in the snow",
    ),
    "sd35_style": Layout(
        "04 SD3.5 style, 12 GB",
        SD35_STYLE,
        ((2,), (1,), (8,)),
        (
            ("How it is trained", ((3, 6), (4, 5), (7,))),
            ("Draw with it", ((12, 13, 14), (16, 17), (18,))),
            ("Measure and save", ((10, 11, 9),)),
        ),
        "sunflower, sunburst style",
    ),
    "flux_12gb": Layout(
        "05 Flux Dev, 12 GB",
        FLUX_12GB,
        ((2,), (1,), (7,)),
        (
            ("How it is trained in 12 GB", ((3, 4), (5,), (6,))),
            ("Draw with it", ((9, 10, 11, 12), (14, 15), (16,))),
            ("Save", ((8,),)),
        ),
        "umbrella, sunburst style",
    ),
    "schnell_assistant": Layout(
        "06 Flux Schnell with an assistant LoRA",
        SCHNELL_ASSISTANT,
        ((3,), (1, 2), (7,)),
        (
            ("How it is trained", ((4, 5), (6,))),
            ("Draw without the assistant", ((10, 11, 12), (9, 14), (15, 16))),
            ("Save", ((8,),)),
        ),
        "hamburger, sunburst style",
    ),
    "wan22": Layout(
        "07 Wan 2.2 clips",
        WAN22,
        ((4,), (1, 2)),
        (
            ("Both experts", ((3,), (5, 6))),
            ("High noise", ((7,), (9, 11))),
            ("Low noise", ((8,), (10, 12))),
            ("Draw with both", ((13, 14, 15), (16, 17), (18, 19))),
        ),
        "penguin, sunburst style",
    ),
    "qwen_edit": Layout(
        "08 Qwen-Image-Edit from pairs",
        QWEN_EDIT,
        ((2,), (1,), (6,)),
        (
            ("How it is trained", ((3, 4), (7,), (8,))),
            ("Edit with it", ((10, 11, 12), (13, 14), (15,))),
            ("Look at the pairs, and save", ((5, 16), (9,))),
        ),
        "",
    ),
    "wan22_5b_i2v": Layout(
        "09 Wan 2.2 5B, image to video",
        WAN22_5B_I2V,
        ((3,), (1,), (6,)),
        (
            ("How it is trained", ((2,), (4, 5), (7,), (8,))),
            ("Draw with it", ((10, 11, 12), (13, 14), (15,))),
            ("Save", ((9,),)),
        ),
        "",
    ),
    "klein_edit": Layout(
        "10 Flux.2 Klein edit from pairs",
        KLEIN_EDIT,
        ((2,), (1,), (6,)),
        (
            ("How it is trained", ((3, 4), (7,), (8,))),
            ("Edit with it", ((10, 11), (12, 13, 14, 15), (16, 17), (18, 19))),
            ("Look at the pairs, and save", ((5, 20), (9,))),
        ),
        "",
    ),
    "ace_step": Layout(
        "11 ACE-Step songs",
        ACE_STEP,
        ((2,), (1,), (6,)),
        (
            ("How it is trained", ((3, 4), (5,))),
            ("Sing with it", ((8, 9), (10, 11, 12), (13, 14))),
            ("Save", ((7,),)),
        ),
        "",
    ),
    "train_sample_train": Layout(
        "20 Train, look, train on",
        TRAIN_SAMPLE_TRAIN,
        ((2,), (1, 7)),
        (
            ("How it is trained", ((3, 4), (5,))),
            ("First part", ((6,), (8, 9, 10), (11, 12))),
            ("Second part", ((13, 17), (14, 15), (16,))),
        ),
        "apple, sunburst style",
    ),
    "resume": Layout(
        "21 Go on with an earlier training",
        RESUME,
        ((4,), (2,), (1,), (5,)),
        (
            ("How it is trained", ((3,),)),
            ("Draw with it", ((8, 9, 10), (11, 12), (13,))),
            ("Save", ((6, 7),)),
        ),
        "house, sunburst style",
    ),
    "compare_two_loras": Layout(
        "22 Compare two LoRAs",
        COMPARE,
        ((2,), (1,), (4,)),
        (
            ("How both are trained", ((3, 5),)),
            ("Rank 8", ((6, 7), (8, 9))),
            ("Rank 64", ((10, 11), (12, 13))),
        ),
        "teddy bear, sunburst style",
    ),
    "merge_and_extract": Layout(
        "23 Merge, extract and resize",
        MERGE,
        (),
        (
            ("Draw with a merged LoRA", ((1, 2), (3, 4, 5), (6, 7), (8,))),
            ("Into a checkpoint", ((9,),)),
            ("From two checkpoints", ((10,),)),
            ("LoRA files", ((11, 12),)),
        ),
        "mushroom, sunburst style",
    ),
}


FOLDER_TO_LORA: dict[str, Any] = {
    "1": ("GraftLoadDataset", {"folder": "starter/style"}),
    "2": ("GraftEncodeDataset", {"dataset": ["1", 0]}),
    "3": ("GraftBuildLora", {}),
    "4": ("GraftTrainSteps", {"dataset": ["2", 0], "start": ["3", 0]}),
    "5": ("GraftSaveLora", {"state": ["4", 2]}),
}
"""The blueprint's nodes; every widget but the folder is at its default."""
SOCKETS = {
    "model": (("2", "model"), ("3", "model"), ("4", "model")),
    "clip": (("2", "clip"), ("4", "clip")),
    "vae": (("2", "vae"),),
}
FIELDS = {
    "folder": (("1", "folder"),),
    "trigger": (("1", "trigger"),),
    "resolution": (("1", "resolution"),),
    "rank": (("3", "rank"),),
    "steps": (("4", "steps"),),
    "learning_rate": (("4", "learning_rate"),),
    "batch_size": (("4", "batch_size"),),
    "name": (("4", "name"), ("5", "name")),
}
"""Inputs of the blueprint's own node -> the inputs of its nodes that they give."""
OUTSIDE = (("4", 0), ("4", 1), ("1", 1))
"""The blueprint's outputs: node and slot."""


def editor_file(name: str, kind: str = "json") -> Path:
    """Return the editor form of the workflow `name`, or its picture, "jpg"."""
    return WORKFLOWS / f"{LAYOUTS[name].title}.{kind}"


def completed(prompt: dict[str, Any], layout: Layout, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the API form with every widget named, those that it leaves out at their defaults, and the nodes
    to change numbered.
    """
    changed = copy.deepcopy(prompt)
    for number, node_id in enumerate((key for column in layout.change for key in column), 1):
        meta = changed[str(node_id)]["_meta"]
        meta["title"] = f"{number}  {meta['title'].lstrip('0123456789 ')}"
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
        prompt = completed(json.loads(path.read_text(encoding="utf-8")), layout, schemas)
        texts[path] = _api_lines(prompt)
        texts[editor_file(name)] = _lines(editor_form(prompt, layout, schemas))
    texts[BLUEPRINT] = json.dumps(blueprint(schemas), ensure_ascii=False, indent=1) + "\n"
    return texts


def blueprint(schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the blueprint as the editor publishes a subgraph: one node, and what it stands for."""
    nodes = {}
    for key, (kind, given) in FOLDER_TO_LORA.items():
        title = re.sub("(?<=[a-z])(?=[A-Z])", " ", kind.removeprefix("Graft")).replace("Lora", "LoRA")
        nodes[int(key)] = _node(int(key), {"inputs": given, "_meta": {"title": title}}, schemas[kind])
    slots = {(key, slot["name"]): i for key, node in nodes.items() for i, slot in enumerate(node["inputs"])}
    links: list[dict[str, Any]] = []

    def link(source: int, output: int, target: int, name: str) -> int:
        slot = slots[target, name]
        entered = nodes[target]["inputs"][slot]
        entered["link"] = len(links) + 1
        ends = {"origin_id": source, "origin_slot": output, "target_id": target, "target_slot": slot}
        links.append({"id": len(links) + 1, **ends, "type": entered["type"]})
        return len(links)

    for key, (_, given) in FOLDER_TO_LORA.items():
        for name, value in given.items():
            if isinstance(value, list):
                origin = nodes[int(value[0])]["outputs"][value[1]]
                origin["links"].append(link(int(value[0]), value[1], int(key), name))
    inputs, shown = [], []
    for index, (name, targets) in enumerate({**SOCKETS, **FIELDS}.items()):
        ids = [link(-10, index, int(key), entered) for key, entered in targets]
        kind = links[ids[0] - 1]["type"]
        inputs.append({"id": _uuid("in", name), "name": name, "type": kind, "linkIds": ids})
        widget = {"widget": {"name": name}} if name in FIELDS else {}
        shown.append({"name": name, "type": kind, **widget, "link": None})
    outputs = []
    for index, (key, output) in enumerate(OUTSIDE):
        origin = nodes[int(key)]["outputs"][output]
        ends = {"origin_id": int(key), "origin_slot": output, "target_id": -20, "target_slot": index}
        links.append({"id": len(links) + 1, **ends, "type": origin["type"]})
        origin["links"].append(len(links))
        made = {"name": origin["name"], "type": origin["type"], "linkIds": [len(links)]}
        outputs.append({"id": _uuid("out", origin["name"]), **made})
    _place_row(nodes, [("", tuple((key,) for key in nodes))], 0, 0)
    right = max(node["pos"][0] + node["size"][0] for node in nodes.values())
    name = BLUEPRINT.stem
    subgraph = {
        "id": _uuid("subgraph"),
        "version": 1,
        "state": {"lastGroupId": 0, "lastNodeId": len(nodes), "lastLinkId": len(links), "lastRerouteId": 0},
        "revision": 0,
        "config": {},
        "name": name,
        "inputNode": {"id": -10, "bounding": [-200, 100, 120, 20 * len(inputs) + 40]},
        "outputNode": {"id": -20, "bounding": [right + GAP, 100, 120, 20 * len(outputs) + 40]},
        "inputs": inputs,
        "outputs": outputs,
        "widgets": [],
        "nodes": list(nodes.values()),
        "groups": [],
        "links": links,
        "extra": {},
        "category": "training/graft",
        "description": "Encode the images of a folder, train a LoRA on them and save it. Open it to add "
        "sample images and settings.",
    }
    node = {
        "id": 1,
        "type": subgraph["id"],
        "pos": [0, 0],
        "size": [WIDTHS["GraftTrainSteps"], HEIGHTS["GraftTrainSteps"]],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": shown,
        "outputs": [{"name": made["name"], "type": made["type"], "links": []} for made in outputs],
        "properties": {"cnr_id": "graft-lora", "ver": "0.1.0"},
        "widgets_values": [],
        "title": name,
    }
    head = {"revision": 0, "last_node_id": 1, "last_link_id": 0, "nodes": [node], "links": []}
    return {**head, "version": 0.4, "definitions": {"subgraphs": [subgraph]}, "extra": {}}


def _uuid(*words: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "/".join((BLUEPRINT.name, *words))))


def at_demo_size(
    prompt: dict[str, Any], *, steps: int, lora: str, tuned: str, subject: str = "cat, sunburst style"
) -> dict[str, Any]:
    """Return a workflow as the demo's base model and pictures can run it, in `steps` optimizer steps a node.

    It draws `subject`, of the starter's captions.

    `lora` and `tuned` are a LoRA and a checkpoint of that base, for the nodes that ask for such files.
    """
    model = {"model": "graft_tiny_sd3.safetensors"}
    others = dict.fromkeys(("text_encoder_1", "text_encoder_2", "text_encoder_3", "vae"), "from checkpoint")
    size = {"width": 128, "height": 128}
    changes: Mapping[str, Mapping[str, Any]] = {
        "GraftLoadBaseModel": {**model, **others, "dtype": "auto"},
        "GraftLoadDataset": {
            "folder": "starter/character" if "mibo" in subject else "starter/style",
            "resolution": "128",
            "trigger": "",
            "missing_captions": "error",
        },
        "GraftTrainSteps": {"steps": steps, "learning_rate": 0.001, "batch_size": 4},
        "GraftSamplePrompts": {**size, "prompts": f"{subject}\nbear", "steps": 12, "cfg": 4.0},
        "GraftValidationSettings": {"every": max(1, steps // 2), "patience": 0, "limit": 2},
        "GraftCheckpointSettings": {"steps": max(1, steps // 4)},
        "StringConcatenate": {"string_b": subject, "delimiter": ""},
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
        if kind == "CLIPTextEncode" and isinstance(inputs["text"], str):
            negative = entry["_meta"]["title"].startswith("Negative")
            inputs["text"] = "" if negative else subject
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
    groups, note, view = _place(nodes, layout)
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
        "extra": {"ds": view},
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


def _place(
    nodes: dict[int, dict[str, Any]], layout: Layout
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Put the nodes in two rows of groups, and return the groups, the note and the first view.

    The note and the nodes to change stand in the first row, which the view shows.
    """
    note = {
        "id": max(nodes) + 1, "type": "MarkdownNote", "pos": [0, TITLE], "size": [NOTE, 0], "flags": {},
        "order": 0, "mode": 0, "inputs": [], "outputs": [], "title": "Read me",
        "properties": {"graft": "note"},
        "widgets_values": [layout.note], "color": "#2b2f36", "bgcolor": "#353a42",
    }  # fmt: skip
    groups = [(title, _split(nodes, columns)) for title, columns in layout.groups]
    first = [("Change these, then press Run", layout.change)] if layout.change else groups[:1]
    framed, height = _place_row(nodes, first, NOTE + GAP, 0)
    rest = groups if layout.change else groups[1:]
    framed += _place_row(nodes, rest, 0, height + GAP)[0]
    note["size"] = [NOTE, height - TITLE]
    for index, group in enumerate(framed):
        group |= {"id": index + 1, "color": COLORS[index % len(COLORS)], "font_size": 26, "flags": {}}
    width = framed[0]["bounding"][0] + framed[0]["bounding"][2]
    scale = round(min(max(min(WINDOW[0] / width, WINDOW[1] / height), ZOOM[0]), ZOOM[1]), 2)
    return framed, note, {"scale": scale, "offset": [round(pixels / scale) for pixels in CORNER]}


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
    height = max(node["size"][1], IN_NODES_2.get(kind, 0))
    return int(height + TITLE + MARGIN + REPORT * reports + SAMPLES * (kind == "GraftTrainSteps"))


def _width(nodes: dict[int, dict[str, Any]], columns: Columns) -> int:
    return 2 * MARGIN - GAP + sum(GAP + max(nodes[key]["size"][0] for key in column) for column in columns)


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
        for name in options[1:] or [name for name, layout in LAYOUTS.items() if layout.subject]:
            _thumbnail(address, name)


THUMBNAIL_STEPS = 60
TUNED = "graft_thumbnail.safetensors"


def _thumbnail(address: str, name: str) -> None:
    """Run a workflow at demo size and write its thumbnail: the last picture saved, with a label."""
    prompt = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    prompt = at_demo_size(
        prompt,
        steps=THUMBNAIL_STEPS,
        lora="first_lora.safetensors",
        tuned=TUNED,
        subject=LAYOUTS[name].subject,
    )
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
    _labeled(pictures).save(editor_file(name, "jpg"), quality=85)


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
