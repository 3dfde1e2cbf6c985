"""Every shipped workflow: its editor form and its API form are the same graph, and fit the nodes as they
are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import comfy.utils
import folder_paths
import pytest
import torch
from PIL import Image

import graft
from graft.commands.headless.server import comfyui_version
from graft.dev.make_workflows import BLUEPRINT, LAYOUTS, at_demo_size, editor_file, written
from graft.tests.support.clips import moving, write_clip
from graft.tests.support.first_lora import four_squares
from graft.tests.support.sounds import wave, write_sound
from graft.tests.support.tiny_models import TINY
from graft.tests.support.tiny_others import OTHERS
from graft.tests.support.tiny_videos import FIRST_FRAMES, Clip, ace_vae, flux2_vae, wan22_vae, wan_vae
from graft.training.comfy.model import loading

FOLDER = Path(graft.__file__).parent / "example_workflows"
NAMES = list(LAYOUTS)
WIDGETS = {"COMBO", "INT", "FLOAT", "STRING", "BOOLEAN"}
NOTES = {"Note", "MarkdownNote"}
FILES = {
    "model",
    "text_encoder_1",
    "text_encoder_2",
    "text_encoder_3",
    "vae",
    "folder",
    "image",
    "lora_name",
    "ckpt_name",
    "checkpoint",
    "original",
    "tuned",
}
"""Combos over the reader's own files."""
OLDEST = "0.3.75"
OF_ANOTHER_KIND = {
    "qwen_edit": (TINY["qwen"], wan_vae, "four_squares", {".png"}),
    "wan22_5b_i2v": (OTHERS["wan_5b"], wan22_vae, "one_clip", {".mp4", ".webp"}),
    "klein_edit": (TINY["flux2"], flux2_vae, "four_squares", {".png"}),
    "ace_step": (OTHERS["ace"], ace_vae, "one_song", {".flac"}),
}
"""Workflows that the demo's base model cannot run -> a tiny model and a VAE of theirs, a folder of the test,
and the samples that are drawn."""
WITH_OTHER_FILES = {
    ("my_pictures", "zimage"): (TINY["zimage"], None),
    ("my_pictures", "krea2"): (OTHERS["krea2"], wan_vae),
    ("my_pictures", "anima"): (OTHERS["anima"], wan_vae),
    ("my_pictures", "ernie"): (OTHERS["ernie"], flux2_vae),
    ("wan22_5b_i2v", "ltxv"): FIRST_FRAMES["ltxv"],
    ("wan22_5b_i2v", "hunyuan_15"): FIRST_FRAMES["hunyuan_15"],
}
"""Models that a workflow trains with other files, by the table in docs/compatibility.md -> a tiny one and its
VAE, the demo's if None."""
DRAWN_BEHIND = ("Wan22ImageToVideoLatent", "KSampler", "VAEDecode", "SaveAnimatedWEBP")
"""What another video model has a node of its own for."""


@pytest.fixture(scope="module", params=NAMES)
def pair(request):
    """The workflow in both forms."""
    return load(editor_file(request.param)), load(FOLDER / "api" / f"{request.param}.json")


@pytest.fixture
def schemas(graft_nodes):
    return {name: schema(node) for name, node in graft_nodes.items()}


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def schema(node):
    """What /object_info says of a node: inputs in widget order, types of the outputs and their names."""
    if hasattr(node, "GET_NODE_INFO_V1"):
        node.GET_SCHEMA()
    given, kinds = node.INPUT_TYPES(), list(node.RETURN_TYPES)
    inputs = {**given.get("required", {}), **given.get("optional", {})}
    names = [name or kind for name, kind in zip(getattr(node, "RETURN_NAMES", None) or kinds, kinds)]
    return {"inputs": inputs, "required": set(given.get("required", {})), "outputs": kinds, "names": names}


def object_info(name, node):
    """What make.py reads of a node in the server's /object_info."""
    known = schema(node)
    given = {"required": {}, "optional": {}, **node.INPUT_TYPES()}
    return {"input": given, "output": known["outputs"], "output_name": known["names"], "name": name}


def kind_of(spec):
    return "COMBO" if isinstance(spec[0], (list, tuple)) else spec[0]


def options_of(spec):
    return spec[1] if len(spec) > 1 else {}


def widgets(node_schema):
    """Names of the values in `widgets_values`, None for the extra value behind a seed."""
    for name, spec in node_schema["inputs"].items():
        if kind_of(spec) in WIDGETS and not options_of(spec).get("forceInput"):
            yield name
            if options_of(spec).get("control_after_generate"):
                yield None


