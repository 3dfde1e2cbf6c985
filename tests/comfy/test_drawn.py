"""The judge of the starter's pictures, and what `graft bench quality` has it say of what a LoRA draws."""

from __future__ import annotations

import pytest
from PIL import Image

from graft.commands.bench import drawn
from graft.commands.bench.drawn import Drawn
from graft.nodes.base_model import LoadBaseModel
from graft.starter.in_comfyui import BASE_MODEL, STARTER
from graft.starter.judge import Verdict, load_judge, shares
from graft.tests.support.starter_base import with_difference


@pytest.fixture(scope="module")
def judge():
    return load_judge()


@pytest.mark.parametrize(
    "folder", ("style", "style_validation", "character", "character_validation", "base_style")
)
def test_the_judge_names_the_shipped_pictures_as_their_captions_do(judge, folder):
    files = sorted((STARTER / folder).glob("*.png"))
    captions = [file.with_suffix(".txt").read_text(encoding="utf-8") for file in files]
    found = shares(judge, captions, [Image.open(file) for file in files])
    assert found.keys() == {"object"} | ({"style"} if "style" in folder else set())
    assert min(found.values()) > 0.9


def test_a_prompt_asks_for_the_longest_names_in_it(judge):
    assert judge.asked_for("a small blue cat, pixel art style") == Verdict("cat", "pixel art")
    assert judge.asked_for("Teddy bear on a meadow") == Verdict("teddy bear", "")
    assert judge.asked_for("neon sign of a mibo") == Verdict("mibo", "neon sign")
    assert judge.asked_for("catalog") == Verdict("", "")


def test_prompts_that_name_no_style_do_not_count_for_it(judge):
    red = Image.new("RGB", (32, 32), "red")
    assert shares(judge, ["catalog"], [red]) == {}
    assert shares(judge, ["cat", "dog"], [red, red]).keys() == {"object"}


@pytest.fixture(scope="module")
def pictures(graft_nodes, judge):
    """What draws one prompt of a task and one other, in one step; and the base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn, "STEPS", 1)
        patch.setattr(drawn, "OTHERS", ("dog",))
        model, clip, vae = LoadBaseModel.execute(BASE_MODEL).args
        yield Drawn(clip, vae, judge, ["cat, sunburst style"]), model


def test_the_base_does_not_drift_from_itself_and_another_model_does(pictures):
    drawer, base = pictures
    first = drawer.values(base)
    assert first == drawer.values(base) and first["drift"] == 0
    assert first.keys() == {"object", "style", "drift"}
    assert drawer.values(with_difference(base, strength=0.02))["drift"] > 0.01
