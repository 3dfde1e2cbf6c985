"""LoRA files in other software's names, checked against diffusers' own models, converters and PEFT
loading."""

import re

import pytest
import torch

from graft.training.config import AdapterConfig
from graft.training.family import FAMILIES, GENERIC
from graft.training.files.lora.diffusers import diffusers_tensors, to_diffusers
from graft.training.files.lora.peft import ALPHA, DOWN, UP
from graft.training.files.lora.write import lora_tensors
from graft.training.frozen_base.frozen_layer import LayerSpec
from graft.training.state import TrainState

diffusers = pytest.importorskip("diffusers")

HIDDEN = 64


def linear(out, width):
    return LayerSpec("linear", (out, width))


SD3 = {
    "joint_blocks.0.x_block.attn.qkv": linear(3 * HIDDEN, HIDDEN),
    "joint_blocks.0.x_block.attn.proj": linear(HIDDEN, HIDDEN),
    "joint_blocks.0.x_block.attn2.qkv": linear(3 * HIDDEN, HIDDEN),
    "joint_blocks.0.x_block.attn2.proj": linear(HIDDEN, HIDDEN),
    "joint_blocks.0.x_block.mlp.fc1": linear(4 * HIDDEN, HIDDEN),
    "joint_blocks.0.x_block.mlp.fc2": linear(HIDDEN, 4 * HIDDEN),
    "joint_blocks.0.x_block.adaLN_modulation.1": linear(9 * HIDDEN, HIDDEN),
    "joint_blocks.0.context_block.attn.qkv": linear(3 * HIDDEN, HIDDEN),
    "joint_blocks.0.context_block.attn.proj": linear(HIDDEN, HIDDEN),
    "joint_blocks.0.context_block.mlp.fc1": linear(4 * HIDDEN, HIDDEN),
    "joint_blocks.0.context_block.mlp.fc2": linear(HIDDEN, 4 * HIDDEN),
    "joint_blocks.0.context_block.adaLN_modulation.1": linear(6 * HIDDEN, HIDDEN),
    "joint_blocks.1.x_block.attn.qkv": linear(3 * HIDDEN, HIDDEN),
    "joint_blocks.1.x_block.adaLN_modulation.1": linear(6 * HIDDEN, HIDDEN),
    "joint_blocks.1.context_block.attn.qkv": linear(3 * HIDDEN, HIDDEN),
    "joint_blocks.1.context_block.adaLN_modulation.1": linear(2 * HIDDEN, HIDDEN),
    "t_embedder.mlp.0": linear(HIDDEN, 256),
    "t_embedder.mlp.2": linear(HIDDEN, HIDDEN),
    "y_embedder.mlp.0": linear(HIDDEN, 32),
    "y_embedder.mlp.2": linear(HIDDEN, HIDDEN),
    "context_embedder": linear(HIDDEN, 48),
    "x_embedder.proj": LayerSpec("conv2d", (HIDDEN, 16, 2, 2)),
    "final_layer.adaLN_modulation.1": linear(2 * HIDDEN, HIDDEN),
    "final_layer.linear": linear(64, HIDDEN),
}


def flux(width):
    return {
        "double_blocks.0.img_attn.qkv": linear(3 * width, width),
        "double_blocks.0.img_attn.proj": linear(width, width),
        "double_blocks.0.img_mlp.0": linear(4 * width, width),
        "double_blocks.0.img_mlp.2": linear(width, 4 * width),
        "double_blocks.0.img_mod.lin": linear(6 * width, width),
        "double_blocks.0.txt_attn.qkv": linear(3 * width, width),
        "double_blocks.0.txt_attn.proj": linear(width, width),
        "double_blocks.0.txt_mlp.0": linear(4 * width, width),
        "double_blocks.0.txt_mlp.2": linear(width, 4 * width),
        "double_blocks.0.txt_mod.lin": linear(6 * width, width),
        "single_blocks.0.linear1": linear(7 * width, width),
        "single_blocks.0.linear2": linear(width, 5 * width),
        "single_blocks.0.modulation.lin": linear(3 * width, width),
    }


FLUX = flux(HIDDEN)
FLUX_OUTSIDE = {
    "time_in.in_layer": linear(HIDDEN, 256),
    "time_in.out_layer": linear(HIDDEN, HIDDEN),
    "vector_in.in_layer": linear(HIDDEN, 32),
    "vector_in.out_layer": linear(HIDDEN, HIDDEN),
    "guidance_in.in_layer": linear(HIDDEN, 256),
    "guidance_in.out_layer": linear(HIDDEN, HIDDEN),
    "img_in": linear(HIDDEN, 64),
    "txt_in": linear(HIDDEN, 48),
    "final_layer.adaLN_modulation.1": linear(2 * HIDDEN, HIDDEN),
    "final_layer.linear": linear(64, HIDDEN),
}