def graph_nodes(workflow):
    return {node["id"]: node for node in workflow["nodes"] if node["type"] not in NOTES}


def ours(node):
    """Whether a node is Graft's; ComfyUI's own gain and lose inputs from one version to the next."""
    return node["type"].startswith("Graft")


def to_api(workflow, schemas):
    """The API form of an editor workflow, as the frontend would send it."""
    links = {link[0]: link for link in workflow["links"]}
    prompt = {}
    for key, node in graph_nodes(workflow).items():
        names = widgets(schemas[node["type"]])
        values = dict(zip(names, node["widgets_values"], strict=ours(node)))
        values.pop(None, None)
        for slot in node["inputs"]:
            if slot["link"] is not None:
                values[slot["name"]] = [str(links[slot["link"]][1]), links[slot["link"]][2]]
        prompt[str(key)] = {"class_type": node["type"], "_meta": {"title": node["title"]}, "inputs": values}
    return prompt


def test_every_workflow_has_both_forms():
    assert sorted(NAMES) == sorted(path.stem for path in (FOLDER / "api").glob("*.json"))
    assert sorted(map(editor_file, NAMES)) == sorted(FOLDER.glob("*.json"))


def test_the_editor_form_is_the_api_form(pair, schemas):
    editor, api = pair
    prompt = to_api(editor, schemas)
    for key, node in graph_nodes(editor).items():
        if not ours(node):  # the API form also names what newer versions require
            prompt[str(key)]["inputs"] = {**api[str(key)]["inputs"], **prompt[str(key)]["inputs"]}
    assert prompt == api


def test_the_files_are_what_make_writes(graft_nodes, comfyui):
    if comfyui_version(comfyui) != OLDEST:
        pytest.skip(f"make_workflows.py writes them with the stock nodes of ComfyUI {OLDEST}")
    described = json.loads(json.dumps({name: object_info(name, node) for name, node in graft_nodes.items()}))
    other = [path.name for path, text in written(described).items() if path.read_text("utf-8") != text]
    assert not other, "run dev/make_workflows.py after changes to a note in its LAYOUTS"


def test_every_link_of_the_blueprint_joins_slots_of_one_type_on_both_ends(schemas):
    whole = load(BLUEPRINT)
    [outer], [inner] = whole["nodes"], whole["definitions"]["subgraphs"]
    assert outer["type"] == inner["id"] and outer["title"] == inner["name"] == BLUEPRINT.stem
    nodes = {node["id"]: node for node in inner["nodes"]}
    for link in inner["links"]:
        start = inner["inputs"] if link["origin_id"] == -10 else nodes[link["origin_id"]]["outputs"]
        end = inner["outputs"] if link["target_id"] == -20 else nodes[link["target_id"]]["inputs"]
        source, target = start[link["origin_slot"]], end[link["target_slot"]]
        assert link["id"] in (source.get("linkIds") or source["links"])
        assert link["id"] == target.get("link") or link["id"] in target["linkIds"]
        if link["origin_id"] != -10:
            known = schemas[nodes[link["origin_id"]]["type"]]
            assert known["outputs"][link["origin_slot"]] == source["type"]
            assert source["type"] in link["type"].split(",")  # the editor names a link by its input
        if link["target_id"] != -20:
            spec = schemas[nodes[link["target_id"]]["type"]]["inputs"][target["name"]]
            assert source["type"] in kind_of(spec).split(",")
    required = [(node, name) for node in nodes.values() for name in schemas[node["type"]]["required"]]
    slots = {(node["id"], slot["name"]): slot for node in nodes.values() for slot in node["inputs"]}
    assert [name for node, name in required if not _is_given(slots[node["id"], name])] == []
    for entered, named in zip(outer["inputs"], inner["inputs"], strict=True):
        assert (entered["name"], entered["type"]) == (named["name"], named["type"])


def _is_given(slot):
    return slot["link"] is not None or "widget" in slot


def test_comfyui_offers_the_blueprint(comfy_server):
    offered = comfy_server.request("/global_subgraphs")
    [(key, entry)] = [(key, each) for key, each in offered.items() if each["name"] == BLUEPRINT.stem]
    assert entry["info"]["node_pack"] == "custom_nodes.graft"
    assert json.loads(comfy_server.request(f"/global_subgraphs/{key}")["data"]) == load(BLUEPRINT)


