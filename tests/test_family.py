"""A family is told by what ComfyUI detected, and a distilled model by its file's name."""

import pytest

from graft.training.family import FAMILIES, family_of
from graft.training.files.lora.names import ARCHITECTURES, architecture_of


def test_klein_has_no_input_for_guidance_and_is_drawn_with_a_scale():
    dev, klein = (family_of("Flux2", {"guidance_embed": embed}) for embed in (True, False))
    assert (dev.name, dev.guidance, dev.cfg) == ("Flux.2", 1.0, 1.0)
    assert (klein.name, klein.guidance, klein.cfg) == ("Flux.2 Klein", None, 4.0)
    assert klein.architecture == "flux-2-klein"


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("sd3.5_large_turbo", "turbo"),
        ("dreamshaperXL_v21TurboDPMSDE", "turbo"),
        ("sdxlTurbo", "turbo"),
        ("juggernautXL_v50LightningBakedvae", "lightning"),
        ("dreamshaper_8LCM", "lcm"),
        ("Hyper-SDXL-8steps", "hyper"),
        ("flux-2-klein-4b-fp8", "klein"),
    ],
)
def test_a_file_named_like_a_distilled_model_is_drawn_without_guidance(file, word):
    family = family_of("SDXL", file=f"models/{file}.safetensors")
    assert family.cfg == 1.0 and f"({word})" in family.notes[0]


@pytest.mark.parametrize(
    "file", ["HyperRealistic_XL", "hyperrealism", "turbulence", "flux-2-klein-base-4b", "XLCMix", "plain"]
)
def test_other_names_say_nothing(file):
    assert family_of("SDXL", file=f"{file}.safetensors") == FAMILIES["SDXL"]


@pytest.mark.parametrize(
    ("file", "node"),
    [
        ("qwen_image_edit_fp8_e4m3fn", "TextEncodeQwenImageEdit"),
        ("Qwen-Image-Edit-Q4_K_M", "TextEncodeQwenImageEdit"),
        ("qwen_image_edit_2509_fp8", "TextEncodeQwenImageEditPlus"),
        ("Qwen-Image-Edit-Plus", "TextEncodeQwenImageEditPlus"),
        ("qwen_image_bf16", "TextEncodeQwenImageEditPlus"),
        ("", "TextEncodeQwenImageEditPlus"),
    ],
)
def test_the_first_qwen_image_edit_is_told_by_its_file(file, node):
    assert family_of("QwenImage", file=file).references == node


def test_an_architecture_is_told_by_its_paths_and_koala_by_its_levels():
    level = {2: "unet1", 3: "unet"}
    for block, row in level.items():
        paths = ("input_blocks.1.0.in_layers.2", f"input_blocks.{block}.0.op")
        assert architecture_of(paths) is ARCHITECTURES[row]
    assert not architecture_of(("blocks.0.attn.q",)).signs
    assert {family.export for family in FAMILIES.values()} - {""} <= ARCHITECTURES.keys()