def layers_for(specs, rank=4, alpha=2.0):
    generator = torch.Generator().manual_seed(0)
    return {
        path: {
            DOWN: torch.randn(rank, *spec.shape[1:], generator=generator),
            UP: torch.randn(spec.shape[0], rank, generator=generator),
            ALPHA: torch.tensor(alpha),
        }
        for path, spec in specs.items()
    }


def delta(values):
    return values[UP].flatten(1) @ values[DOWN].flatten(1) * (values[ALPHA] / len(values[DOWN]))


def deltas(tensors):
    """Layer name -> weight difference of a diffusers file."""
    names = {key.removesuffix(".lora_A.weight") for key in tensors if key.endswith("lora_A.weight")}
    return {
        n: tensors[f"{n}.lora_B.weight"].flatten(1)
        @ tensors[f"{n}.lora_A.weight"].flatten(1)
        * (
            float(tensors[f"{n}.alpha"]) / len(tensors[f"{n}.lora_A.weight"])
            if f"{n}.alpha" in tensors
            else 1.0
        )
        for n in names
    }


def kohya(layers):
    return {
        f"lora_unet_{path.replace('.', '_')}.{suffix}": tensor
        for path, values in layers.items()
        for suffix, tensor in values.items()
    }


def model_of(kind):
    if kind == "sdxl":
        return diffusers.UNet2DConditionModel(**UNET | TINY_UNET)
    if kind == "sd3":
        return diffusers.SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=16,
            num_layers=2,
            attention_head_dim=HIDDEN,
            num_attention_heads=1,
            joint_attention_dim=48,
            caption_projection_dim=HIDDEN,
            pooled_projection_dim=32,
            out_channels=16,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
    return diffusers.FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=HIDDEN,
        num_attention_heads=1,
        joint_attention_dim=48,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    )


MIXINS = {
    "sdxl": "StableDiffusionXLLoraLoaderMixin",
    "sd3": "SD3LoraLoaderMixin",
    "flux": "FluxLoraLoaderMixin",
}


@pytest.mark.feature(21)
@pytest.mark.parametrize("kind, family", [("sdxl", "SDXL"), ("sd3", "SD35Medium"), ("flux", "Flux")])
def test_an_export_loads_through_peft_with_no_key_left_or_missing(kind, family):
    model, part = model_of(kind), "unet" if kind == "sdxl" else "transformer"
    specs = {"sd3": SD3, "flux": FLUX | FLUX_OUTSIDE}.get(kind) or shapes(model)
    tensors = to_diffusers(layers_for(specs), FAMILIES[family])
    loaded = getattr(diffusers.loaders.lora_pipeline, MIXINS[kind]).lora_state_dict(dict(tensors))
    loaded = loaded[0] if isinstance(loaded, tuple) else loaded
    assert loaded.keys() == tensors.keys()
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.load_lora_adapter(loaded, prefix=part)
    found = {n.replace(".default_0", "") for n, _ in model.named_parameters() if "lora_" in n}
    assert found == {key.removeprefix(f"{part}.") for key in tensors}
    model.fuse_lora()
    after = dict(model.named_parameters())
    for name, expected in deltas(tensors).items():
        key = name.removeprefix(f"{part}.")
        change = after[f"{key}.base_layer.weight"] - before[f"{key}.weight"]
        torch.testing.assert_close(change.flatten(1), expected, rtol=1e-4, atol=1e-4)


def test_the_flux_export_is_what_diffusers_makes_of_the_kohya_file():
    from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers as convert

    layers = layers_for(flux(3072))  # the converter knows no other width
    ours, theirs = to_diffusers(layers, FAMILIES["Flux"]), convert(kohya(layers))
    assert ours.keys() == theirs.keys()
    for name in (key.removesuffix("A.weight") for key in ours if key.endswith("A.weight")):
        x = torch.randn(ours[f"{name}A.weight"].shape[1], generator=torch.Generator().manual_seed(1))
        one, two = (t[f"{name}B.weight"] @ (t[f"{name}A.weight"] @ x) for t in (ours, theirs))
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-3)


