"""Training starts from a LoRA file of any layout at exactly what the file renders."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from safetensors.torch import save_file

from graft.tests.support.tiny import FAMILY, TinyDataset, TinyDenoiser
from graft.training.adapters.build import build_adapters, named_parameters, restore_adapters
from graft.training.config import AdapterConfig
from graft.training.files.lora.initial_weights import build_initial_weights, config_from_file, match_layers
from graft.training.files.lora.match import match_lora
from graft.training.files.lora.names import Target, layer_names
from graft.training.files.lora.read import read_lora
from graft.training.files.lora.write import lora_tensors
from graft.training.loop import train
from graft.training.state import TrainState

from ..support.adapter_cases import METHODS, adapter_config, fresh_state, train_config

NATIVE = dataclasses.replace(FAMILY, key_prefix="")
CPU = torch.device("cpu")


def saved(tmp_path, state, family=FAMILY):
    path = tmp_path / "start.safetensors"
    save_file(lora_tensors(state, family), path)
    return path


def found_in(path, names=None):
    """Return the layers of a file, found in the tiny model."""
    specs = TinyDenoiser().specs
    if names is None:
        return match_layers(read_lora(path), specs, FAMILY)
    return match_lora(read_lora(path), names, {name: spec.shape[0] for name, spec in specs.items()}, "tiny")


def trained(method, **settings):
    denoiser = TinyDenoiser()
    config = train_config(adapter_config(method, **settings))
    start = fresh_state(denoiser, config)
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: tensor + (0 if name.endswith("0") else 0.1 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in start.weights.items()
    }
    return denoiser, dataclasses.replace(start, weights=weights)


def products(denoiser, config, weights):
    adapters = restore_adapters(denoiser.specs, config, weights, CPU)
    return {path: adapter.product().detach() for path, adapter in adapters.items()}


def assert_same_products(one, other, atol=1e-6):
    assert one.keys() == other.keys()
    for path in one:
        assert torch.allclose(one[path], other[path], atol=atol), path


@pytest.mark.parametrize("family", [FAMILY, NATIVE], ids=["kohya", "native"])
@pytest.mark.parametrize("method", METHODS)
def test_a_file_starts_where_it_was_saved(tmp_path, method, family):
    denoiser, state = trained(method)
    path = saved(tmp_path, state, family)
    config = config_from_file(found_in(path), denoiser.specs, AdapterConfig(targets="everything"))
    with denoiser.hold(torch.float32) as base:
        weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, config, layers=base.layers)
    assert_same_products(
        products(denoiser, config, weights), products(denoiser, state.adapter, state.weights)
    )


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("pissa", "lora-rs")])
def test_a_round_trip_through_a_file_is_lossless(tmp_path, method):
    denoiser, state = trained(method)
    path = saved(tmp_path, state)
    with denoiser.hold(torch.float32) as base:
        weights = build_initial_weights(
            found_in(path), denoiser.specs, FAMILY, state.adapter, layers=base.layers
        )
    assert weights.keys() == state.weights.keys()
    assert all(torch.equal(weights[name], state.weights[name]) for name in weights)


@pytest.mark.parametrize("method", ["lora", "lora-rs", "dora", "loha"])
def test_a_larger_rank_starts_at_the_same_difference_and_learns_in_all_of_it(tmp_path, method):
    denoiser, state = trained(method)
    path = saved(tmp_path, state)
    config = train_config(dataclasses.replace(state.adapter, rank=7, alpha=2.5))
    with denoiser.hold(torch.float32) as base:
        weights = build_initial_weights(
            found_in(path), denoiser.specs, FAMILY, config.adapter, layers=base.layers
        )
    assert_same_products(
        products(denoiser, config.adapter, weights), products(denoiser, state.adapter, state.weights), 1e-5
    )
    start = TrainState(0, config.adapter, denoiser.fingerprint, weights)
    end = train(denoiser, TinyDataset(), config, start, steps=2)
    assert not [name for name in weights if torch.equal(weights[name], end.weights[name])]


def test_layers_that_the_file_lacks_start_fresh_and_its_own_are_all_kept(tmp_path, caplog):
    denoiser, state = trained("lora")
    some = {n: t for n, t in state.weights.items() if n.startswith(("blocks.0.mlp", "conv_in"))}
    path = saved(tmp_path, dataclasses.replace(state, weights=some))
    config = dataclasses.replace(state.adapter, targets="attn")
    with caplog.at_level(logging.WARNING):
        weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, config)
    found = products(denoiser, config, weights)
    assert set(found) == {"blocks.0.attn_qkv", "blocks.1.attn_qkv", "blocks.0.mlp", "conv_in"}
    assert not found["blocks.0.attn_qkv"].any() and found["conv_in"].any()
    assert not caplog.records


def test_keys_that_match_no_layer_are_listed(tmp_path, caplog):
    denoiser, state = trained("lora")
    path = tmp_path / "start.safetensors"
    text = {f"lora_te1_x.{side}.weight": torch.ones(3, 3) for side in ("lora_up", "lora_down")}
    save_file({**lora_tensors(state, FAMILY), **text, "blocks.0.norm.w_norm": torch.ones(3)}, path)
    with caplog.at_level(logging.WARNING):
        build_initial_weights(found_in(path), denoiser.specs, FAMILY, state.adapter)
    for key in ("lora_te1_x.lora_up.weight", "lora_te1_x.lora_down.weight", "blocks.0.norm.w_norm"):
        assert key in caplog.text


def test_a_file_of_another_model_is_refused(tmp_path):
    path = tmp_path / "start.safetensors"
    save_file({f"lora_unet_other.{side}.weight": torch.ones(3, 3) for side in ("lora_up", "lora_down")}, path)
    with pytest.raises(ValueError, match="no layer of tiny has a name that the file uses .lora_unet_other"):
        build_initial_weights(found_in(path), TinyDenoiser().specs, FAMILY, AdapterConfig())


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("lora", {"rank": 2}, "the file has rank 3 here and the settings have 2; take rank"),
        ("loha", {"algorithm": "lora"}, "the file holds loha weights; set the algorithm to it, not lora"),
        (
            "lokr-full",
            {"full_matrix": False, "rank": 1},
            "the settings have no such factor; take rank and factors",
        ),
        ("loha-tucker", {"rank": 4}, "the rank of a Tucker core cannot change"),
        ("lora", {"algorithm": "dora"}, "needs? its base|beside its base|base weight"),
        ("lora", {"init": "pissa"}, "set init to 'default'"),
    ],
)
def test_what_cannot_be_brought_to_the_settings_is_refused(tmp_path, method, settings, message):
    denoiser, state = trained(method)
    path = saved(tmp_path, state)
    with pytest.raises(ValueError, match=message):
        build_initial_weights(
            found_in(path), denoiser.specs, FAMILY, dataclasses.replace(state.adapter, **settings)
        )


def test_a_layer_of_another_size_is_refused(tmp_path):
    denoiser, state = trained("lora")
    name = "blocks.0.mlp.down"
    weights = {**state.weights, name: state.weights[name][:, :8]}
    path = saved(tmp_path, dataclasses.replace(state, weights=weights))
    with pytest.raises(
        ValueError, match=r"shape \(3, 8\) does not fit \(3, 32\) of the layer .*choose the base"
    ):
        build_initial_weights(found_in(path), denoiser.specs, FAMILY, state.adapter)


def split_names(specs):
    """As ComfyUI's table does for diffusers files: to_q, to_k and to_v are thirds of the fused layer."""
    names = {}
    for path in (path for path in specs if path.endswith("attn_qkv")):
        for i, part in enumerate("qkv"):
            names[f"transformer.{path.removesuffix('_qkv')}.to_{part}"] = Target(path, 32 * i, 32)
    return names


