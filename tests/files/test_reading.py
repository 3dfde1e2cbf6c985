"""LoRA files are read in every spelling, and a broken one ends in one clear error."""

from __future__ import annotations

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from graft.training.files.lora.read import read_lora
from graft.training.files.tensor_file import write_tensors

A, B = torch.randn(3, 8), torch.randn(6, 3)
NAME = "lora_unet_layer"


def written(tmp_path, tensors, metadata=None):
    path = tmp_path / "lora.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata)
    return path


def raw(tmp_path, header, body=b""):
    data = json.dumps(header).encode()
    path = tmp_path / "lora.safetensors"
    path.write_bytes(struct.pack("<Q", len(data)) + data + body)
    return path


def kohya(**more):
    return {f"{NAME}.lora_down.weight": A, f"{NAME}.lora_up.weight": B, **more}


@pytest.mark.parametrize(
    ("down", "up"),
    [
        (".lora_down.weight", ".lora_up.weight"),
        (".lora_A.weight", ".lora_B.weight"),
        (".lora_A.default.weight", ".lora_B.default.weight"),
        (".lora_A", ".lora_B"),
        ("_lora.down.weight", "_lora.up.weight"),
        (".lora.down.weight", ".lora.up.weight"),
        (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    ],
)
def test_every_spelling_of_a_lora_is_read(tmp_path, down, up):
    file = read_lora(written(tmp_path, {f"net.layer{down}": A, f"net.layer{up}": B}, {"ss_steps": "4"}))
    layer = file.layers["net.layer"]
    assert torch.allclose(layer.product(), B @ A) and layer.scale == 1.0 and layer.rank == 3
    assert file.metadata == {"ss_steps": "4"}


def test_alpha_over_rank_is_the_scale_and_is_1_without_alpha(tmp_path):
    layer = read_lora(written(tmp_path, kohya(**{f"{NAME}.alpha": torch.tensor([1.5])}))).layers[NAME]
    assert layer.scale == 0.5 and torch.allclose(layer.product(), 0.5 * B @ A)


def test_a_whole_lokr_has_strength_1_whatever_alpha_says(tmp_path):
    w1, w2 = torch.randn(2, 2), torch.randn(3, 4)
    tensors = {f"{NAME}.lokr_w1": w1, f"{NAME}.lokr_w2": w2, f"{NAME}.alpha": torch.tensor(9.0)}
    layer = read_lora(written(tmp_path, tensors)).layers[NAME]
    assert torch.allclose(layer.product(), torch.kron(w1, w2))


def test_tensors_of_no_method_are_kept_apart_not_dropped(tmp_path):
    file = read_lora(written(tmp_path, kohya(**{"norm.w_norm": torch.ones(4), "x.diff": torch.ones(2, 2)})))
    assert set(file.whole) == {"norm", "x"} and set(file.layers) == {NAME}
    file = read_lora(written(tmp_path, kohya(**{f"{NAME}.scalar": torch.ones(1), "emb": torch.ones(2)})))
    assert set(file.other) == {f"{NAME}.scalar", "emb"}


BROKEN = {
    "half": ({f"{NAME}.lora_down.weight": A}, "lora_up.weight is missing; found only lora_down.weight"),
    "lone alpha": (
        {**kohya(), "b.alpha": torch.tensor(1.0)},
        "b: lora_up.weight is missing",
    ),
    "half loha": (
        {f"{NAME}.hada_w1_a": B, f"{NAME}.hada_w1_b": A},
        "hada_w2_a is missing",
    ),
    "half lokr": ({f"{NAME}.lokr_w1": A}, "lokr_w2_a is missing"),
    "shapes": ({f"{NAME}.lora_down.weight": A, f"{NAME}.lora_up.weight": A}, "the shapes do not fit"),
    "vector": ({f"{NAME}.lora_down.weight": A[0], f"{NAME}.lora_up.weight": B}, "the shapes do not fit"),
    "empty": ({f"{NAME}.lora_down.weight": A[:0], f"{NAME}.lora_up.weight": B[:0]}, "the shapes do not fit"),
    "nan": (kohya(x=torch.tensor([float("nan")])), "x: holds infinite or NaN values"),
    "infinite": ({**kohya(), f"{NAME}.alpha": torch.tensor(float("inf"))}, "alpha: holds infinite"),
    "alpha shape": (
        kohya(**{f"{NAME}.alpha": torch.ones(3)}),
        r"alpha: expected one number, found shape \(3,\)",
    ),
    "twice": (kohya(**{f"{NAME}.lora_A.weight": A}), "holds this factor twice"),
    "rank 0": (
        {f"{NAME}.lora_down.weight": torch.ones(0, 8), f"{NAME}.lora_up.weight": torch.ones(6, 0)},
        "the shapes do not fit",
    ),
    "flat dora": (kohya(**{f"{NAME}.dora_scale": torch.ones(8)}), "one length an input, nor .6, 1., one an"),
    "two differences": (kohya(**{f"{NAME}.diff": torch.ones(6, 8)}), "diff beside factors; ComfyUI would"),
    "checkpoint": (
        {"model.diffusion_model.x.weight": A},
        "not a LoRA; it holds model.diffusion_model.x.weight",
    ),
    "nothing": ({}, "not a LoRA; it holds nothing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_does_not_hold_together_is_refused(tmp_path, name):
    tensors, message = BROKEN[name]
    with pytest.raises(ValueError, match=f"^lora.safetensors: (?s:.*){message}"):
        read_lora(written(tmp_path, tensors))


GLORA = {"a1": (8, 2), "a2": (2, 8), "b1": (6, 2), "b2": (2, 8)}
LOHA = {f"{NAME}.hada_w{i}_{s}": t for i in "12" for s, t in (("a", B), ("b", A))}
METHODS = {
    "dora": kohya(**{f"{NAME}.dora_scale": torch.ones(1, 8)}),
    "dora over outputs": kohya(**{f"{NAME}.dora_scale": torch.ones(6, 1)}),
    "loha with dora_scale": {**LOHA, f"{NAME}.dora_scale": torch.ones(1, 8)},
    "DoRA over outputs (PEFT)": kohya(**{f"{NAME}.lora_magnitude_vector": torch.ones(6)}),
    "oft": {f"{NAME}.oft_blocks": torch.zeros(2, 3, 3)},
    "boft": {f"{NAME}.oft_blocks": torch.zeros(2, 2, 2, 2), f"{NAME}.alpha": torch.tensor(0.0)},
    "BOFT without alpha": {f"{NAME}.oft_blocks": torch.zeros(2, 2, 2, 2)},
    "OFT with a constraint": {f"{NAME}.oft_blocks": torch.zeros(2, 3, 3), f"{NAME}.alpha": torch.tensor(1.0)},
    "OFT with rescale": {f"{NAME}.oft_blocks": torch.zeros(2, 3, 3), f"{NAME}.rescale": torch.ones(6, 1)},
    "OFT with dora_scale": {
        f"{NAME}.oft_blocks": torch.zeros(2, 3, 3),
        f"{NAME}.dora_scale": torch.ones(1, 8),
    },
    "BOFT with rescale": {f"{NAME}.oft_blocks": torch.zeros(2, 2, 2, 2), f"{NAME}.rescale": torch.ones(4, 1)},
    "glora": {f"{NAME}.{x}.weight": torch.ones(s) for x, s in GLORA.items()},
    "GLoRA in the layout of an older LyCORIS": {
        f"{NAME}.{x}.weight": torch.ones(s)
        for x, s in {"a1": (2, 8), "a2": (8, 2), "b1": (2, 8), "b2": (8, 2)}.items()
    },
    "GLoRA with dora_scale": {f"{NAME}.{x}.weight": torch.ones(s) for x, s in GLORA.items()}
    | {f"{NAME}.dora_scale": torch.ones(1, 8)},
    "whole difference": {f"{NAME}.diff": torch.ones(6, 8), f"{NAME}.diff_b": torch.ones(6)},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_is_named_for_its_method_and_nothing_of_it_is_lost(tmp_path, method):
    file = read_lora(written(tmp_path, METHODS[method]))
    assert file.methods == {NAME: method} and not file.other
    kept = [*(layer.tensors for layer in file.layers.values()), *file.whole.values()]
    kept += [other.tensors for other in file.others.values()]
    assert sum(len(tensors) for tensors in kept) == len(METHODS[method])


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.feature(107)
@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"a": F32, "b": F32}, bytes(8)),  # overlapping
        ({"a": F32, "b": {**F32, "data_offsets": [16, 24]}}, bytes(24)),  # a hole
        ({"a": {**F32, "data_offsets": [0, 800]}}, bytes(8)),  # past the end
        ({"a": {**F32, "data_offsets": [-8, 0]}}, bytes(8)),
        ({"a": {**F32, "shape": [1 << 62, 8]}}, bytes(8)),
        ({"a": {**F32, "shape": [3]}}, bytes(8)),
        ({"a": {**F32, "dtype": "F99"}}, bytes(8)),
        ({"a": 3}, bytes(8)),
        ({"__metadata__": {"a": 3}, "b": F32}, bytes(8)),
    ],
)
def test_damaged_headers_are_refused(tmp_path, header, body):
    with pytest.raises(ValueError, match="^lora.safetensors: the file is damaged"):
        read_lora(raw(tmp_path, header, body))