def test_a_training_state_is_exported_in_the_dtype_asked_for():
    path, config = "joint_blocks.0.x_block.mlp.fc1", AdapterConfig(rank=4, alpha=2.0)
    [values] = layers_for({path: SD3[path]}).values()
    state = TrainState(1, config, "", {f"{path}.down": values[DOWN], f"{path}.up": values[UP]})
    tensors = diffusers_tensors(state, FAMILIES["SD3"], torch.bfloat16)
    name = "transformer.transformer_blocks.0.ff.net.0.proj"
    assert tensors.keys() == {f"{name}.lora_A.weight", f"{name}.lora_B.weight"}
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    [found] = deltas({key: tensor.float() for key, tensor in tensors.items()}).values()
    torch.testing.assert_close(found, delta(values), rtol=2e-2, atol=5e-2)


def test_fused_projections_share_a_and_split_b_by_rows():
    layers = layers_for({"joint_blocks.0.x_block.attn.qkv": SD3["joint_blocks.0.x_block.attn.qkv"]})
    found, [values] = deltas(to_diffusers(layers, FAMILIES["SD3"])), layers.values()
    for index, name in enumerate(("to_q", "to_k", "to_v")):
        rows = delta(values)[index * HIDDEN : (index + 1) * HIDDEN]
        torch.testing.assert_close(found[f"transformer.transformer_blocks.0.attn.{name}"], rows)


def test_scale_and_shift_are_swapped_where_diffusers_keeps_them_so():
    for path, name in (
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
        ("joint_blocks.1.context_block.adaLN_modulation.1", "transformer_blocks.1.norm1_context.linear"),
    ):
        layers = layers_for({path: SD3[path]})
        [found], [values] = deltas(to_diffusers(layers, FAMILIES["SD3"])).items(), layers.values()
        shift, scale = delta(values).chunk(2)
        assert found[0] == f"transformer.{name}"
        torch.testing.assert_close(found[1], torch.cat((scale, shift)))


# SDXL


UNET = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
TINY_UNET = {"block_out_channels": (32, 64, 64), "attention_head_dim": (1, 2, 2), "cross_attention_dim": 16}


@pytest.fixture(scope="module")
def sdxl():
    """A diffusers U-Net with SDXL's names, without memory."""
    with torch.device("meta"):
        return diffusers.UNet2DConditionModel(**UNET)


# ruff: noqa: E501
SDXL_PATHS = {
    "time_embed.0": "time_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "input_blocks.3.0.op": "down_blocks.0.downsamplers.0.conv",
    "input_blocks.4.0.skip_connection": "down_blocks.1.resnets.0.conv_shortcut",
    "input_blocks.4.1.transformer_blocks.0.attn1.to_q": "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
    "input_blocks.5.1.proj_in": "down_blocks.1.attentions.1.proj_in",
    "input_blocks.8.1.transformer_blocks.9.ff.net.0.proj": "down_blocks.2.attentions.1.transformer_blocks.9.ff.net.0.proj",
    "middle_block.0.in_layers.2": "mid_block.resnets.0.conv1",
    "middle_block.1.transformer_blocks.3.attn2.to_k": "mid_block.attentions.0.transformer_blocks.3.attn2.to_k",
    "middle_block.2.emb_layers.1": "mid_block.resnets.1.time_emb_proj",
    "output_blocks.0.1.transformer_blocks.0.attn2.to_out.0": "up_blocks.0.attentions.0.transformer_blocks.0.attn2.to_out.0",
    "output_blocks.2.2.conv": "up_blocks.0.upsamplers.0.conv",
    "output_blocks.4.1.proj_out": "up_blocks.1.attentions.1.proj_out",
    "output_blocks.8.0.out_layers.3": "up_blocks.2.resnets.2.conv2",
    "out.2": "conv_out",
}


def shapes(sdxl, paths=SDXL_PATHS):
    weights = dict(sdxl.named_parameters())
    return {path: LayerSpec("any", tuple(weights[f"{name}.weight"].shape)) for path, name in paths.items()}


def test_the_sdxl_export_has_the_names_of_diffusers_unet(sdxl):
    tensors = to_diffusers(layers_for(shapes(sdxl)), FAMILIES["SDXL"])
    found = {re.sub(r"^unet\.(.+)\.lora_[AB]\.weight$", r"\1", key) for key in tensors}
    assert found == set(SDXL_PATHS.values())