@pytest.mark.parametrize("shared", [False, True])
def test_separate_q_k_v_become_one_lora_of_the_fused_layer(tmp_path, shared):
    specs = TinyDenoiser().specs
    names, tensors, expected = split_names(specs), {}, torch.zeros(96, 32)
    down = torch.randn(2, 32)
    for i, name in enumerate(name for name in names if ".0." in name):
        part = down.clone() if shared else torch.randn(2, 32)
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = part, torch.randn(32, 2)
        tensors[f"{name}.alpha"] = torch.tensor(1.0 if shared else 1.0 + i)
        scale = 0.5 if shared else (1.0 + i) / 2
        expected[32 * i : 32 * i + 32] = scale * tensors[f"{name}.lora_B.weight"] @ part
    path = tmp_path / "start.safetensors"
    save_file(tensors, path)
    config = config_from_file(found_in(path, names), specs, AdapterConfig(targets="attn"))
    assert config.rank == (2 if shared else 6)
    weights = build_initial_weights(found_in(path, names), specs, FAMILY, config)
    assert torch.allclose(products(TinyDenoiser(), config, weights)["blocks.0.attn_qkv"], expected, atol=1e-5)


def test_ranks_and_alphas_that_differ_between_layers_become_patterns(tmp_path):
    denoiser, state = trained("lora", ranks=(("*.mlp", 5),), alphas=(("conv_in", 3.0),))
    path = saved(tmp_path, state)
    config = config_from_file(found_in(path), denoiser.specs, AdapterConfig(rank=99, targets="everything"))
    assert (config.rank, config.alpha) == (3, 1.5)
    assert dict(config.ranks) == {"blocks.0.mlp": 5, "blocks.1.mlp": 5} and dict(config.alphas) == {
        "conv_in": 3.0
    }
    weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, config)
    assert all(torch.equal(weights[name], state.weights[name]) for name in weights)


