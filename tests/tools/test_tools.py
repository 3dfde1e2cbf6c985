"""What merge, extract, resize, convert and inspect compute, and what they refuse."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.training.adapters.oft import OFT
from graft.training.tools.convert import convert
from graft.training.tools.extract import extract
from graft.training.tools.inspect import inspect, text
from graft.training.tools.low_rank import best_factors, best_of_product
from graft.training.tools.merge import METADATA, AlreadyMerged, merge_files, merge_weight
from graft.training.tools.resize import resize

from ..support.lora_files import (
    NAMES,
    PREFIX,
    checkpoint,
    lora_file,
    lora_path,
    lora_tensors,
    weight_differences,
)

QKV = f"{PREFIX}blocks.0.attn.qkv.weight"


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def saved(folder, weights, name="base", metadata=None):
    path = folder / f"{name}.safetensors"
    save_file(weights, path, metadata)
    return path


def merged_with(folder, weights, lora, strength=1.0):
    """The weights of the checkpoint that merging writes, and the report."""
    output = folder / "merged.safetensors"
    report = merge_files(saved(folder, weights), [(lora, strength)], output)
    return load_file(output), report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merging_adds_the_difference_and_touches_nothing_else(tmp_path, dtype):
    base = {key: weight.to(dtype) for key, weight in checkpoint().items()}
    differences = weight_differences(lora_tensors())
    merged, _ = merged_with(tmp_path, base, lora_path(tmp_path), 0.5)
    assert merged.keys() == base.keys()
    for key, weight in base.items():
        expected = weight.float() + 0.5 * differences[key] if key in differences else weight
        assert torch.allclose(merged[key], expected.to(dtype), atol=1e-6)
        assert key in differences or torch.equal(merged[key], weight)


@pytest.mark.parametrize(
    ("stored", "prefix"),
    [("cond_stage_model.", "lora_te_"), ("conditioner.embedders.0.", "lora_te1_")],
)
def test_an_extracted_text_encoder_is_called_as_its_model_calls_it(stored, prefix):
    key = f"{stored}transformer.text_model.encoder.layers.0.mlp.fc1.weight"
    tensors, _ = extract({key: torch.zeros(4, 4)}, {key: torch.eye(4)}, rank=2)
    assert all(name.startswith(f"{prefix}text_model_encoder_layers_0_mlp_fc1.") for name in tensors)


def test_several_loras_are_merged_in_one_go(tmp_path):
    first, second = lora_path(tmp_path), lora_path(tmp_path, lora_tensors(seed=2), "second")
    base, output = checkpoint(), tmp_path / "out.safetensors"
    merge_files(saved(tmp_path, base), [(first, 1.0), (second, -0.5)], output)
    a, b = weight_differences(lora_tensors()), weight_differences(lora_tensors(seed=2))
    assert torch.allclose(load_file(output)[QKV], base[QKV] + a[QKV] - 0.5 * b[QKV], atol=1e-5)


def test_a_checkpoint_remembers_what_was_merged_into_it(tmp_path):
    base, lora, once = saved(tmp_path, checkpoint()), lora_path(tmp_path), tmp_path / "once.safetensors"
    merge_files(base, [(lora, 1.0)], once)
    renamed = lora_path(tmp_path, name="renamed")
    with pytest.raises(AlreadyMerged, match="renamed.safetensors: already merged into once.safetensors"):
        merge_files(once, [(renamed, 1.0)], tmp_path / "twice.safetensors")
    with pytest.raises(AlreadyMerged, match="already merged"):
        merge_files(base, [(lora, 1.0), (renamed, 1.0)], tmp_path / "twice.safetensors")
    assert not (tmp_path / "twice.safetensors").exists()


@pytest.mark.parametrize("history", ["[" * 100_000, "[{", "{}", "[1]", '[{"file": "a"}]', "null"])
def test_a_checkpoint_with_an_unreadable_merge_history_is_refused_by_name(tmp_path, history):
    base = tmp_path / "base.safetensors"
    save_file(checkpoint(), base, {METADATA: history})
    with pytest.raises(ValueError, match=f"base.safetensors: {METADATA} in its metadata should list"):
        merge_files(base, [(lora_path(tmp_path), 1.0)], tmp_path / "merged.safetensors")
    assert not (tmp_path / "merged.safetensors").exists()


def test_a_weight_of_eight_bits_is_not_merged_into(tmp_path):
    base = checkpoint()
    base[QKV] = base[QKV].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=f"{QKV}: a weight of type torch.float8_e4m3fn would round"):
        merged_with(tmp_path, base, lora_path(tmp_path))
    assert not (tmp_path / "merged.safetensors").exists()


def test_keys_without_a_weight_are_listed_and_none_at_all_is_an_error(tmp_path):
    lora = lora_path(tmp_path)
    _, report = merged_with(tmp_path, {QKV: checkpoint()[QKV]}, lora)
    assert "lora_unet_conv_in.lora_up.weight" in report
    with pytest.raises(ValueError, match="no layer of the base has a name"):
        merged_with(tmp_path, {"other.weight": torch.ones(3, 3)}, lora)
    with pytest.raises(ValueError, match="for 24 outputs of 8 weights, but .* has 24 of 6; choose the base"):
        merged_with(tmp_path, {QKV: torch.ones(24, 6)}, lora)


def test_openclip_weights_of_a_checkpoint_are_found_by_their_kohya_names(tmp_path):
    layer = "conditioner.embedders.1.model.transformer.resblocks.3."
    shapes = {"attn.in_proj_weight": (24, 8), "mlp.c_fc.weight": (12, 8)}
    base = {layer + name: torch.randn(shape) for name, shape in shapes.items()}
    tensors, down = {}, torch.randn(2, 8)
    for name, rows in (("self_attn_k_proj", 8), ("mlp_fc1", 12)):
        tensors[f"lora_te2_text_model_encoder_layers_3_{name}.lora_up.weight"] = torch.ones(rows, 2)
        tensors[f"lora_te2_text_model_encoder_layers_3_{name}.lora_down.weight"] = down.clone()
    merged, report = merged_with(tmp_path, base, lora_path(tmp_path, tensors))
    moved = {key: merged[key] - base[key] for key in base}
    expected = torch.ones(24, 2) @ down
    assert "left out" not in report
    assert torch.allclose(moved[f"{layer}attn.in_proj_weight"][8:16], expected[:8], atol=1e-6)
    others = (*moved[f"{layer}attn.in_proj_weight"][:8], *moved[f"{layer}attn.in_proj_weight"][16:])
    assert not any(row.any() for row in others)
    assert torch.allclose(moved[f"{layer}mlp.c_fc.weight"], expected[:12], atol=1e-6)


@pytest.mark.feature(106)
def test_merging_holds_one_weight_at_a_time(tmp_path):
    base = {f"blocks.{n}.weight": torch.full((256, 1024), float(n)) for n in range(16)}  # 1 MB each
    tensors = {}
    for n in range(8):
        tensors[f"blocks.{n}.lora_up.weight"] = torch.ones(256, 1)
        tensors[f"blocks.{n}.lora_down.weight"] = torch.ones(1, 1024)
    path, lora = saved(tmp_path, base), lora_path(tmp_path, tensors)
    tracemalloc.start()
    try:
        merge_files(path, [(lora, 1.0)], tmp_path / "merged.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert (load_file(tmp_path / "merged.safetensors")["blocks.7.weight"] == 8).all()


def test_dora_is_merged_by_its_formula(tmp_path):
    tensors = {name: t for name, t in lora_tensors().items() if "qkv" in name}
    magnitude = torch.rand(1, 8) + 0.5
    file = lora_file(tmp_path, {**tensors, "lora_unet_blocks_0_attn_qkv.dora_scale": magnitude})
    [layer] = file.layers.values()
    merged = merge_weight(checkpoint()[QKV], layer)
    assert torch.allclose(merged.norm(dim=0), magnitude.flatten(), atol=1e-5)
    half = merge_weight(checkpoint()[QKV], layer, 0.5)
    assert torch.allclose(half, (merged + checkpoint()[QKV]) / 2, atol=1e-6)


def tuned(dtype=torch.float32):
    base, other = checkpoint(), checkpoint(seed=5)
    return base, {key: (weight + 0.1 * other[key]).to(dtype) for key, weight in base.items()}


def test_extracting_at_full_rank_gives_the_whole_difference(tmp_path):
    base, other = tuned()
    lora = lora_path(tmp_path, extract(base, other, rank=1000)[0])
    rebuilt, _ = merged_with(tmp_path, base, lora)
    for key in (f"{key}.weight" for key in NAMES):
        assert (rebuilt[key] - other[key]).abs().max() < 1e-5


def test_extracting_by_energy_keeps_that_much_of_every_layer():
    base, other = tuned()
    tensors, _ = extract(base, other, energy=0.9)
    for key, difference in weight_differences(tensors).items():
        total = (other[key] - base[key]).square().sum()
        left = (other[key] - base[key] - difference).square().sum()
        assert left <= 0.1 * total
        rank = tensors[f"{NAMES[key.removesuffix('.weight')]}.lora_down.weight"].shape[0]
        s = torch.linalg.svdvals((other[key] - base[key]).flatten(1)).square()
        assert s[: rank - 1].sum() < 0.9 * total


def test_what_a_lora_cannot_hold_is_listed_when_extracting():
    tensors, left_out = extract(*tuned(), rank=2)
    assert {name.rsplit(".lora", 1)[0] for name in tensors if "lora_up" in name} == set(NAMES.values())
    assert set(left_out) == {"first_stage_model.conv.weight", f"{PREFIX}blocks.0.norm.weight"}


def test_a_fused_openclip_layer_is_extracted_part_by_part():
    key = "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight"
    base, moved = {key: torch.randn(24, 8)}, torch.zeros(24, 8)
    moved[16:] = torch.randn(8, 8)
    tensors, _ = extract(base, {key: base[key] + moved}, rank=8)
    name = "lora_te2_text_model_encoder_layers_0_self_attn_v_proj"
    assert {key.split(".")[0] for key in tensors} == {name}
    product = tensors[f"{name}.lora_up.weight"] @ tensors[f"{name}.lora_down.weight"]
    assert torch.allclose(product, moved[16:], atol=1e-5)


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
    small = lora_file(tmp_path, resize(file, rank=8), "resized")  # a Kronecker product has the ranks' product
    for name in "ab":
        assert small.layers[name].algorithm == "lora"
        assert torch.allclose(small.layers[name].product(), file.layers[name].product(), atol=1e-5)


def test_resizing_keeps_the_suffixes_that_go_with_the_names(tmp_path):
    for name, suffixes in (("lora_unet_a", ("alpha", "lora_down.weight", "lora_up.weight")), ("a.b", PEFT)):
        tensors = {f"{name}.lora_A.weight": torch.ones(2, 8), f"{name}.lora_B.weight": torch.ones(8, 2)}
        assert sorted(resize(lora_file(tmp_path, tensors), rank=1)) == [f"{name}.{s}" for s in suffixes]


PEFT = ("lora_A.weight", "lora_B.weight")


def test_the_product_of_factors_is_approximated_as_the_matrix_itself():
    up, down = torch.randn(30, 6), torch.randn(6, 20)
    for rank in (1, 3, 6):
        a, b = best_of_product(up, down, rank=rank)
        c, d = best_factors(up @ down, rank=rank)
        assert a.shape == c.shape and torch.allclose(a @ b, c @ d, atol=1e-4)


def shapes(weights):
    return {key: tuple(weight.shape) for key, weight in weights.items()}


@pytest.mark.parametrize("with_base", [True, False])
@pytest.mark.parametrize("layout", ["kohya", "native", "peft"])
def test_a_round_trip_through_every_layout_is_lossless(tmp_path, layout, with_base):
    file, base = lora_file(tmp_path), shapes(checkpoint())
    there = lora_file(tmp_path, convert(file, layout, shapes=base), "there")
    back = convert(there, "kohya", shapes=base if with_base else None)
    original = lora_tensors()
    if layout != "kohya":  # they hold no alpha: it is in the factors, which are those of a file at strength 1
        differences = weight_differences(back)
        assert all(torch.equal(differences[key], d) for key, d in weight_differences(original).items())
    else:
        assert_equal(back, original)


SD3 = {
    "joint_blocks.0.x_block.attn.qkv": (96, 32),
    "joint_blocks.0.context_block.attn.proj": (32, 32),
    "joint_blocks.0.x_block.mlp.fc1": (128, 32),
    "final_layer.adaLN_modulation.1": (64, 32),
}
FLUX = {
    "double_blocks.0.img_attn.qkv": (96, 32),
    "single_blocks.0.linear1": (96 + 128, 32),
    "single_blocks.0.linear2": (32, 160),
}
UNET = {
    "input_blocks.1.1.transformer_blocks.0.attn1.to_q": (32, 32),
    "middle_block.0.in_layers.2": (32, 32, 3, 3),
}


@pytest.mark.parametrize("network", [SD3, FLUX, UNET], ids=["sd3", "flux", "unet"])
def test_a_round_trip_through_diffusers_is_lossless(tmp_path, network):
    base = {f"model.diffusion_model.{path}.weight": shape for path, shape in network.items()}
    tensors = {}
    for path, shape in network.items():
        name = f"lora_unet_{path.replace('.', '_')}"
        tensors[f"{name}.lora_down.weight"] = torch.randn(4, *shape[1:])
        tensors[f"{name}.lora_up.weight"] = torch.randn(shape[0], 4, *(1,) * len(shape[2:]))
        tensors[f"{name}.alpha"] = torch.tensor(2.0)
    file = lora_file(tmp_path, tensors)
    diffusers = convert(file, "diffusers", shapes=base)
    assert all(key.startswith(("transformer.", "unet.")) for key in diffusers)
    back = lora_file(tmp_path, convert(lora_file(tmp_path, diffusers, "d"), "kohya", shapes=base), "back")
    assert back.layers.keys() == file.layers.keys()
    for name, layer in file.layers.items():
        assert torch.equal(back.layers[name].product(), layer.product()), name


def test_names_in_every_layout(tmp_path):
    file, base = lora_file(tmp_path), shapes(checkpoint())
    native = convert(file, "native", shapes=base)
    assert torch.equal(
        native["diffusion_model.blocks.0.attn.qkv.lora_A.weight"],
        lora_tensors()["lora_unet_blocks_0_attn_qkv.lora_down.weight"],
    )
    assert not any("alpha" in name for name in native)  # as ai-toolkit: for diffusers to read it as well
    fc1 = "text_model.encoder.layers.0.mlp.fc1"
    assert f"text_encoders.clip_l.transformer.{fc1}.lora_A.weight" in native
    peft = convert(file, "peft", shapes=base)
    assert "base_model.model.blocks.1.mlp.0.lora_B.weight" in peft
    assert f"text_encoder.{fc1}.lora_B.weight" in peft and not any("alpha" in name for name in peft)


def test_the_text_encoder_of_sd1_keeps_its_own_kohya_name(tmp_path):
    layer = "text_model.encoder.layers.0.mlp.fc1"
    tensors = {f"text_encoder.{layer}.lora_{side}.weight": torch.ones(3, 3) for side in "AB"}
    file, sd1 = lora_file(tmp_path, tensors), {f"cond_stage_model.transformer.{layer}.weight": (3, 3)}
    for base, prefix in ((sd1, "lora_te_"), (None, "lora_te1_")):
        assert f"{prefix}{layer.replace('.', '_')}.alpha" in convert(file, "kohya", shapes=base)


def test_converting_says_what_is_missing(tmp_path):
    file, base = lora_file(tmp_path), shapes(checkpoint())
    for layout in ("native", "peft", "diffusers"):
        with pytest.raises(ValueError, match="give a checkpoint of (its|the) base"):
            convert(file, layout)
    with pytest.raises(ValueError, match="does not know what diffusers calls the layers"):
        convert(file, "diffusers", shapes=base)
    with pytest.raises(ValueError, match="choose one of kohya, native, peft, diffusers"):
        convert(file, "diffuser")
    lokr = lora_file(tmp_path, {"a.lokr_w1": torch.ones(2, 2), "a.lokr_w2": torch.ones(2, 2)}, "lokr")
    with pytest.raises(ValueError, match="peft has no place for lokr"):
        convert(lokr, "peft")
    with pytest.raises(ValueError, match="the base has no layer for lora_unet_conv_in.alpha"):
        convert(file, "native", shapes={key: shape for key, shape in base.items() if "conv_in" not in key})
    with pytest.raises(ValueError, match="made for 24 outputs of 8 weights, but .* has 24 of 9"):
        convert(file, "native", shapes={**base, QKV: (24, 9)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_converting_changes_the_number_format_and_keeps_alpha_exact(tmp_path, dtype):
    converted = convert(lora_file(tmp_path), "kohya", dtype=dtype)
    for name, tensor in lora_tensors().items():
        assert torch.equal(converted[name], tensor if name.endswith("alpha") else tensor.to(dtype))


def test_a_report_says_rank_strength_norms_and_base(tmp_path):
    tensors = {**lora_tensors(), "lora_unet_norm.w_norm": torch.ones(3)}
    file = lora_file(tmp_path, tensors, ss_base_model_version="sdxl_base_v1-0")
    report = inspect(file)
    assert (report.layers, report.ranks, report.scales) == (5, {"4": 4}, {"0.5": 4})
    assert report.algorithms == {"lora": 4, "whole difference": 1} and not report.other
    assert report.base == "sdxl_base_v1-0"
    norm = weight_differences(lora_tensors())[QKV].norm()
    assert report.norms["lora_unet_blocks_0"] == pytest.approx(float(norm), rel=1e-5)
    for part in (
        "rank     4 (4)",
        "0.5 (4)",
        "sdxl_base_v1-0",
        "whole difference (1)",
        "lora_unet_norm",
        "lora_unet_blocks_0",
    ):
        assert part in text(report)


@pytest.mark.parametrize(
    ("name", "width", "base"),
    [
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", 64, "SD3"),
        ("transformer.single_transformer_blocks.0.attn.to_q", 64, "Flux"),
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", 2048, "SDXL"),
        ("unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_v", 768, "SD1.5"),
        ("something_else", 8, "not stated"),
    ],
)
def test_a_base_that_is_not_stated_is_guessed_from_the_layers(tmp_path, name, width, base):
    tensors = {f"{name}.lora_up.weight": torch.ones(4, 2), f"{name}.lora_down.weight": torch.ones(2, width)}
    report = inspect(lora_file(tmp_path, tensors))
    assert report.base.startswith(base) and "not stated" in report.base


def test_a_large_matrix_is_approximated_nearly_as_well_as_can_be():
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(320, 320, generator=generator))[0] for _ in range(2))
    s = torch.arange(1, 321) ** -0.5
    matrix = u @ torch.diag(s) @ v
    up, down = best_factors(matrix, rank=16)
    assert up.shape == (320, 16) and down.shape == (16, 320)
    assert (matrix - up @ down).norm() < 1.0001 * s[16:].norm()


@pytest.mark.parametrize("strength", [float("nan"), float("inf"), float("-inf")])
def test_a_strength_that_is_no_number_is_refused(tmp_path, strength):
    with pytest.raises(ValueError, match=r"strength: -?(nan|inf) is not a finite number; 1 is as"):
        merged_with(tmp_path, checkpoint(), lora_path(tmp_path), strength)
    assert not (tmp_path / "merged.safetensors").exists()


def test_a_result_too_large_for_the_weights_is_refused(tmp_path):
    base = {key: weight.half() for key, weight in checkpoint().items()}
    with pytest.raises(ValueError, match=r"the result is too large for torch.float16; merge at a lower"):
        merged_with(tmp_path, base, lora_path(tmp_path), 1e6)
    assert not (tmp_path / "merged.safetensors").exists()


def test_models_with_values_that_are_no_numbers_are_not_extracted():
    base, other = tuned()
    other[QKV][0, 0] = float("nan")
    with pytest.raises(ValueError, match=f"{QKV}: holds infinite or NaN values in one of the models"):
        extract(base, other, rank=2)


BLOCKS = {"oft_blocks": (8, 3, 3), "rescale": (24, 1)}
MIXED = {
    **{key: value for key, value in lora_tensors().items() if "conv_in" in key},
    **{f"lora_unet_blocks_0_attn_qkv.{suffix}": torch.zeros(shape) for suffix, shape in BLOCKS.items()},
}


def test_a_file_of_several_methods_loses_none_of_them_unsaid(tmp_path):
    file, base = lora_file(tmp_path, MIXED), checkpoint()
    assert inspect(file).algorithms == {"lora": 1, "OFT with rescale": 1}
    with pytest.raises(
        ValueError, match=r"1 of 2 layers cannot be merged.*1 of OFT with rescale .lora_unet_blocks_0_attn"
    ):
        merged_with(tmp_path, base, lora_path(tmp_path, MIXED))
    resized = resize(file, rank=1)
    assert torch.equal(resized["lora_unet_blocks_0_attn_qkv.oft_blocks"], torch.zeros(8, 3, 3))
    native = convert(file, "native", shapes=shapes(base))
    assert "diffusion_model.blocks.0.attn.qkv.oft_blocks" in native
    with pytest.raises(
        ValueError, match="attn_qkv: peft has no place for OFT with rescale; choose kohya or native"
    ):
        convert(file, "peft", shapes=shapes(base))
    with pytest.raises(ValueError, match="nothing in it has a rank to lower; it holds OFT with rescale"):
        resize(lora_file(tmp_path, {k: t for k, t in MIXED.items() if "qkv" in k}, "oft"), rank=1)


def test_what_multiplies_the_base_is_merged_and_converted_and_not_resized(tmp_path):
    name, blocks = "lora_unet_blocks_0_attn_qkv", torch.randn(8, 3, 3)
    tensors = {f"{name}.oft_blocks": blocks, f"{name}.alpha": torch.tensor(0.0)}
    file, base = lora_file(tmp_path, tensors), checkpoint()
    assert inspect(file).algorithms == {"oft": 1} and inspect(file).ranks == {"3": 1}
    assert inspect(file).norms == {}
    merged, _ = merged_with(tmp_path, base, lora_path(tmp_path, tensors))
    change = OFT.change({"blocks": blocks}, base[QKV])
    assert torch.allclose(merged[QKV], base[QKV] + change, atol=1e-5) and change.norm() > 1
    without_alpha = lora_file(tmp_path, {f"{name}.oft_blocks": blocks}, "bare")
    converted = convert(without_alpha, "kohya", shapes=shapes(base))
    assert list(converted) == [f"{name}.oft_blocks"]  # an alpha would be a constraint
    with pytest.raises(ValueError, match="it holds oft. Merge it into its base, and extract a LoRA from"):
        resize(file, rank=1)
    wrong = lora_path(tmp_path, {f"{name}.oft_blocks": torch.zeros(4, 3, 3)})
    with pytest.raises(ValueError, match="made for 12 outputs"):
        merged_with(tmp_path, base, wrong)


def test_a_merge_says_how_much_of_the_difference_found_no_place(tmp_path):
    half = {key: weight for key, weight in checkpoint().items() if "conv_in" not in key}
    _, report = merged_with(tmp_path, half, lora_path(tmp_path))
    differences = weight_differences(lora_tensors())
    total = sum(float(d.square().sum()) for d in differences.values())
    lost = float(differences[f"{PREFIX}conv_in.weight"].square().sum())
    assert f"That is {(lost / total) ** 0.5:.1%} of its difference, by norm." in report


def test_a_difference_of_another_shape_is_refused_by_name(tmp_path):
    tensors = {"lora_unet_blocks_0_attn_qkv.diff": torch.ones(24, 9)}
    with pytest.raises(ValueError, match=r"attn_qkv.diff: shape \(24, 9\), but .* has \(24, 8\); choose"):
        merged_with(tmp_path, checkpoint(), lora_path(tmp_path, tensors))


@pytest.mark.parametrize(
    "name",
    [
        "lora_transformer_transformer_blocks_0_attn_to_q",
        "lycoris_transformer_blocks_0_attn_to_q",
        "lycoris_single_transformer_blocks_3_proj_mlp",
        "lora_transformer_x_embedder",
        "transformer.transformer_blocks.0.attn.to_q",
        "diffusion_model.layers.0.attention.to_q",
        "diffusion_model.single_blocks.0.linear1_qkv",
        "lycoris_layers_0_attention_to_out_0",
    ],
)
def test_a_name_that_only_the_base_explains_is_not_converted_without_it(tmp_path, name):
    tensors = {f"{name}.lora_up.weight": torch.ones(4, 2), f"{name}.lora_down.weight": torch.ones(2, 4)}
    for layout in ("kohya", "native"):
        with pytest.raises(
            ValueError, match=r"does not tell which layer of the model it is; give a checkpoint of its base"
        ):
            convert(lora_file(tmp_path, tensors), layout)


@pytest.mark.parametrize(
    ("name", "kohya"),
    [
        ("lora_unet_transformer_blocks_0_attn_to_q", "lora_unet_transformer_blocks_0_attn_to_q"),
        ("diffusion_model.double_blocks.0.img_attn.qkv", "lora_unet_double_blocks_0_img_attn_qkv"),
        ("lycoris_down_blocks_0_resnets_0_conv1", "lora_unet_down_blocks_0_resnets_0_conv1"),
        (
            "unet.mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_out",
            "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_out_0",
        ),
    ],
)
def test_a_name_that_explains_itself_is_converted_to_one_that_comfyui_knows(tmp_path, name, kohya):
    tensors = {f"{name}.lora_up.weight": torch.ones(4, 2), f"{name}.lora_down.weight": torch.ones(2, 4)}
    assert {key.split(".")[0] for key in convert(lora_file(tmp_path, tensors), "kohya")} == {kohya}


def test_a_base_stored_in_diffusers_names_names_no_layer_for_comfyui(tmp_path):
    name = "single_transformer_blocks.0.attn.to_q"
    tensors = {f"transformer.{name}.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    with pytest.raises(
        ValueError, match="the base is stored under diffusers' names; give one under ComfyUI's"
    ):
        convert(lora_file(tmp_path, tensors), "kohya", shapes={f"{name}.weight": (4, 4)})


def test_lycoris_scalar_is_ignored_as_comfyui_does_and_that_is_said(tmp_path):
    tensors = {**lora_tensors(), "lora_unet_conv_in.scalar": torch.tensor(3.0)}
    plain, _ = merged_with(tmp_path, checkpoint(), lora_path(tmp_path))
    scaled, report = merged_with(tmp_path, checkpoint(), lora_path(tmp_path, tensors))
    assert_equal(plain, scaled)
    assert "1 keys are ignored by ComfyUI, so here too, and were left out:\n  lora_unet_conv_in" in report
    assert "lora_unet_conv_in.scalar" not in convert(lora_file(tmp_path, tensors), "kohya")
