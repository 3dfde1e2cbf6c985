"""Merge, Unmerge, Extract, Resize, Convert and Inspect LoRA, on ComfyUI's own loaders and patchers."""

from __future__ import annotations

import asyncio
import os

import comfy.clip_model
import comfy.lora
import comfy.model_patcher
import comfy.ops
import comfy.sd
import folder_paths
import pytest
import torch
from safetensors.torch import load_file, save_file

import nodes
from graft.nodes import lora_tools
from graft.tests.support import dynamic_vram
from graft.tests.support.tiny_sd3 import sd3_state_dict
from graft.training.comfy import paths
from graft.training.comfy.files import lora_files
from graft.training.tools.merge import AlreadyMerged, NotMerged

QKV = "diffusion_model.joint_blocks.0.x_block.attn.qkv.weight"
FC1 = "text_model.encoder.layers.0.mlp.fc1"


@pytest.fixture(scope="module", autouse=True)
def files(base):
    """models/loras and models/checkpoints with a base, a tuned copy, and LoRAs."""
    for kind in ("loras", "checkpoints"):
        (base / "models" / kind).mkdir(parents=True, exist_ok=True)
    plain = {f"model.diffusion_model.{key}": weight for key, weight in sd3_state_dict().items()}
    tuned = {key: weight + 0.01 * torch.randn_like(weight) for key, weight in plain.items()}
    save_file(plain, base / "models" / "checkpoints" / "tools_base.safetensors")
    save_file(tuned, base / "models" / "checkpoints" / "tools_tuned.safetensors")
    for name in ("first", "second", "first again"):
        save_file(lora(int(name == "second")), base / "models" / "loras" / f"{name}.safetensors")
    save_file(
        {"other.lora_A.weight": torch.ones(2, 2), "other.lora_B.weight": torch.ones(2, 2)},
        base / "models" / "loras" / "other.safetensors",
    )
    for kind in ("loras", "checkpoints"):
        folder_paths.add_model_folder_path(kind, str(base / "output" / kind))