def test_every_link_joins_slots_of_one_type_on_both_ends(pair, schemas):
    editor, _ = pair
    nodes = graph_nodes(editor)
    for number, source, output, target, slot, kind in editor["links"]:
        start, end = nodes[source]["outputs"][output], nodes[target]["inputs"][slot]
        accepted = kind_of(schemas[nodes[target]["type"]]["inputs"][end["name"]]).split(",")
        assert schemas[nodes[source]["type"]]["outputs"][output] == start["type"] == kind and kind in accepted
        assert number in start["links"] and end["link"] == number
    used = [slot["link"] for node in nodes.values() for slot in node["inputs"] if slot["link"] is not None]
    assert sorted(used) == sorted(link[0] for link in editor["links"])


def test_slots_and_values_are_those_of_the_schemas(pair, schemas):
    editor, api = pair
    for key, node in graph_nodes(editor).items():
        known, given = schemas[node["type"]], api[str(key)]["inputs"]
        outputs = [slot["name"] for slot in node["outputs"]]
        assert outputs == known["names"][: None if ours(node) else len(outputs)]
        if ours(node):
            assert {slot["name"] for slot in node["inputs"]} == set(known["inputs"])
        assert known["required"] <= set(given)
        for name, value in given.items():
            if not isinstance(value, list) and (ours(node) or name in known["inputs"]):
                check_value(name, value, known["inputs"][name])


def check_value(name, value, spec):
    kind, options = kind_of(spec), options_of(spec)
    if kind == "COMBO" and name not in FILES:
        assert value in (spec[0] if isinstance(spec[0], (list, tuple)) else options["options"]), name
    if kind in ("INT", "FLOAT"):
        assert options.get("min", value) <= value <= options.get("max", value), name


def test_nodes_say_which_pack_they_come_from(pair):
    for node in graph_nodes(pair[0]).values():
        pack = "graft-lora" if node["type"].startswith("Graft") else "comfy-core"
        assert node["properties"]["cnr_id"] == pack


def test_no_two_nodes_overlap_and_each_lies_in_a_group(pair):
    boxes = [(*node["pos"], *node["size"]) for node in pair[0]["nodes"]]
    for number, (x, y, width, height) in enumerate(boxes):
        for a, b, c, d in boxes[number + 1 :]:
            assert x + width <= a or a + c <= x or y + height <= b - 30 or b + d <= y - 30
    for node in graph_nodes(pair[0]).values():
        assert any(inside(node, group["bounding"]) for group in pair[0]["groups"]), node["title"]


def inside(node, bounding):
    left, top, width, height = bounding
    (x, y), (w, h) = node["pos"], node["size"]
    return left <= x and top <= y and x + w <= left + width and y + h <= top + height


# Every workflow runs, at the size of the demo's base model


@pytest.fixture(scope="module")
def files(base):
    """Names of a LoRA and a checkpoint of the demo's base, for the workflows that read such files."""
    folder_paths.add_model_folder_path("loras", str(base / "output" / "loras"))  # as ComfyUI's main.py does
    return {"lora": "workflow_lora.safetensors", "tuned": "workflow_tuned.safetensors"}


@pytest.fixture
def made(execute, files, base):
    """The names of `files`, which the first test that asks for them makes."""
    if not (base / "models" / "checkpoints" / files["tuned"]).exists():
        first = at_demo_size(load(FOLDER / "api" / "first_lora.json"), steps=2, **files)
        first = {key: node for key, node in first.items() if int(key) <= 6}
        first["6"]["inputs"]["name"] = "workflow_lora"
        first["20"] = {
            "class_type": "GraftSaveTrainingState",
            "inputs": {"state": ["5", 2], "name": "my_lora"},
        }
        execute(first)
        merged = {"checkpoint": "graft_tiny_sd3.safetensors", "lora_name": files["lora"], "strength": 1.0}
        node = {"class_type": "GraftMergeCheckpoint", "inputs": {**merged, "name": "workflow_tuned"}}
        execute({"1": node})
        [checkpoint] = (base / "output").rglob(files["tuned"])
        checkpoint.rename(base / "models" / "checkpoints" / files["tuned"])
    return files


@pytest.mark.feature(137, 138, 148)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_ANOTHER_KIND])
def test_every_workflow_runs(name, execute, made, base):
    prompt = at_demo_size(load(FOLDER / "api" / f"{name}.json"), steps=2, **made)
    for node in prompt.values():
        node["inputs"] |= {"steps": 1} if node["class_type"] in ("KSampler", "GraftSamplePrompts") else {}
        node["inputs"] |= {"batch_size": 1} if "batch_size" in node["inputs"] else {}
        node["inputs"] |= {"rank": 2} if "rank" in node["inputs"] else {}
    if name == "resume":  # the state says how large its LoRA is
        assert prompt["4"]["class_type"] == "GraftLoadTrainingState"
    execute(prompt)
    prefixes = [
        node["inputs"]["filename_prefix"] for node in prompt.values() if "filename_prefix" in node["inputs"]
    ]
    assert prefixes and all(list((base / "output").glob(f"{prefix}_0*")) for prefix in prefixes)


