"""`graft demo` trains what its options say; that it runs: tests/test_wheel.py."""

from __future__ import annotations

import argparse

import pytest

from graft.commands import demo
from graft.tests.support.jobs import images
from graft.training.job.graph import of_kind


def plans(*options):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return {plan.name: plan for plan in demo.make_plans(parser.parse_args([*map(str, options)]))}


def inputs(plan, kind):
    return [plan.prompt[node]["inputs"] for node in of_kind(plan.prompt, kind)]


def test_a_style_and_a_character_are_trained_and_other_prompts_preserved_beside_the_character():
    made = plans()
    assert list(made) == ["style", "character"]
    [train], [dataset] = (
        inputs(made["character"], "GraftTrainSteps"),
        inputs(made["character"], "GraftLoadDataset"),
    )
    objective = made["character"].prompt[train["objective_settings"][0]]["inputs"]
    words = made["character"].prompt[dataset["dataset_settings"][0]]["inputs"]
    assert (objective["preservation"], objective["preservation_share"]) == (4, 0.5)
    assert (dataset["trigger"], words["class_word"]) == ("mibo", "animal")
    assert not inputs(made["style"], "GraftObjectiveSettings")


def test_what_is_measured_has_none_of_the_settings_of_training():
    plan = plans()["character"]
    prompt, _ = demo.prompts.held_out(plan.prompt, "character.safetensors", plan.folders)
    assert all(
        link[0] in prompt
        for node in prompt.values()
        for link in node["inputs"].values()
        if type(link) is list
    )


def test_ones_own_images_are_trained_as_the_workflow_does(tmp_path):
    images(tmp_path / "mine")
    [plan] = plans("--dataset", tmp_path / "mine", "--trigger", "ohwx", "--steps", 7).values()
    [train] = inputs(plan, "GraftTrainSteps")
    assert train["steps"] == 7 and "objective_settings" not in train
    assert inputs(plan, "GraftLoadDataset")[0]["trigger"] == "ohwx"


def test_a_file_that_is_not_there_is_named_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        plans("--checkpoint", tmp_path / "base.safetensors")