def test_the_sdxl_export_is_what_diffusers_makes_of_the_kohya_file(sdxl):
    from diffusers.loaders import lora_conversion_utils as convert

    layers = layers_for({p: s for p, s in shapes(sdxl).items() if "time" not in p and "label" not in p})
    file = {
        key: t.reshape(*t.shape, 1, 1) if key.endswith(UP) and layers[path][DOWN].ndim == 4 else t
        for path, values in layers.items()
        for key, t in kohya({path: values}).items()
    }
    mapped = convert._maybe_map_sgm_blocks_to_diffusers(file, sdxl.config)
    theirs, alphas = convert._convert_non_diffusers_lora_to_diffusers(mapped)
    theirs = diffusers.utils.convert_unet_state_dict_to_peft(theirs)
    ours = to_diffusers(layers, FAMILIES["SDXL"])
    assert theirs.keys() == ours.keys() and set(alphas.values()) == {2.0}
    for key, tensor in ours.items():
        scale = 2.0 / 4 if "lora_B" in key else 1.0
        torch.testing.assert_close(tensor.flatten(), scale * theirs[key].flatten())


# What cannot be exported


def test_a_family_without_diffusers_names_is_refused_by_name():
    with pytest.raises(ValueError, match="generic has no diffusers names here; save its LoRA in the ComfyUI"):
        to_diffusers({}, GENERIC)


def test_what_is_no_plain_lora_is_refused_with_the_way_out():
    layers = {"final_layer.linear": {"hada_w1_a": torch.zeros(1), ALPHA: torch.tensor(1.0)}}
    with pytest.raises(ValueError, match="diffusers knows plain LoRA only.*hada_w1_a; save it.*Resize LoRA"):
        to_diffusers(layers, FAMILIES["SD3"])


# The layout that ComfyUI and diffusers both read


NATIVE = {
    "Flux2": "double_blocks.0.img_attn.qkv",
    "QwenImage": "transformer_blocks.0.attn.to_q",
    "HiDream": "double_stream_blocks.0.block.attn1.to_q",
    "Lumina2": "layers.0.attention.qkv",
    "ZImage": "layers.0.attention.qkv",
}


def trained(path, algorithm="lora", **weights):
    config = AdapterConfig(rank=2, alpha=1.0, algorithm=algorithm)
    drawn = {"down": torch.randn(2, 8), "up": torch.randn(24, 2), **weights}
    return TrainState(1, config, "", {f"{path}.{name}": tensor for name, tensor in drawn.items()})


@pytest.mark.parametrize("row", NATIVE)
def test_a_family_without_kohya_names_is_written_as_comfyui_and_diffusers_read_it(row):
    path = NATIVE[row]
    state = trained(path)
    tensors = lora_tensors(state, FAMILIES[row], torch.bfloat16)
    names = [path]
    if row == "ZImage":  # diffusers does not know the fused layer, ComfyUI knows both
        names = [path.replace("qkv", part) for part in ("to_q", "to_k", "to_v")]
    assert list(tensors) == [f"diffusion_model.{name}.lora_{side}.weight" for name in names for side in "AB"]
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    found = deltas({key: tensor.float() for key, tensor in tensors.items()})
    expected = 0.5 * state.weights[f"{path}.up"] @ state.weights[f"{path}.down"]
    whole = torch.cat([found[f"diffusion_model.{name}"] for name in names])
    torch.testing.assert_close(whole, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("row", NATIVE)
def test_other_methods_of_such_a_family_keep_what_comfyui_reads(row):
    path = NATIVE[row]
    tensors = lora_tensors(trained(path, "dora", magnitude=torch.ones(1, 8)), FAMILIES[row])
    suffixes = ("alpha", "dora_scale", "lora_down.weight", "lora_up.weight")
    assert sorted(tensors) == [f"diffusion_model.{path}.{suffix}" for suffix in suffixes]


def test_chroma_keeps_down_up_and_alpha_which_comfyui_and_diffusers_read_under_comfyuis_names():
    path = "double_blocks.0.img_attn.qkv"
    suffixes = ("alpha", "lora_down.weight", "lora_up.weight")
    tensors = lora_tensors(trained(path), FAMILIES["Chroma"])
    assert sorted(tensors) == [f"diffusion_model.{path}.{suffix}" for suffix in suffixes]


def test_lumina_2s_fewer_keys_than_queries_are_not_split_for_comfyui_and_right_for_diffusers():
    layers = {"layers.0.attention.qkv": {DOWN: torch.randn(2, 8), UP: torch.randn(16, 2)}}
    found = deltas(to_diffusers(layers, FAMILIES["Lumina2"]))
    rows = {name.rpartition(".")[2]: len(delta) for name, delta in found.items()}
    assert rows == {"to_q": 8, "to_k": 4, "to_v": 4}
    state = trained("layers.0.attention.qkv", up=torch.randn(16, 2))
    assert all(".attention.qkv." in key for key in lora_tensors(state, FAMILIES["ZImage"]))
