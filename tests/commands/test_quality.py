"""What `graft bench quality` concludes from the curves that it measured, and its trainers' settings."""

from __future__ import annotations

import pytest

from graft.commands.bench import curves
from graft.commands.bench.curves import Curve, Watch, compare
from graft.commands.bench.learners import config_of, parts_of_run
from graft.commands.bench.quality import KeptCurves, read_trainers, table


def curve(trainer, lr, values, seed=0, metric="loss"):
    steps = [10 * (i + 1) for i in range(len(values))]
    return Curve("style", trainer, seed, lr, steps, [0.1 * step for step in steps], {metric: values})


def found(*all_curves, metric="loss"):
    return compare(all_curves)["style"]["metrics"][metric]


def test_steps_to_match_are_those_to_the_nodes_best_value_each_at_its_best_rate():
    curves = (
        curve("graft", 1e-3, [0.6, 0.5, 0.4]),
        curve("graft", 1e-2, [0.5, 0.8, 0.9]),
        curve("comfyui", 1e-3, [0.9, 0.8, 0.8]),
        curve("comfyui", 1e-2, [0.9, 0.7, 0.5]),
    )
    result = found(*curves)
    assert result["steps_to_match"] == {"graft": 0.667, "comfyui": 1.0}
    assert result["best"] == {"graft": 0.4, "comfyui": 0.5}
    assert compare(curves)["style"]["best_rate"] == {"graft": 1e-3, "comfyui": 1e-2}


def test_the_median_of_the_seeds_counts_and_a_seed_that_never_gets_there_is_the_worst():
    node = [curve("comfyui", 1e-3, [0.9, 0.7, 0.5], seed) for seed in range(3)]
    ours = [[0.5, 0.5, 0.5], [0.9, 0.5, 0.5], [0.9, 0.9, 0.9]]
    graft = [curve("graft", 1e-3, values, seed) for seed, values in enumerate(ours)]
    result = found(*graft, *node)
    assert result["by_seed"]["graft"] == [0.333, 0.667, None]
    assert result["steps_to_match"]["graft"] == 0.667
    never = [curve("graft", 1e-3, [0.9, 0.9, 0.9], seed) for seed in range(3)]
    assert found(*never, *node)["steps_to_match"]["graft"] is None


def test_the_best_rate_is_that_of_the_first_seed():
    first = [curve("graft", 1e-2, [0.4]), curve("graft", 1e-3, [0.5])]
    result = found(*first, *(curve("graft", 1e-2, [value], seed) for seed, value in ((1, 0.6), (2, 0.7))))
    assert result["best"] == {"graft": 0.6}  # the median at that rate
    assert result["steps_to_match"] == {}  # without the node


def test_of_a_metric_that_is_better_when_higher_more_counts(monkeypatch):
    monkeypatch.setattr(curves, "METRICS", {"accuracy": False})
    result = found(
        curve("graft", 1e-3, [0.2, 0.8, 0.9], metric="accuracy"),
        curve("comfyui", 1e-3, [0.1, 0.2, 0.8], metric="accuracy"),
        metric="accuracy",
    )
    assert result["steps_to_match"]["graft"] == 0.667 and result["best"]["graft"] == 0.9


def test_tasks_are_compared_apart():
    other = Curve("character", "graft", 0, 1e-3, [10], [1.0], {"loss": [0.3]})
    result = compare([curve("graft", 1e-3, [0.5]), other])
    assert {task: each["metrics"]["loss"]["best"]["graft"] for task, each in result.items()} == {
        "style": 0.5,
        "character": 0.3,
    }


def test_measuring_is_off_the_clock(monkeypatch):
    times = iter([5.0, 105.0, 107.0, 207.0])
    monkeypatch.setattr(curves.time, "process_time", lambda: next(times))
    watch = Watch(Curve("style", "graft", 0, 1e-3), every=2, began=0.0)
    for step in range(1, 5):
        watch.look(step, lambda: {"loss": 0.123456})
    assert (watch.curve.steps, watch.curve.seconds) == ([2, 4], [5.0, 7.0])
    assert watch.curve.values == {"loss": [0.12346, 0.12346]}


def test_trainers_are_added_with_settings_as_in_config_json():
    trainers = read_trainers('{"plus": {"adapter": {"lora_plus_ratio": 4}}}')
    config = config_of(trainers["plus"], 1e-2, 7)
    assert (config.adapter.lora_plus_ratio, config.adapter.targets, config.adapter.rank) == (4.0, "all", 16)
    assert (config.optimizer.lr, config.seed) == (1e-2, 7)
    with pytest.raises(ValueError, match="adapter.lora_plus: unknown setting.* Did you mean"):
        read_trainers('{"plus": {"adapter": {"lora_plus": 4}}}')
    with pytest.raises(ValueError, match="add: expected JSON such as"):
        read_trainers("[1]")


def test_a_run_can_begin_with_other_settings():
    settings = {"adapter": {"rank": 8}, "first": {"steps": 5, "rate": 2, "objective": {"bias": 2.0}}}
    (first, before), (rest, after) = parts_of_run(settings, 1e-2, 7, 20)
    assert (before, after) == (5, 15) and first.adapter == rest.adapter and rest.adapter.rank == 8
    assert (first.optimizer.lr, rest.optimizer.lr) == (2e-2, 1e-2)
    assert (first.objective.bias, rest.objective.bias) == (2.0, 0.0)
    assert parts_of_run({"adapter": {"rank": 8}}, 1e-2, 7, 20) == [(rest, 20)]


def test_the_table_names_every_trainer_with_its_share_of_the_nodes_steps():
    both = [curve("graft", 1e-3, [0.5, 0.4]), curve("comfyui", 1e-3, [0.9, 0.5])]
    shown = table({"comparison": compare(both), "base": {"style": {"loss": 0.6}}})
    assert "style, loss (base 0.6)" in shown and "0.50" in shown and "comfyui" in shown


def test_kept_runs_are_not_run_again_and_other_settings_are_other_runs(tmp_path):
    ran = []

    def learn(seed, lr):
        ran.append((seed, lr))
        return curve("plus", lr, [0.5], seed)

    for steps, ratio in ((60, 4.0), (60, 4.0), (60, 8.0), (80, 8.0)):
        kept = KeptCurves(tmp_path / "runs.jsonl")
        result = kept.get(
            learn, [{"steps": steps}, {"adapter": {"lora_plus_ratio": ratio}}, "style"], 1, 1e-3
        )
        assert result == curve("plus", 1e-3, [0.5], 1)
    assert len(ran) == 3