class LoadedClip(Clip):
    """A CLIP that can be given a LoRA; its texts are kept apart from those of others."""

    def __init__(self, tiny):
        super().__init__(tiny)
        self.cond_stage_model = torch.nn.ParameterDict({tiny.config: torch.zeros(1)})

    def clone(self, **options):
        return self

    def add_patches(self, *patches):
        return ()


@pytest.mark.feature(144, 147, 149)
@pytest.mark.parametrize(
    "name, model",
    [*((name, "") for name in OF_ANOTHER_KIND), *WITH_OTHER_FILES],
)
def test_a_workflow_of_another_kind_runs_on_a_tiny_model_of_its_own(name, model, execute, base, monkeypatch):
    """On four images, each its own reference, a clip or a sound; a model of other files also draws."""
    if name in OF_ANOTHER_KIND:
        tiny, vae, folder, endings = OF_ANOTHER_KIND[name]
    else:
        folder, endings = "four_squares", {".png"}
    if model:
        tiny, vae = WITH_OTHER_FILES[name, model]
    if tiny.missing:
        pytest.skip(f"this ComfyUI has no {tiny.config}")
    load_base = loading.load_base
    monkeypatch.setattr(
        loading,
        "load_base",
        lambda *files: (tiny(), LoadedClip(tiny), vae() if vae else load_base(*files)[2]),
    )
    upscale = comfy.utils.common_upscale  # Qwen's node makes a megapixel of a reference
    monkeypatch.setattr(
        comfy.utils,
        "common_upscale",
        lambda image, w, h, *a, **k: upscale(image, min(w, 64), min(h, 64), *a, **k),
    )
    shutil.copy(four_squares(base) / "red.png", base / "input" / "example.png")
    write_clip(base / "input" / "one_clip" / "a.mp4", moving(9))
    write_sound(base / "input" / "one_song" / "a.wav", wave(1.5), "a tone")
    prompt, size = load(FOLDER / "api" / f"{name}.json"), {"width": 64, "height": 64}
    is_video = model and name in OF_ANOTHER_KIND
    if is_video:
        prompt = {key: node for key, node in prompt.items() if node["class_type"] not in DRAWN_BEHIND}
    files = {"model": "graft_tiny_sd3.safetensors", "text_encoder_1": "from checkpoint"}
    small = {
        "GraftLoadBaseModel": {**files, "vae": "from checkpoint"},
        "GraftLoadDataset": {"resolution": "64", "folder": folder},
        "GraftBuildLora": {"rank": 2},
        "GraftTrainSteps": {"steps": 2},
        "GraftSamplePrompts": {**size, "steps": 1, "every": 2},
        "EmptySD3LatentImage": size,
        "EmptyFlux2LatentImage": size,
        "ImageScaleToTotalPixels": {"megapixels": 0.01},
        "Wan22ImageToVideoLatent": {**size, "length": 5},
        "KSampler": {"steps": 1},
    }
    for node in prompt.values():
        given = node["inputs"]
        given |= small.get(node["class_type"], {})
        given |= {"frames": 9 if is_video else 5} if given.get("frames", 0) > 1 else {}
        given |= {"seconds": 1.5} if given.get("seconds") else {}
        given |= {"references": folder} if given.get("references") else {}
        if model and not is_video and node["class_type"] == "GraftSamplePrompts":
            given["model"] = ["turbo", 0]
        given |= {"filename_prefix": f"graft/{name}{model}"} if "filename_prefix" in given else {}
    [trained] = [node["inputs"] for node in prompt.values() if node["class_type"] == "GraftTrainSteps"]
    trained["name"] = run = f"{name}{model}"
    if model and not is_video:
        prompt["turbo"] = prompt["1"]
    execute(prompt)
    drawn = (base / "output" / "graft").glob(f"{run}-*/samples/step-*")
    assert {path.suffix for path in drawn} == endings
    assert is_video or list((base / "output" / "graft").glob(f"{name}{model}_0*"))


@pytest.mark.feature(142)
@pytest.mark.parametrize("name", NAMES)
def test_every_workflow_has_a_small_picture(name):
    path = editor_file(name, "jpg")
    assert max(Image.open(path).size) <= 512 and path.stat().st_size < 100_000