def test_whole_factors_stay_whole_at_any_rank_of_the_settings(tmp_path):
    denoiser, state = trained("lokr-full")
    path = saved(tmp_path, state)
    config = config_from_file(found_in(path), denoiser.specs, AdapterConfig(rank=1, targets="everything"))
    weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, config)
    assert config.full_matrix and weights.keys() == state.weights.keys()


def test_a_layer_under_two_names_is_refused(tmp_path):
    _, state = trained("lora")
    path = tmp_path / "start.safetensors"
    again = {key: tensor.clone() for key, tensor in lora_tensors(state, NATIVE).items()}
    save_file({**lora_tensors(state, FAMILY), **again}, path)
    with pytest.raises(ValueError, match="are all names of one layer, .*; a layer may come once"):
        found_in(path)


def test_algorithms_that_differ_between_layers_become_patterns(tmp_path):
    denoiser, state = trained("lora", algorithms=(("*.mlp", "loha"),))
    path = saved(tmp_path, state)
    config = config_from_file(found_in(path), denoiser.specs, AdapterConfig(targets="everything"))
    assert config.algorithm == "lora"
    assert dict(config.algorithms) == {"blocks.0.mlp": "loha", "blocks.1.mlp": "loha"}
    weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, config)
    assert all(torch.equal(weights[name], state.weights[name]) for name in weights)


def test_a_plain_lora_becomes_dora_of_the_same_function_beside_its_base(tmp_path):
    denoiser, state = trained("lora")
    path = saved(tmp_path, state)
    config = dataclasses.replace(state.adapter, algorithm="dora")
    with denoiser.hold(torch.float32) as base:
        weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, config, layers=base.layers)
        adapters = restore_adapters(denoiser.specs, config, weights, CPU)
        for name, adapter in adapters.items():
            weight = base.layers[name].weight(torch.float32, CPU)
            assert torch.allclose(adapter.delta(weight), adapter.product(), atol=1e-5)


def test_a_dora_file_keeps_its_magnitudes_where_its_tucker_core_is_folded(tmp_path):
    denoiser, state = trained("dora", tucker=True)
    path = saved(tmp_path, state)
    config = dataclasses.replace(state.adapter, tucker=False)
    with denoiser.hold(torch.float32) as base:
        weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, config, layers=base.layers)
    magnitudes = [name for name in state.weights if name.endswith(".magnitude")]
    assert "conv_in.mid" in state.weights and "conv_in.mid" not in weights
    assert all(torch.equal(weights[name], state.weights[name]) for name in magnitudes)
    assert_same_products(
        products(denoiser, config, weights), products(denoiser, state.adapter, state.weights)
    )


def test_a_flat_file_of_a_convolution_is_read(tmp_path):
    denoiser, state = trained("lora")
    tensors = {name: t.flatten(1) if t.ndim > 2 else t for name, t in lora_tensors(state, FAMILY).items()}
    path = tmp_path / "start.safetensors"
    save_file(tensors, path)
    weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, state.adapter)
    assert all(torch.equal(weights[name], state.weights[name]) for name in weights)


def test_every_layer_has_its_kohya_native_and_peft_name():
    names = layer_names({path: spec.shape for path, spec in TinyDenoiser().specs.items()})
    for name in (
        "lora_unet_blocks_0_mlp",
        "diffusion_model.blocks.0.mlp",
        "base_model.model.blocks.0.mlp",
        "blocks.0.mlp",
    ):
        assert names[name] == Target("blocks.0.mlp", 0, 32)