def lora(seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {"odd.diff": torch.ones(2, 2)}
    for name, out, wide in (
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", 384, 128),
        ("lora_unet_joint_blocks_1_x_block_mlp_fc1", 512, 128),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1", 64, 16),
    ):
        tensors[f"{name}.lora_up.weight"] = torch.randn(out, 4, generator=generator)
        tensors[f"{name}.lora_down.weight"] = torch.randn(4, wide, generator=generator)
        tensors[f"{name}.alpha"] = torch.tensor(2.0)
    return tensors


@pytest.fixture
def model():
    return comfy.sd.load_diffusion_model_state_dict(sd3_state_dict())


@pytest.fixture
def clip():
    """What Merge LoRA needs of a CLIP, around a patcher of ComfyUI's."""

    class Clip:
        def __init__(self, patcher):
            self.patcher, self.cond_stage_model = patcher, patcher.model

        def clone(self):
            return Clip(self.patcher.clone())

    layer = torch.nn.Linear(16, 64)
    network = torch.nn.Module()
    network.clip_l = torch.nn.Module()
    at = network.clip_l
    for name in ("transformer", *FC1.split(".")[:-1]):
        at.add_module(name, torch.nn.Module())
        at = getattr(at, name)
    at.add_module("fc1", layer)
    return Clip(comfy.model_patcher.ModelPatcher(network, torch.device("cpu"), torch.device("cpu")))


merged = dynamic_vram.is_off("it merges nothing into the weights in memory")


def loaded(patcher):
    """The weights that ComfyUI computes with, and then its own again."""
    patcher.patch_model(torch.device("cpu"))
    try:
        return {key: weight.detach().clone() for key, weight in patcher.model.state_dict().items()}
    finally:
        patcher.unpatch_model(torch.device("cpu"))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.feature(17, 18)
@merged
def test_merge_adds_the_difference_and_unmerge_restores_every_bit(model, clip):
    before, clip_before = loaded(model), loaded(clip.patcher)
    merged, merged_clip, report = lora_files.merge_lora(model, clip, "first.safetensors", 0.5, 1.0)
    tensors, name = lora(0), "lora_unet_joint_blocks_0_x_block_attn_qkv"
    delta = 0.5 * tensors[f"{name}.lora_up.weight"] @ tensors[f"{name}.lora_down.weight"]
    assert torch.allclose(loaded(merged)[QKV], before[QKV] + 0.5 * delta, atol=1e-5)
    key = f"clip_l.transformer.{FC1}.weight"
    assert not torch.equal(loaded(merged_clip.patcher)[key], clip_before[key])
    assert report.endswith(
        "first.safetensors: merged into 3 weights\n1 keys match nothing and were left out:\n  odd.diff"
    )
    restored, restored_clip, _ = lora_files.unmerge_lora(merged, merged_clip, "first.safetensors")
    assert same(loaded(restored), before) and same(loaded(restored_clip.patcher), clip_before)
    assert same(loaded(model), before) and not model.patches and not model.attachments


@merged
def test_one_of_two_loras_is_taken_out_and_the_other_stays(model):
    first = lora_files.merge_lora(model, None, "first.safetensors", 1.0, 1.0)[0]
    both = lora_files.merge_lora(first, None, "second.safetensors", 1.0, 1.0)[0]
    second = lora_files.merge_lora(model, None, "second.safetensors", 1.0, 1.0)[0]
    assert same(loaded(lora_files.unmerge_lora(both, None, "first.safetensors")[0]), loaded(second))
    assert same(loaded(lora_files.unmerge_lora(both, None, "second.safetensors")[0]), loaded(first))


@pytest.mark.feature(18)
def test_merging_twice_and_unmerging_what_is_not_there_are_errors(model):
    merged = lora_files.merge_lora(model, None, "first.safetensors", 1.0, 1.0)[0]
    with pytest.raises(
        AlreadyMerged, match="first again.safetensors: already merged into this model; unmerge"
    ):
        lora_files.merge_lora(merged, None, "first again.safetensors", 1.0, 1.0)
    with pytest.raises(NotMerged, match="not merged into this model, which holds nothing"):
        lora_files.unmerge_lora(model, None, "first.safetensors")
    with pytest.raises(NotMerged, match="which holds only first.safetensors"):
        lora_files.unmerge_lora(merged, None, "second.safetensors")
    with pytest.raises(ValueError, match="other.safetensors: no key matches this model"):
        lora_files.merge_lora(model, None, "other.safetensors", 1.0, 1.0)
    with pytest.raises(ValueError, match="no such file in models/loras"):
        lora_files.merge_lora(model, None, "nowhere.safetensors", 1.0, 1.0)


def nodes_of(*nodes):
    """A prompt of nodes without links."""
    return {str(i): {"class_type": kind, "inputs": inputs} for i, (kind, inputs) in enumerate(nodes)}


@merged
def test_a_checkpoint_merged_into_loads_as_the_patched_model_computes(execute, base, model):
    execute(
        nodes_of(
            (
                "GraftMergeCheckpoint",
                {
                    "checkpoint": "tools_base.safetensors",
                    "lora_name": "first.safetensors",
                    "strength": 0.5,
                    "name": "merged",
                },
            )
        )
    )
    file = load_file(base / "output" / "checkpoints" / "merged.safetensors")
    patched = loaded(lora_files.merge_lora(model, None, "first.safetensors", 0.5, 1.0)[0])
    for key, weight in file.items():
        assert torch.allclose(weight, patched[key.removeprefix("model.")], atol=1e-5)


@pytest.mark.feature(135)
@merged
def test_an_extracted_lora_loads_in_the_stock_loader_and_gives_the_tuned_model(execute, base, model):
    execute(
        nodes_of(
            (
                "GraftExtractLora",
                {
                    "original": "tools_base.safetensors",
                    "tuned": "tools_tuned.safetensors",
                    "rank": 4096,
                    "energy": 0.0,
                    "dtype": "fp32",
                    "name": "extracted",
                },
            )
        )
    )
    tensors = load_file(base / "output" / "loras" / "extracted.safetensors")
    patched = loaded(comfy.sd.load_lora_for_models(model, None, tensors, 1.0, 1.0)[0])
    tuned = load_file(base / "models" / "checkpoints" / "tools_tuned.safetensors")
    assert (patched[QKV] - tuned[f"model.{QKV}"]).abs().max() < 1e-5


def difference(model, tensors):
    patched, plain = loaded(comfy.sd.load_lora_for_models(model, None, tensors, 1.0, 1.0)[0]), loaded(model)
    return {key: patched[key] - plain[key] for key in plain}


@pytest.mark.feature(135)
@merged
@pytest.mark.parametrize("layout", ["kohya", "native", "diffusers"])
def test_a_converted_lora_does_the_same_in_the_stock_loader(execute, base, model, layout):
    values = {
        "lora_name": "first.safetensors",
        "layout": layout,
        "dtype": "as in the file",
        "base": "tools_base.safetensors",
        "name": f"converted {layout}",
    }
    execute(nodes_of(("GraftConvertLora", values)))
    tensors = load_file(base / "output" / "loras" / f"converted {layout}.safetensors")
    before, after = difference(model, lora(0)), difference(model, tensors)
    assert all(torch.allclose(after[key], before[key], atol=1e-5) for key in before)


@pytest.mark.feature(135)
def test_resize_and_inspect_show_what_they_did(execute, base):
    values = {"lora_name": "first.safetensors", "rank": 2, "energy": 0.0, "dtype": "fp16", "name": "resized"}
    execute(nodes_of(("GraftResizeLora", values)))
    tensors = load_file(base / "output" / "loras" / "resized.safetensors")
    assert tensors["lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight"].shape == (2, 128)
    shown = lora_tools.InspectLora.execute("first.safetensors")
    report = shown.ui["text"][0]
    assert report == shown.result[0] and "lora_unet_joint_blocks_0" in report and "rank     4 (3)" in report


def test_the_nodes_work_in_a_graph(execute, base, comfyui):
    merging = str(comfyui / "comfy_extras" / "nodes_model_merging.py")
    asyncio.run(nodes.load_custom_node(merging, module_parent="comfy_extras"))
    strengths = {"strength_model": 1.0, "strength_clip": 1.0}
    prompt = nodes_of(
        ("GraftLoadBaseModel", {"model": "tools_base.safetensors", "dtype": "fp32"}),
        ("GraftMergeLora", {"model": ["0", 0], "lora_name": "first.safetensors", **strengths}),
        ("GraftUnmergeLora", {"model": ["1", 0], "lora_name": "first again.safetensors"}),
        ("ModelSave", {"model": ["2", 0], "filename_prefix": "restored"}),
    )
    execute(prompt)
    before = load_file(base / "models" / "checkpoints" / "tools_base.safetensors")
    after = load_file(base / "output" / "restored_00001_.safetensors")
    assert all(torch.equal(after[key], before[key]) for key in before)
    prompt["2"]["inputs"]["lora_name"] = "second.safetensors"
    with pytest.raises(RuntimeError, match="second.safetensors: not merged into this model"):
        execute(prompt)


def test_every_choice_comes_from_comfyuis_lists(graft_nodes):
    for node in (
        n
        for n in vars(lora_tools).values()
        if isinstance(n, type) and n.__name__.endswith(("Lora", "Checkpoint"))
    ):
        inputs = graft_nodes[node.GET_SCHEMA().node_id].INPUT_TYPES()["required"]
        if "lora_name" in inputs:
            spec = inputs["lora_name"]
            options = spec[0] if isinstance(spec[0], list) else spec[1]["options"]
            assert {"first.safetensors", "second.safetensors"} <= set(options)


FILES = {
    "lora_name": "first.safetensors",
    "checkpoint": "tools_base.safetensors",
    "original": "tools_base.safetensors",
    "tuned": "tools_tuned.safetensors",
    "base": "tools_base.safetensors",
}


@pytest.mark.parametrize(
    "node", [n for n in vars(lora_tools).values() if "define_schema" in getattr(n, "__dict__", {})]
)
def test_a_file_that_is_replaced_under_its_name_is_noticed(node, base):
    inputs = {slot.id: FILES.get(slot.id) for slot in node.define_schema().inputs}
    for name in [name for name in inputs if name in FILES]:
        kind = "loras" if name == "lora_name" else "checkpoints"
        before = node.fingerprint_inputs(**inputs)
        path = base / "models" / kind / FILES[name]
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        assert node.fingerprint_inputs(**inputs) != before


MISFITS = {
    "rank 0": ((384, 0), (0, 128)),
    "another size": ((1, 2), (2, 1)),
    "five axes": ((384, 2, 1, 1, 1), (2, 128, 3, 3, 3)),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_lora_that_fits_no_weight_is_refused_and_not_said_to_be_merged(base, model, misfit):
    up, down = MISFITS[misfit]
    name = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    tensors = {f"{name}.lora_up.weight": torch.ones(up), f"{name}.lora_down.weight": torch.ones(down)}
    save_file(tensors, base / "models" / "loras" / "misfit.safetensors")
    folder_paths.filename_list_cache.clear()
    with pytest.raises(
        ValueError, match=f"misfit.safetensors: {name}: (the shapes do not|made for a weight)"
    ):
        lora_files.merge_lora(model, None, "misfit.safetensors", 1.0, 1.0)


def test_a_strength_that_is_no_number_merges_nothing(model):
    for strengths in ((float("nan"), 1.0), (1.0, float("inf"))):
        with pytest.raises(ValueError, match="is not a finite number"):
            lora_files.merge_lora(model, None, "first.safetensors", *strengths)


@merged
def test_what_comfyui_applies_and_graft_does_not_train_is_merged_into_a_model(base, model):
    tensors = {
        "lora_unet_joint_blocks_0_x_block_attn_qkv.oft_blocks": torch.randn(96, 4, 4),
        "lora_unet_joint_blocks_0_x_block_attn_qkv.alpha": torch.tensor(0.0),
        "lora_unet_joint_blocks_1_x_block_mlp_fc1.diff": torch.randn(512, 128),
        "lora_unet_joint_blocks_1_x_block_mlp_fc1.diff_b": torch.randn(512),
    }
    save_file(tensors, base / "models" / "loras" / "mixed.safetensors")
    folder_paths.filename_list_cache.clear()
    patched, _, report = lora_files.merge_lora(model, None, "mixed.safetensors", 1.0, 1.0)
    assert report == "mixed.safetensors: merged into 3 weights"
    stock = comfy.sd.load_lora_for_models(model, None, tensors, 1.0, 1.0)[0]
    assert same(loaded(patched), loaded(stock)) and not same(loaded(patched), loaded(model))
    shown = lora_files.inspect_lora("mixed.safetensors")
    assert "oft (1)" in shown and "whole difference (1)" in shown


def test_names_that_load_lora_does_not_read_are_written_and_found_apart(execute, base):
    values = {
        "lora_name": "first.safetensors",
        "layout": "peft",
        "dtype": "as in the file",
        "base": "tools_base.safetensors",
        "name": "apart",
    }
    shown = execute(nodes_of(("GraftConvertLora", values))).history_result["outputs"]["0"]["text"][0]
    assert "Load LoRA does not read these names" in shown
    assert (base / "output" / "diffusers" / "apart.safetensors").is_file()
    assert not (base / "output" / "loras" / "apart.safetensors").exists()
    assert "output/diffusers/apart.safetensors" in paths.lora_file_names()
    assert "rank     4 (3)" in lora_files.inspect_lora("output/diffusers/apart.safetensors")
    for name in ("output/diffusers/../loras/first.safetensors", "output/diffusers/none.safetensors"):
        with pytest.raises(ValueError, match="is outside|no such file|not a usable name"):
            paths.lora_file_path(name)
