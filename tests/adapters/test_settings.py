"""What AdapterConfig says is what is built: patterns, blocks, learning rates, limits, dropout, and what is
refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from graft.tests.support.tiny import FAMILY, TinyDenoiser
from graft.training.adapters.build import (
    attach,
    build_adapters,
    draws,
    ineffective_patterns,
    initialize,
    limit_norms,
    lr_scales,
    named_parameters,
    restore_adapters,
    select,
)
from graft.training.adapters.dora import apply_magnitude
from graft.training.adapters.dropout import Draw
from graft.training.adapters.glora import GLoRA
from graft.training.adapters.lokr import LoKr
from graft.training.adapters.oft import OFT
from graft.training.adapters.strength import apply_strength, at_strength
from graft.training.config import AdapterConfig, from_dict, to_dict
from graft.training.family import TEXT, is_text
from graft.training.frozen_base.frozen_layer import LayerSpec
from graft.training.loop import initial_state

from ..support.adapter_cases import adapter_config, case, fresh_state, train_config, trained_case

SPECS = TinyDenoiser().specs


def chosen(**settings):
    return list(select(SPECS, FAMILY, AdapterConfig(targets="linear", **settings)))


def built(**settings):
    config = AdapterConfig(targets="linear", rank=4, **settings)
    return build_adapters(select(SPECS, FAMILY, config), config), config


def test_the_defaults_are_a_plain_lora_at_strength_one():
    adapters, _ = built()
    assert {type(adapter).__name__ for adapter in adapters.values()} == {"LoRA"}
    assert all(adapter.scale == 1.0 for adapter in adapters.values())


def test_a_config_survives_json_with_all_its_patterns():
    config = AdapterConfig(
        ranks=(("*.mlp", 8),), lrs=(("re:blocks[.]0.*", 0.5),), algorithms=(("*.mlp", "loha"),)
    )
    assert from_dict(AdapterConfig, json.loads(json.dumps(to_dict(config)))) == config
    assert hash(config) == hash(from_dict(AdapterConfig, to_dict(config)))


def test_the_first_pattern_that_matches_decides_rank_alpha_and_algorithm():
    adapters, _ = built(
        ranks=(("blocks.0.*", 2), ("*", 6)), alphas=(("*.mlp", 3.0),), algorithms=(("blocks.1.mlp", "loha"),)
    )
    assert adapters["blocks.0.mlp"].down.shape[0] == 2
    assert adapters["blocks.1.attn_qkv"].down.shape[0] == 6
    assert adapters["blocks.0.mlp"].scale == 1.5
    assert adapters["blocks.1.attn_qkv"].scale == 1.0
    assert type(adapters["blocks.1.mlp"]).__name__ == "LoHa"


@pytest.mark.feature(39)
@pytest.mark.parametrize(
    ("ranges", "blocks"),
    [
        ("0", {"0"}),
        ("1-", {"1"}),
        ("0-1", {"0", "1"}),
        ("0, 1", {"0", "1"}),
        ("late", {"1"}),
        ("early,late", {"0", "1"}),
    ],
)
def test_block_ranges_choose_whole_blocks(ranges, blocks):
    names = chosen(blocks=ranges)
    assert {name.split(".")[1] for name in names} == blocks
    assert all(name.startswith("blocks.") for name in names)


@pytest.mark.parametrize(
    ("ranges", "message"), [("2", "2 blocks, 0 to 1"), ("x", "write for instance"), ("1-0", "2 blocks")]
)
def test_block_ranges_that_do_not_exist_are_refused(ranges, message):
    with pytest.raises(ValueError, match=message):
        chosen(blocks=ranges)


def test_patterns_may_be_regular_expressions():
    assert chosen(include=("re:blocks\\.[01]\\.mlp",)) == ["blocks.0.mlp", "blocks.1.mlp"]
    with pytest.raises(ValueError, match="not a regular expression"):
        chosen(include=("re:(",))


def test_a_preset_that_the_family_lacks_is_refused_with_those_it_has():
    with pytest.raises(ValueError, match="tiny has no preset 'mlp'; choose one of attn, attn-mlp"):
        select(SPECS, FAMILY, AdapterConfig(targets="mlp"))


def test_where_no_layer_is_left_a_few_are_named_from_all_over_the_network():
    specs = {f"blocks.{i}.mlp": SPECS["blocks.0.mlp"] for i in range(20)}
    with pytest.raises(
        ValueError, match=r"the 20 layers\..* named like (blocks\.\d+\.mlp, ){7}blocks\.14\.mlp\.$"
    ):
        select(specs, FAMILY, AdapterConfig(targets="linear", exclude=("*",)))


def test_layers_of_text_encoders_are_chosen_by_their_own_setting_and_no_preset():
    specs = {**SPECS, f"{TEXT}clip_l.transformer.mlp": SPECS["blocks.0.mlp"]}
    plain = AdapterConfig(targets="linear")
    both = dataclasses.replace(plain, text_encoder=0.5, include=("blocks.1.*",))
    assert select(specs, FAMILY, plain).keys() == select(SPECS, FAMILY, plain).keys()
    chosen = set(select(specs, FAMILY, both))
    assert {name for name in chosen if is_text(name)} == specs.keys() - SPECS.keys()
    assert {name for name in chosen if not is_text(name)} == {"blocks.1.attn_qkv", "blocks.1.mlp"}


def test_every_pattern_that_does_nothing_is_told_with_its_setting():
    rules = {"ranks": (("blocks.9.*", 2), ("*", 4)), "lrs": (("conv_in", 0.5),)}
    config = AdapterConfig(targets="linear", exclude=("norm",), **rules)
    reported = [note.split(" matches no layer")[0] for note in ineffective_patterns(SPECS, FAMILY, config)]
    assert reported == ["exclude: 'norm'", "ranks: 'blocks.9.*'", "learning rates: 'conv_in'"]
    started = dataclasses.replace(config, start_from="a.safetensors")  # which may train any layer
    assert len(ineffective_patterns(SPECS, FAMILY, started)) == 2


def test_tucker_is_told_to_do_nothing_where_no_kernel_can_be_decomposed():
    linear = AdapterConfig(targets="linear", tucker=True)
    [note] = ineffective_patterns(SPECS, FAMILY, linear)
    assert note.startswith("tucker True has no effect: no trained layer")
    assert not ineffective_patterns(SPECS, FAMILY, dataclasses.replace(linear, targets="all"))


@pytest.mark.feature(40)
def test_learning_rates_follow_patterns_and_the_lora_plus_ratio():
    adapters, config = built(lrs=(("blocks.0.*", 0.5),), lora_plus_ratio=16.0)
    scales = lr_scales(adapters, config)
    assert scales["blocks.0.mlp.down"] == 0.5 and scales["blocks.0.mlp.up"] == 8.0
    assert scales["blocks.1.mlp.down"] == 1.0 and scales["blocks.1.mlp.up"] == 16.0
    assert scales.keys() == named_parameters(adapters).keys()


def test_the_lora_plus_ratio_holds_for_what_starts_from_the_base():
    scales = lr_scales(*built(init="pissa", lora_plus_ratio=16.0))
    assert scales["blocks.0.mlp.down"] == 1.0 and scales["blocks.0.mlp.up"] == 16.0


def test_every_learning_rate_is_plain_by_default():
    assert set(lr_scales(*built()).values()) == {1.0}


@pytest.mark.parametrize("method", ["lora", "lora-tucker", "dora", "loha", "lokr", "lokr-both", "lokr-full"])
def test_norms_are_limited_and_smaller_ones_left_alone(method):
    _, adapter, _ = trained_case(method, "conv2d", max_norm=0.5)
    assert adapter.product().norm() > 0.5
    assert limit_norms({"a": adapter}, adapter.config) == 1
    assert adapter.product().norm().item() == pytest.approx(0.5, rel=1e-5)
    before = {name: p.clone() for name, p in adapter.named_parameters()}
    assert limit_norms({"a": adapter}, adapter_config(method, max_norm=0.6)) == 0
    assert all(torch.equal(before[name], p) for name, p in adapter.named_parameters())


def test_a_state_restores_every_parameter_of_every_method():
    for method in ("pissa", "dora", "loha", "lokr-both"):
        denoiser = TinyDenoiser()
        state = fresh_state(denoiser, train_config(adapter_config(method)))
        adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, torch.device("cpu"))
        assert all(torch.equal(state.weights[name], p) for name, p in named_parameters(adapters).items())


def test_a_state_of_another_model_is_refused_by_the_layer():
    denoiser, cpu = TinyDenoiser(), torch.device("cpu")
    state = fresh_state(denoiser, train_config(adapter_config("lora")))
    specs = {path: spec for path, spec in denoiser.specs.items() if path != "blocks.1.mlp"}
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp: the base model has no such layer"):
        restore_adapters(specs, state.adapter, state.weights, cpu)
    name = "blocks.1.mlp.down"
    other = {**state.weights, name: torch.zeros(3, 8)}
    with pytest.raises(ValueError, match=r"mlp\.down: expected a tensor of shape \(3, 32\), found \(3, 8\)"):
        restore_adapters(denoiser.specs, state.adapter, other, cpu)
    del other[name]
    with pytest.raises(ValueError, match=r"expected a tensor of shape \(3, 32\), found nothing"):
        restore_adapters(denoiser.specs, state.adapter, other, cpu)


def test_an_adapter_is_attached_to_no_layer_of_another_shape():
    layer, adapter, _ = case("lora", "linear")
    with pytest.raises(ValueError, match=r"shape \(24, 16\), which does not exist in this base"):
        attach({}, {layer.name: adapter}).__enter__()
    conv, _, _ = case("lora", "conv1d")
    with pytest.raises(ValueError, match=r"shape \(24, 16\), which has shape \(24, 16, 3\) in this base"):
        attach({layer.name: conv}, {layer.name: adapter}).__enter__()


def test_a_method_that_starts_from_the_base_is_given_it_beside_one_that_does_not():
    config = adapter_config("lora", algorithms=(("blocks.0.mlp", "dora"),))
    state = initial_state(TinyDenoiser(), train_config(config))
    expected = TinyDenoiser().module.blocks[0].mlp.weight.norm(dim=0, keepdim=True)
    assert torch.allclose(state.weights["blocks.0.mlp.magnitude"], expected)


@pytest.mark.feature(29, 77)
@pytest.mark.parametrize("name", ["diag-oft", "diff", "ia3", "dylora", "slider", "tread", "locon"])
def test_methods_of_other_trainers_are_refused_by_name(name):
    with pytest.raises(
        ValueError, match=f"{name!r} is not supported .*; choose one of lora, dora, loha, lokr"
    ):
        build_adapters(SPECS, AdapterConfig(algorithm=name))


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="'lorra' is unknown; choose one of"):
        build_adapters(SPECS, AdapterConfig(algorithm="lorra"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"ranks": (("*", 0),)}, "rank must be at least 1"),
        ({"alpha": -1.0}, "alpha must be positive"),
        ({"alpha": float("nan")}, "alpha must be positive"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"module_dropout": -0.1}, "module_dropout must be"),
        ({"max_norm": float("inf")}, "max_norm must be positive"),
        ({"lora_plus_ratio": 0.0}, "learning-rate ratio must be above 0"),
        ({"lrs": (("*", 0.0),)}, "learning-rate ratio must be above 0"),
        ({"init": "loftq"}, "choose one of default, gaussian, pissa"),
        ({"init": "pissa", "algorithm": "loha"}, "is for LoRA"),
        ({"init": "pissa", "max_norm": 1.0}, "PiSSA .* does not support max_norm"),
        ({"init": "pissa", "tucker": True}, "PiSSA .* or tucker"),
        ({"factor": 1}, "factor must be at least 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AdapterConfig(**settings)


def test_methods_that_start_from_the_base_say_so_when_it_is_missing():
    for method in ("dora", "pissa"):
        config = adapter_config(method)
        with pytest.raises(ValueError, match="base weight"):
            initialize(build_adapters(select(SPECS, FAMILY, config), config), 0)


@pytest.mark.parametrize("method", ["oft", "glora"])
def test_what_multiplies_the_base_has_no_difference_without_it(method):
    with pytest.raises(ValueError, match=f"{method} multiplies the base weight"):
        case(method, "linear")[1].delta()


@pytest.mark.parametrize(("algorithm", "factor", "inputs"), [("lora", "down", 400), ("glora", "a1", 100)])
def test_a_fresh_factor_is_uniform_up_to_one_over_the_root_of_its_inputs(algorithm, factor, inputs):
    """Kaiming-uniform with a = sqrt(5), as PEFT and LyCORIS have it."""
    config = AdapterConfig(algorithm=algorithm, rank=100)
    adapters = build_adapters({"a": LayerSpec("linear", (400, 400))}, config)
    initialize(adapters, 0)
    largest = getattr(adapters["a"], factor).abs().max()
    assert 0.999 < largest * inputs**0.5 <= 1


def test_at_strength_zero_only_the_base_is_computed():
    x = torch.ones(2)
    with at_strength(0.0):
        assert apply_strength(pytest.fail, lambda x: 3 * x, x).tolist() == [3, 3]


def test_forms_that_are_not_read_are_named():
    blocks = {"oft_blocks": torch.zeros(2, 4, 4)}
    assert OFT.other_form(blocks | {"dora_scale": torch.ones(1)}) == "OFT with dora_scale"
    assert OFT.other_form(blocks | {"rescale": torch.ones(1)}) == "OFT with rescale"
    assert not OFT.other_form(blocks)


@pytest.mark.parametrize("changed", ["a1", "b2"])
def test_glora_factors_that_do_not_belong_together_are_no_layer(changed):
    weights = dict(case("glora", "linear")[1].named_parameters())
    assert GLoRA.shape_in(weights) == (24, 16)
    weights[changed] = weights[changed][:-1]
    with pytest.raises(ValueError, match="inputs of b2"):
        GLoRA.shape_in(weights)


def test_dora_is_refused_for_one_output_because_loaders_would_misread_it():
    with pytest.raises(ValueError, match="Exclude that layer"):
        build_adapters({"a": LayerSpec("linear", (1, 8))}, AdapterConfig(algorithm="dora"))


@pytest.mark.parametrize("shape", [(64, 6), (6, 64)])
def test_the_factor_of_a_lokr_file_is_read_from_either_side(shape):
    layer, config = LayerSpec("linear", shape), AdapterConfig(algorithm="lokr", rank=1)
    weights = dict(LoKr(layer, dataclasses.replace(config, factor=4)).named_parameters())
    assert LoKr.settings_of(config, {"layer": (layer, weights)}).factor == 4


@pytest.mark.parametrize("settings", [{"decompose_both": True}, {"full_matrix": True}, {}], ids=str)
def test_which_factors_of_a_lokr_file_are_products_is_read(settings):
    layer, config = LayerSpec("linear", (64, 64)), AdapterConfig(algorithm="lokr", rank=1)
    asked = dataclasses.replace(config, **settings)
    weights = dict(LoKr(layer, asked).named_parameters())
    assert LoKr.settings_of(config, {"layer": (layer, weights)}) == asked


def test_a_factor_of_two_is_read_from_a_lokr_file():
    layer, config = LayerSpec("linear", (16, 16)), AdapterConfig(algorithm="lokr", rank=1)
    weights = dict(LoKr(layer, dataclasses.replace(config, factor=2)).named_parameters())
    assert LoKr.settings_of(config, {"layer": (layer, weights)}).factor == 2


@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_lengths_of_a_dora_file_are_those_of_its_axis(kernel):
    moved, base = torch.randn(2, 5, 4, *kernel, generator=torch.Generator().manual_seed(0))
    for over_outputs, axis, lengths in ((True, 0, base.flatten(1).norm(dim=1)), (False, 1, None)):
        rows = moved.movedim(axis, 0)
        lengths = rows.flatten(1).norm(dim=1) if lengths is None else lengths
        magnitude = torch.arange(1.0, len(rows) + 1)
        expected = torch.stack([row * m / n for row, m, n in zip(rows, magnitude, lengths)]).movedim(0, axis)
        found = apply_magnitude(moved, base, magnitude, over_outputs=over_outputs)
        torch.testing.assert_close(found, expected)


def test_dropout_keeps_the_expected_output():
    layer, adapter, x = trained_case("lora", "linear", dropout=0.5)
    with torch.no_grad():
        outputs = []
        for index in range(2000):
            with draws(3, index):
                outputs.append(adapter(layer, x))
        plain = adapter(layer, x)
    error = torch.stack(outputs).mean(0) - plain
    assert error.norm() < 0.1 * (plain - layer.forward(x)).norm()


@pytest.mark.feature(31)
def test_each_dropout_leaves_out_its_share_and_scales_up_the_rest():
    share, x = 0.2, torch.ones(4000)
    for index in range(3):
        with draws(3, index):
            inputs = Draw(AdapterConfig(dropout=share), "a", x).inputs()
            ranks = Draw(AdapterConfig(rank=4000, rank_dropout=share), "a", x).ranks()
        for kept in (inputs, ranks):
            assert kept.unique().tolist() == [0.0, 1.25]
            assert (kept == 0).float().mean().item() == pytest.approx(share, abs=0.03)


def test_a_module_is_left_out_as_often_as_asked_and_token_ids_are_never_dropped():
    config, ids = AdapterConfig(module_dropout=0.2, dropout=0.5), torch.arange(100)
    left_out = 0
    for index in range(1000):
        with draws(0, index):
            left_out += Draw(config, "a", ids).leaves_out_module()
            assert Draw(config, "a", ids).inputs() is ids
    assert 160 < left_out < 240


def test_dropout_differs_between_layers_and_repeats_in_a_checkpointed_block():
    from torch.utils.checkpoint import checkpoint

    layer, adapter, x = trained_case("lora", "linear", dropout=0.5, rank_dropout=0.5)
    with draws(0, 1):
        plain = torch.autograd.grad(adapter(layer, x).sum(), adapter.down)[0]
        again = torch.autograd.grad(checkpoint(adapter, layer, x, use_reentrant=False).sum(), adapter.down)[0]
        first = adapter(layer, x)
        layer.name = "another"
        assert torch.equal(plain, again)
        assert not torch.equal(first, adapter(layer, x))


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_leaving_a_module_out_gives_the_layer_itself(method):
    layer, adapter, x = trained_case(method, "linear", module_dropout=0.5)
    with torch.no_grad():
        plain, left_out = layer.forward(x), 0
        for index in range(200):
            with draws(0, index):
                left_out += bool(torch.equal(adapter(layer, x), plain))
    assert 70 < left_out < 130


def test_a_fresh_gaussian_start_has_the_deviation_of_peft():
    _, adapter, _ = case("lora-gaussian", "linear", rank=64)
    assert adapter.down.std().item() == pytest.approx(1 / 64, rel=0.1)


def test_fresh_starts_are_as_large_as_those_of_lycoris():
    _, loha, _ = case("loha", "linear", rank=64)
    deviations = {name: p.std().item() for name, p in loha.named_parameters()}
    assert deviations == pytest.approx({"w1_a": 0.1, "w1_b": 1.0, "w2_a": 0.0, "w2_b": 1.0}, rel=0.1)
    for method, name, inputs in (("lora", "down", 16), ("lokr", "w1", 4), ("lokr", "w2_a", 2)):
        _, adapter, _ = case(method, "linear")
        largest = adapter.get_parameter(name).abs().max().item()
        assert 0.5 * inputs**-0.5 < largest <= inputs**-0.5, name  # kaiming_uniform_ at a = sqrt(5)


def test_pissa_of_a_rank_beyond_the_layers_draws_what_is_missing_as_lora_does():
    layer, adapter, _ = case("pissa", "linear", rank=40, alpha=40.0)
    base = layer.weight(torch.float32, torch.device("cpu"))
    assert torch.allclose(adapter.up0 @ adapter.down0, base, atol=1e-5)
    assert not adapter.up[:, 16:].any() and adapter.down[16:].std() > 0.1
    assert 0.2 < adapter.down[16:].abs().max() <= 0.25