def test_a_peft_file_starts_training(tmp_path):
    from peft import LoraConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict

    denoiser = TinyDenoiser()
    network = TinyDenoiser().module
    peft = get_peft_model(
        network, LoraConfig(r=4, lora_alpha=4, target_modules=["attn_qkv", "mlp", "conv_in"])
    )
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "adapter_model.safetensors"
    save_file({k: v.contiguous() for k, v in get_peft_model_state_dict(peft).items()}, path)
    config = config_from_file(found_in(path), denoiser.specs, AdapterConfig())
    weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, config)
    theirs = {
        n: m.get_delta_weight("default")
        for n, m in peft.base_model.model.named_modules()
        if hasattr(m, "lora_A")
    }
    ours = products(denoiser, config, weights)
    assert set(theirs) == set(ours) and len(ours) == 5
    assert_same_products(ours, {path: theirs[path].detach() for path in ours})
    start = TrainState(0, config, denoiser.fingerprint, weights)
    assert train(denoiser, TinyDataset(), train_config(config), start, steps=1).step == 1


@pytest.mark.parametrize("algorithm", ["loha", "lokr", "lora", "diag-oft", "boft", "glora", "full"])
def test_a_lycoris_file_starts_training(tmp_path, algorithm):
    from lycoris import LycorisNetwork, create_lycoris

    denoiser = TinyDenoiser()
    LycorisNetwork.apply_preset({"lora_prefix": "lora_unet"})
    size = 8 if algorithm == "boft" else 2  # blocks of 2 do not divide 96 outputs into a power of 2
    network = create_lycoris(TinyDenoiser().module, 1.0, linear_dim=size, linear_alpha=1, algo=algorithm)
    network.apply_to()
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    path = tmp_path / "lycoris.safetensors"
    kept = [m for m in network.loras if algorithm != "glora" or "conv1d" not in m.lora_name]  # it has groups,
    names = tuple(f"{module.lora_name}." for module in kept)  # where LyCORIS's GLoRA does not fit its weight
    tensors = {k: v.contiguous() for k, v in network.state_dict().items() if k.startswith(names)}
    save_file(tensors, path)
    assert len(read_lora(path).methods) == len(kept) >= 6
    config = config_from_file(found_in(path), denoiser.specs, AdapterConfig(targets="all"))
    weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, config)
    ours = restore_adapters(denoiser.specs, config, weights, CPU)
    bases = {path: denoiser.module.get_submodule(path).weight for path in ours}
    for module in kept:
        name = next(path for path in ours if f"lora_unet_{path.replace('.', '_')}" == module.lora_name)
        shape = bases[name].shape
        weight = module.get_weight(shape) if hasattr(module, "get_weight") else module.get_diff_weight()[0]
        assert torch.allclose(ours[name].delta(bases[name]), weight.reshape(shape), atol=1e-5), name
    start = TrainState(0, config, denoiser.fingerprint, weights)
    assert train(denoiser, TinyDataset(), train_config(config), start, steps=1).step == 1


def test_a_start_is_ready_for_the_loop():
    denoiser, state = trained("lora")
    built = build_adapters({path: s for path, s in denoiser.specs.items()}, state.adapter)
    assert set(named_parameters(built)) == set(state.weights)


def test_layers_of_other_methods_are_listed_with_the_method_and_the_rest_starts(tmp_path, caplog):
    denoiser, state = trained("lora")
    path = tmp_path / "start.safetensors"
    tensors = {k: t for k, t in lora_tensors(state, FAMILY).items() if "blocks_0_mlp" not in k}
    factors = {"oft_blocks": torch.zeros(8, 4, 4), "rescale": torch.ones(1)}
    oft = {f"lora_unet_blocks_0_mlp.{suffix}": tensor for suffix, tensor in factors.items()}
    save_file({**tensors, **oft}, path)
    with caplog.at_level(logging.WARNING):
        weights = build_initial_weights(found_in(path), denoiser.specs, FAMILY, state.adapter)
    assert "2 keys are OFT with rescale, which Graft does not train" in caplog.text
    assert "lora_unet_blocks_0_mlp.oft_blocks" in caplog.text and "blocks.1.mlp.up" in weights
    save_file(oft, path)
    with pytest.raises(ValueError, match="it holds OFT with rescale. Choose a file of lora"):
        found_in(path)


def test_parts_of_one_layer_that_differ_in_their_inputs_are_refused(tmp_path):
    names, tensors = split_names(TinyDenoiser().specs), {}
    for i, name in enumerate(name for name in names if ".0." in name):
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = (
            torch.ones(2, 32 + i),
            torch.ones(32, 2),
        )
    path = tmp_path / "start.safetensors"
    save_file(tensors, path)
    with pytest.raises(ValueError, match="are parts of one layer, blocks.0.attn_qkv, but differ in their in"):
        found_in(path, names)