def test_a_header_of_100_megabytes_is_refused_unread(tmp_path):
    path = tmp_path / "lora.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100 << 20))
        file.truncate(200 << 20)
    with pytest.raises(ValueError, match="its header takes 100 MB"):
        read_lora(path)


@pytest.mark.feature(108)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_is_refused_unopened(tmp_path, protocol):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("the pickle ran",))

    path = tmp_path / "lora.safetensors"
    path.write_bytes(pickle.dumps(Trap(), protocol))
    with pytest.raises(ValueError, match="a pickle, which may run code"):
        read_lora(path)
    torch.save({"a": A}, path)
    with pytest.raises(ValueError, match="a pickle, which may run code"):
        read_lora(path)


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"<html><body>404</body></html>", bytes(8), struct.pack("<Q", 50) + b"{}"]
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "lora.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_lora(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "lora.safetensors", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            read_lora(path)


def test_every_prefix_of_a_file_is_refused(tmp_path):
    whole = written(tmp_path, kohya()).read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="^cut.safetensors: "):
            read_lora(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders there")
def test_a_pipe_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ValueError, match=r"pipe\.safetensors: .*cannot be read \(it is a pipe, a socket"):
        read_lora(tmp_path / "pipe.safetensors")


def test_half_a_letter_in_what_a_file_says_leaves_it_readable_for_others(tmp_path):
    notes = {"ss_output_name": "caf\udce9", "\ud83d": "whole: é 😀"}
    write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(1)}, notes)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"ss_output_name": r"caf\udce9", r"\ud83d": "whole: é 😀"}
