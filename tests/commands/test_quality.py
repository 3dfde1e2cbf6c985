"""What `graft bench quality` concludes from the curves that it measured."""

from graft.commands.bench.quality import Curve, comparison


def curve(lr, validation, pace):
    steps = [10 * (i + 1) for i in range(len(validation))]
    return Curve(lr, steps, validation, [pace * step for step in steps])


def test_each_side_counts_at_its_best_rate_at_equal_steps_and_seconds():
    ours = [curve(1e-3, [0.9, 0.6, 0.4], 0.1), curve(1e-2, [0.9, 0.8, 0.7], 0.1)]
    theirs = [curve(1e-3, [0.9, 0.9, 0.9], 0.2), curve(1e-2, [0.8, 0.7, 0.6], 0.2)]
    found = comparison(ours, theirs)
    assert found["best"] == {"ours": 1e-3, "train_lora_node": 1e-2}
    assert found["at_equal_steps"] == {"ours": 0.4, "train_lora_node": 0.6}
    assert found["at_equal_seconds"] == {"seconds": 3.0, "ours": 0.4, "train_lora_node": 0.8}
    assert found["steps_to_match"] == 0.667


def test_steps_to_match_are_those_of_the_fastest_rate_on_both_sides():
    ours = [curve(1e-3, [0.9, 0.6, 0.4], 0.1), curve(1e-2, [0.55, 0.8, 0.9], 0.1)]
    theirs = [curve(1e-3, [0.9, 0.7, 0.6], 0.2), curve(1e-2, [0.9, 0.6, 0.7], 0.2)]
    assert comparison(ours, theirs)["steps_to_match"] == 0.5


def test_a_loss_that_is_never_reached_has_no_ratio():
    found = comparison([curve(1e-3, [0.9, 0.8], 0.1)], [curve(1e-3, [0.5, 0.4], 0.1)])
    assert found["steps_to_match"] is None
