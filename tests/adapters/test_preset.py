"""Presets of LyCORIS choose the same layers and settings here, and nothing in them is left out in silence."""

from __future__ import annotations

import json

import pytest

from graft.tests.support.tiny import FAMILY, TinyDenoiser
from graft.training.adapters.build import build_adapters, for_layer, select
from graft.training.adapters.preset import apply_preset
from graft.training.config import AdapterConfig

SPECS = TinyDenoiser().specs
PRESET = {
    "enable_conv": True,
    "target_name": ["conv_in", "blocks\\.0\\.mlp"],
    "name_algo_map": {"blocks\\..\\.attn_qkv": {"algo": "lokr", "dim": 4, "factor": 4}},
    "exclude_name": ["blocks\\.1"],
}


LYCORIS_SETTINGS = (
    "ENABLE_CONV",
    "TARGET_REPLACE_MODULE",
    "TARGET_REPLACE_NAME",
    "MODULE_ALGO_MAP",
    "NAME_ALGO_MAP",
    "LORA_PREFIX",
    "USE_FNMATCH",
    "TARGET_EXCLUDE_NAME",
)


def applied(preset, **settings):
    return apply_preset(json.dumps(preset), AdapterConfig(rank=2, alpha=1.0, **settings))


@pytest.mark.parametrize("globs", [False, True])
def test_the_layers_are_those_that_lycoris_chooses(globs, monkeypatch):
    from lycoris import LycorisNetwork, create_lycoris

    for name in LYCORIS_SETTINGS:  # of the class: put back after the test
        monkeypatch.setattr(LycorisNetwork, name, getattr(LycorisNetwork, name))
    preset = PRESET
    if globs:
        preset = {
            "use_fnmatch": True,
            "enable_conv": True,
            "target_name": ["conv_in", "*.0.mlp"],
            "name_algo_map": {"blocks.?.attn_qkv": {"algo": "lokr", "dim": 4, "factor": 4}},
            "exclude_name": ["blocks.1*"],
        }
    clean = {
        "target_module": [],
        "target_name": [],
        "name_algo_map": {},
        "module_algo_map": {},
        "exclude_name": [],
    }
    LycorisNetwork.apply_preset({**clean, "use_fnmatch": False, **preset, "lora_prefix": "lora_unet"})
    network = create_lycoris(
        TinyDenoiser().module, 1.0, linear_dim=2, linear_alpha=1, conv_dim=2, algo="lora"
    )
    config = applied(preset)
    adapters = build_adapters(select(SPECS, FAMILY, config), config)
    theirs = {lora.lora_name: type(lora).__name__ for lora in network.loras}
    names = {"lora": "LoConModule", "lokr": "LokrModule"}
    assert theirs == {
        f"lora_unet_{path.replace('.', '_')}": names[adapter.config.algorithm]
        for path, adapter in adapters.items()
    }
    assert len(theirs) == 3


def test_algorithm_rank_and_factor_follow_the_maps():
    config = applied(PRESET)
    assert config.factor == 4 and config.targets == "all"
    qkv, mlp = for_layer(config, "blocks.0.attn_qkv"), for_layer(config, "blocks.0.mlp")
    assert (qkv.algorithm, qkv.rank, mlp.algorithm, mlp.rank) == ("lokr", 4, "lora", 2)


def test_names_come_before_modules_and_modules_stand_for_comfyuis_paths():
    config = applied(
        {
            "module_algo_map": {"Attention": {"algo": "loha", "dim": 8}, "FeedForward": {"algo": "locon"}},
            "name_algo_map": {"*attn2*": {"dim": 1, "alpha": 1}},
            "use_fnmatch": True,
        }
    )
    one = for_layer(config, "input_blocks.1.1.transformer_blocks.0.attn1.to_q")
    two = for_layer(config, "input_blocks.1.1.transformer_blocks.0.attn2.to_q")
    assert (one.algorithm, one.rank, two.algorithm, two.rank, two.alpha) == ("loha", 8, "loha", 1, 1.0)
    assert for_layer(config, "input_blocks.1.1.transformer_blocks.0.ff.net.2").algorithm == "lora"


def test_without_convolutions_only_linear_layers_are_trained():
    kinds = {spec.kind for spec in select(SPECS, FAMILY, applied({"enable_conv": False})).values()}
    assert kinds == {"linear"}


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("{", "preset: not JSON"),
        ("[]", "preset: expected an object"),
        ('{"enable_convs": true}', "enable_convs: unknown key; known: enable_conv"),
        ('{"enable_conv": 1}', "enable_conv: expected bool, got 1"),
        ('{"target_module": ["Conformer"]}', "Conformer: Graft does not know which layers"),
        ('{"text_encoder_target_module": ["CLIPMLP"]}', "text encoders are chosen in Build LoRA"),
        ('{"name_algo_map": {"a": {"algo": "lora", "wd": true}}}', "a: wd|a.*: wd: unknown; known: algo"),
        ('{"name_algo_map": {"a": {"dim": "4"}}}', "dim: '4' is not a possible value"),
        ('{"name_algo_map": {"a": 4}}', "expected an object"),
        ('{"name_algo_map": {"a": {"factor": 4}, "b": {"factor": 8}}}', "factor must be the same"),
    ],
)
def test_what_cannot_be_honored_is_refused(preset, message):
    with pytest.raises(ValueError, match=message):
        apply_preset(preset, AdapterConfig())


def test_an_algorithm_that_is_not_here_is_refused_by_name():
    config = applied({"name_algo_map": {"blocks.*": {"algo": "ia3"}}})
    with pytest.raises(ValueError, match="'ia3' is not supported .its files do not load everywhere"):
        build_adapters(select(SPECS, FAMILY, config), config)
