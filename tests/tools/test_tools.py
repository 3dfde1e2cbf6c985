"""Merge, extract, resize, convert and inspect, and what they refuse."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from graft.training.cli import main
from graft.training.lora_file import read_lora
from graft.training.tools.convert import convert
from graft.training.tools.extract import extract
from graft.training.tools.inspect import inspect, text
from graft.training.tools.low_rank import best_factors, best_of_product
from graft.training.tools.merge import AlreadyMerged, NotMerged, merge, merged_weight, unmerge
from graft.training.tools.resize import resize

from .files import NAMES, PREFIX, checkpoint, lora_file, lora_path, lora_tensors, weight_differences

QKV = f"{PREFIX}blocks.0.attn.qkv.weight"


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_merging_adds_the_difference_and_touches_nothing_else(tmp_path):
    base, differences = checkpoint(), weight_differences(lora_tensors())
    merged = merge(base, lora_file(tmp_path), strength=0.5).weights
    for key, weight in base.items():
        assert torch.allclose(merged[key], weight + 0.5 * differences.get(key, torch.zeros(())), atol=1e-6)
    assert_equal(base, checkpoint())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unmerging_gives_back_the_very_same_weights(tmp_path, dtype):
    base = {key: weight.to(dtype) for key, weight in checkpoint().items()}
    file = lora_file(tmp_path)
    merged = merge(base, file)
    assert merged.weights[QKV].dtype == dtype and not torch.equal(merged.weights[QKV], base[QKV])
    assert_equal(unmerge(merged, file).weights, base)


def test_two_loras_are_unmerged_in_reverse(tmp_path):
    base, first = checkpoint(), lora_file(tmp_path, name="first")
    second = lora_file(tmp_path, lora_tensors(seed=2), "second")
    both = merge(merge(base, first), second)
    with pytest.raises(NotMerged, match="another LoRA was merged after it; unmerge that one first"):
        unmerge(both, first)
    assert_equal(unmerge(unmerge(both, second), first).weights, base)


def test_merging_twice_and_unmerging_what_is_not_there_are_errors(tmp_path):
    base, file = checkpoint(), lora_file(tmp_path)
    with pytest.raises(
        AlreadyMerged, match="lora.safetensors: already merged into these weights; unmerge it first"
    ):
        merge(merge(base, file), file)
    with pytest.raises(NotMerged, match="lora.safetensors: not merged into these weights"):
        unmerge(base, file)
    with pytest.raises(NotMerged):
        unmerge(unmerge(merge(base, file), file), file)


def test_a_weight_of_eight_bits_is_not_merged_into(tmp_path):
    base = checkpoint()
    base[QKV] = base[QKV].to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=f"{QKV}: a weight of type torch.float8_e4m3fn would round the LoRA away"
    ):
        merge(base, lora_file(tmp_path))


def test_keys_without_a_weight_are_listed_and_none_at_all_is_an_error(tmp_path, caplog):
    file = lora_file(tmp_path)
    with caplog.at_level(logging.WARNING):
        merge({QKV: checkpoint()[QKV]}, file)
    assert "lora_unet_conv_in.lora_up.weight" in caplog.text
    with pytest.raises(ValueError, match="no layer of"):
        merge({"other.weight": torch.ones(3, 3)}, file)
    with pytest.raises(
        ValueError, match="made for 24 outputs of 8 weights, but .* has 24 of 6; choose the base"
    ):
        merge({QKV: torch.ones(24, 6)}, file)


def test_dora_is_merged_by_its_formula(tmp_path):
    tensors = {name: t for name, t in lora_tensors().items() if "qkv" in name}
    magnitude = torch.rand(1, 8) + 0.5
    file = lora_file(tmp_path, {**tensors, "lora_unet_blocks_0_attn_qkv.dora_scale": magnitude})
    [layer] = file.layers.values()
    merged = merged_weight(checkpoint()[QKV], layer)
    assert torch.allclose(merged.norm(dim=0), magnitude.flatten(), atol=1e-5)
    half = merged_weight(checkpoint()[QKV], layer, 0.5)
    assert torch.allclose(half, (merged + checkpoint()[QKV]) / 2, atol=1e-6)


def tuned(dtype=torch.float32):
    base, other = checkpoint(), checkpoint(seed=5)
    return base, {key: (weight + 0.1 * other[key]).to(dtype) for key, weight in base.items()}


def test_extracting_at_full_rank_gives_the_whole_difference(tmp_path):
    base, other = tuned()
    rebuilt = merge(base, lora_file(tmp_path, extract(base, other, rank=1000))).weights
    for key in (f"{key}.weight" for key in NAMES):
        assert (rebuilt[key] - other[key]).abs().max() < 1e-5


def test_extracting_by_energy_keeps_that_much_of_every_layer():
    base, other = tuned()
    tensors = extract(base, other, energy=0.9)
    for key, difference in weight_differences(tensors).items():
        total = (other[key] - base[key]).square().sum()
        left = (other[key] - base[key] - difference).square().sum()
        assert left <= 0.1 * total
        rank = tensors[f"{NAMES[key.removesuffix('.weight')]}.lora_down.weight"].shape[0]
        s = torch.linalg.svdvals((other[key] - base[key]).flatten(1)).square()
        assert s[: rank - 1].sum() < 0.9 * total


def test_what_a_lora_cannot_hold_is_listed_when_extracting(caplog):
    base, other = tuned()
    with caplog.at_level(logging.WARNING):
        names = {name.rsplit(".lora", 1)[0] for name in extract(base, other, rank=2) if "lora_up" in name}
    assert names == set(NAMES.values())
    assert "first_stage_model.conv.weight" in caplog.text and "blocks.0.norm.weight" in caplog.text


def test_models_that_cannot_be_compared_are_refused():
    base = checkpoint()
    with pytest.raises(ValueError, match="do not differ"):
        extract(base, dict(base), rank=4)
    with pytest.raises(ValueError, match="no weight in common"):
        extract(base, {"x.weight": torch.ones(2, 2)}, rank=4)
    with pytest.raises(ValueError, match=r"shape \(24, 8\) in the base and \(3, 3\)"):
        extract(base, {**base, QKV: torch.ones(3, 3)}, rank=4)
    for size, message in (({}, "give a rank"), ({"rank": 0}, "at least 1"), ({"energy": 1.5}, "at most 1")):
        with pytest.raises(ValueError, match=message):
            extract(base, tuned()[1], **size)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 9])
def test_resizing_is_the_best_approximation_of_that_rank(tmp_path, rank):
    file = lora_file(tmp_path)
    resized = resize(file, rank=rank)
    for key, found in weight_differences(resized).items():
        whole = weight_differences(lora_tensors())[key]
        u, s, v = torch.linalg.svd(whole.flatten(1), full_matrices=False)
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        assert torch.allclose(found.flatten(1), best, atol=1e-4)
        assert torch.allclose((whole - found).norm(), s[rank:].norm(), atol=1e-4)


def test_resizing_keeps_a_share_of_the_energy(tmp_path):
    resized = resize(lora_file(tmp_path), energy=0.8)
    for key, found in weight_differences(resized).items():
        whole = weight_differences(lora_tensors())[key]
        assert (whole - found).square().sum() <= 0.2 * whole.square().sum()


def test_resizing_makes_a_lora_of_loha_and_lokr(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    tensors = {
        "a.hada_w1_a": draw(12, 2),
        "a.hada_w1_b": draw(2, 6),
        "a.hada_w2_a": draw(12, 2),
        "a.hada_w2_b": draw(2, 6),
        "a.alpha": torch.tensor(1.0),
        "b.lokr_w1": draw(2, 3),
        "b.lokr_w2": draw(4, 5),
    }
    file = lora_file(tmp_path, tensors)
    small = lora_file(tmp_path, resize(file, rank=6), "resized")
    for name in "ab":
        assert small.layers[name].algorithm == "lora"
        assert torch.allclose(small.layers[name].product(), file.layers[name].product(), atol=1e-5)


def test_the_product_of_factors_is_approximated_as_the_matrix_itself():
    up, down = torch.randn(30, 6), torch.randn(6, 20)
    for rank in (1, 3, 6):
        a, b = best_of_product(up, down, rank=rank)
        c, d = best_factors(up @ down, rank=rank)
        assert a.shape == c.shape and torch.allclose(a @ b, c @ d, atol=1e-4)


@pytest.mark.parametrize("layout", ["kohya", "native", "peft"])
def test_a_round_trip_through_every_layout_is_lossless(tmp_path, layout):
    file, base = lora_file(tmp_path), checkpoint()
    there = lora_file(tmp_path, convert(file, layout, weights=base), "there")
    back = convert(there, "kohya", weights=base)
    original = lora_tensors()
    if layout == "peft":  # holds no alpha: it is in the factors, and these are those of a file at strength 1
        differences = weight_differences(back)
        assert all(torch.equal(differences[key], d) for key, d in weight_differences(original).items())
    else:
        assert_equal(back, original)


def test_names_in_every_layout(tmp_path):
    file, base = lora_file(tmp_path), checkpoint()
    native = convert(file, "native", weights=base)
    assert torch.equal(
        native["diffusion_model.blocks.0.attn.qkv.lora_A.weight"],
        lora_tensors()["lora_unet_blocks_0_attn_qkv.lora_down.weight"],
    )
    assert "diffusion_model.blocks.0.attn.qkv.alpha" in native
    peft = convert(file, "peft", weights=base)
    assert "base_model.model.blocks.1.mlp.0.lora_B.weight" in peft and not any(
        "alpha" in name for name in peft
    )


def test_native_names_become_kohyas_without_a_base(tmp_path):
    native = lora_file(tmp_path, convert(lora_file(tmp_path), "native", weights=checkpoint()), "native")
    names = set(convert(native, "kohya"))
    assert "lora_unet_blocks_0_attn_qkv.lora_up.weight" in names


def test_converting_says_what_is_missing(tmp_path):
    file = lora_file(tmp_path)
    with pytest.raises(
        ValueError, match="where the dots were is not written .* give a checkpoint of its base"
    ):
        convert(file, "native")
    with pytest.raises(ValueError, match="choose one of kohya, native, peft"):
        convert(file, "diffuser")
    lokr = lora_file(tmp_path, {"a.lokr_w1": torch.ones(2, 2), "a.lokr_w2": torch.ones(2, 2)}, "lokr")
    with pytest.raises(ValueError, match="PEFT has no place for lokr"):
        convert(lokr, "peft")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_converting_changes_the_number_format_and_keeps_alpha_exact(tmp_path, dtype):
    converted = convert(lora_file(tmp_path), "kohya", dtype=dtype)
    for name, tensor in lora_tensors().items():
        assert torch.equal(converted[name], tensor if name.endswith("alpha") else tensor.to(dtype))


def test_a_report_says_rank_strength_norms_and_base(tmp_path):
    tensors = {**lora_tensors(), "lora_unet_norm.w_norm": torch.ones(3)}
    file = lora_file(tmp_path, tensors, ss_base_model_version="sdxl_base_v1-0")
    report = inspect(file)
    assert (report.layers, report.ranks, report.scales) == (4, {"4": 4}, {"0.5": 4})
    assert report.base == "sdxl_base_v1-0" and report.other == ["lora_unet_norm.w_norm"]
    norm = weight_differences(lora_tensors())[QKV].norm()
    assert report.norms["lora_unet_blocks_0"] == pytest.approx(float(norm), rel=1e-5)
    for part in (
        "rank     4 (4)",
        "0.5 (4)",
        "sdxl_base_v1-0",
        "lora_unet_norm.w_norm",
        "lora_unet_blocks_0",
    ):
        assert part in text(report)


def test_the_commands_work_on_files(tmp_path, capsys):
    base, other = tuned()
    save_file(base, tmp_path / "base.safetensors", {"format": "pt"})
    save_file(other, tmp_path / "tuned.safetensors")
    lora = str(lora_path(tmp_path))
    at = {
        name: str(tmp_path / f"{name}.safetensors")
        for name in ("base", "tuned", "out", "small", "peft", "merged")
    }
    assert main(["extract", at["base"], at["tuned"], "-o", at["out"], "--rank", "3", "--dtype", "fp32"]) == 0
    assert read_lora(tmp_path / "out.safetensors").layers["lora_unet_conv_in"].rank == 3
    assert main(["resize", lora, "-o", at["small"], "--rank", "2"]) == 0
    assert read_lora(tmp_path / "small.safetensors").layers["lora_unet_conv_in"].rank == 2
    assert main(["convert", lora, "-o", at["peft"], "--layout", "peft", "--base", at["base"]]) == 0
    assert main(["merge", at["base"], lora, "-o", at["merged"]]) == 0
    assert_equal(load_file(at["merged"]), dict(merge(base, read_lora(tmp_path / "lora.safetensors")).weights))
    with safe_open(at["merged"], "pt") as merged:
        assert merged.metadata()["format"] == "pt"
    assert main(["merge", at["merged"], lora, "-o", at["out"]]) == 2
    assert "already merged into merged.safetensors" in capsys.readouterr().err
    assert main(["inspect", lora, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 4


def test_a_command_on_a_broken_file_is_one_line(tmp_path, capsys):
    (tmp_path / "x.safetensors").write_bytes(b"no")
    assert main(["inspect", str(tmp_path / "x.safetensors")]) == 2
    assert capsys.readouterr().err.startswith("graft inspect: x.safetensors: no safetensors file")
