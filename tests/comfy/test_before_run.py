"""What Train Steps says before Run: what a run takes by its graph alone, and what would be regretted."""

from __future__ import annotations

import copy
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import comfy.model_management
import pytest
from PIL import Image

from graft.tests.support.first_lora import first_lora
from graft.tests.support.tiny_models import TINY
from graft.training.comfy import paths, versions
from graft.training.comfy.model.unload import is_loaded
from graft.training.comfy.run import before_run
from graft.training.comfy.run.before_run import look_ahead

TRAIN, OPTIMIZER = "5", "90"


@pytest.fixture
def graph(graft_nodes, base, tmp_path, monkeypatch):
    """The first template on 3 images that count twice, with an output folder of its own."""
    monkeypatch.setattr(paths.folder_paths, "get_output_directory", lambda: str(tmp_path))
    folder = base / "input" / "six"
    folder.mkdir(exist_ok=True)
    for color in ("red", "green", "blue"):
        Image.new("RGB", (64, 64), color).save(folder / f"{color}.png")
        (folder / f"{color}.txt").write_text(color)
    made = first_lora("soon", steps=30, batch_size=2)
    made["2"]["inputs"] |= {"folder": "six", "repeats": 2, "resolution": "64"}
    return made


def told(graph, is_new=True):
    found = look_ahead(graph, TRAIN, is_new=is_new)
    return "\n".join(found["lines"]), "\n".join(found["warnings"])


def write_run(output, seconds, **config):
    folder = Path(output) / "graft" / "soon-0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"batch_size": 1, "gradient_accumulation": 1, **config}))
    rows = ({"step": step, "seconds": seconds} for step in range(1, 9))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_epochs_count_batches_and_repeats(graph):
    assert "10 epochs of 6 images" in told(graph)[0]
    graph[TRAIN]["inputs"]["steps"] = 60
    assert "20 epochs of 6 images" in told(graph)[0]


def test_time_is_that_of_the_last_run_of_this_name_at_this_batch_size(graph, tmp_path):
    write_run(tmp_path, seconds=7.0)
    assert "about 7:00, at the 14 s a step of the last run" in told(graph)[0]


def test_without_an_earlier_run_the_time_is_estimated_from_what_the_device_computes(graph, monkeypatch):
    found = []
    for flops in (1e9, 1e8):
        monkeypatch.setattr(before_run, "operations_a_second", lambda *_, flops=flops: flops)
        line = next(line for line in told(graph)[0].splitlines() if "at an estimated" in line)
        found.append(float(re.search(r"estimated ([0-9.e+]+) s a step", line)[1]))
    assert found[0] > 0 and found[1] == pytest.approx(10 * found[0], rel=0.1)


@pytest.mark.parametrize(
    "changed, split, shown",
    [
        ({}, {"fraction": 0.33}, 4),
        ({}, {"fraction": 0.0, "names": "red*"}, 4),
        ({}, {"fraction": 0.33, "names": "red*"}, 2.67),
        ({"leave_out": "red.png"}, {}, 4),
        ({"resolution": "64, 128"}, {}, 12),
        ({"resolution": "64, 128"}, {"fraction": 0.33}, 8),
    ],
)
def test_epochs_count_what_is_left_out_held_out_and_trained_at_several_sizes(graph, changed, split, shown):
    graph["2"]["inputs"] |= changed
    if split:
        inputs = {"dataset": graph[TRAIN]["inputs"]["dataset"], "fraction": 0.0, "names": "", **split}
        graph["81"] = {"class_type": "GraftSplitDataset", "inputs": inputs}
        graph[TRAIN]["inputs"]["dataset"] = ["81", 0]
    assert f"{60 / shown:.3g} epochs" in told(graph)[0]


def test_epochs_count_the_settings_and_shares_of_datasets_that_are_joined(graph):
    graph["91"] = {"class_type": "GraftDatasetSettings", "inputs": {"regularisation": True}}
    graph["92"] = copy.deepcopy(graph["2"])
    graph["92"]["inputs"] |= {"repeats": 1, "dataset_settings": ["91", 0]}
    given = {"dataset_1": ["2", 0], "dataset_2": ["92", 0]}
    graph["93"] = {"class_type": "GraftJoinDatasets", "inputs": {**given, "shares": ""}}
    graph["3"]["inputs"]["dataset"] = ["93", 0]
    assert "of 9 images" in told(graph)[0]
    graph["93"]["inputs"]["shares"] = "1, 1"
    assert "of 12 images" in told(graph)[0]
    split = {"dataset": ["3", 0], "fraction": 0.33, "names": ""}
    graph["94"] = {"class_type": "GraftSplitDataset", "inputs": split}
    graph[TRAIN]["inputs"]["dataset"] = ["94", 0]
    assert "of 10 images" in told(graph)[0], "regularization images are not held out"


def test_memory_and_disk_are_those_of_the_plans(graph):
    lines, warnings = told(graph)
    assert "memory (" in lines and "of disk" in lines and warnings == ""
    graph["80"] = {"class_type": "GraftMemorySettings", "inputs": {"budget_gb": 0.01}}
    graph[TRAIN]["inputs"]["memory_settings"] = ["80", 0]
    assert "of memory or more; 10.2 MiB are there" in told(graph)[1]


def test_an_estimate_leaves_what_comfyui_has_loaded(graph):
    before_run._outlined.cache_clear()
    patcher = TINY["sd35m"]()
    comfy.model_management.load_models_gpu([patcher])
    assert "memory (" in told(graph)[0] and is_loaded(patcher)


def test_an_estimate_steps_aside_for_a_prompt(graph, monkeypatch):
    before_run._outlined.cache_clear()
    queue = SimpleNamespace(get_tasks_remaining=lambda: 1)
    monkeypatch.setattr(versions, "running_server", lambda: SimpleNamespace(prompt_queue=queue))
    lines, warnings = told(graph)
    assert "epochs" in lines and "memory" not in lines + warnings


def test_switches_of_training_are_one_threads_at_a_time():
    order, begun = [], threading.Event()

    def another():
        begun.set()
        with versions.training_mode():
            order.append("another")

    thread = threading.Thread(target=another)
    with versions.training_mode(), versions.training_mode():
        thread.start()
        begun.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "another"]


@pytest.mark.parametrize(
    "optimizer, rate, warned",
    [("adamw", 1e-4, False), ("adamw", 10.0, True), ("lion", 1e-3, True), ("adafactor", 1e-3, False)],
)
def test_a_rate_that_breaks_a_lora_is_named_by_optimizer(graph, optimizer, rate, warned):
    graph[OPTIMIZER] = {"class_type": "GraftOptimizerSettings", "inputs": {"optimizer": optimizer}}
    graph[TRAIN]["inputs"] |= {"optimizer_settings": [OPTIMIZER, 0], "learning_rate": rate}
    assert ("mostly breaks a LoRA" in told(graph)[1]) == warned


def test_differences_take_a_tenth_of_the_rate(graph):
    graph[TRAIN]["inputs"]["learning_rate"] = 1e-3
    assert told(graph)[1] == ""
    graph["4"]["inputs"]["algorithm"] = "full"
    assert "above 0.0002 mostly breaks" in told(graph)[1]


def test_a_file_that_will_be_replaced_is_named_but_not_the_run_s_own(graph, tmp_path):
    (tmp_path / "loras").mkdir()
    (tmp_path / "loras" / f"{graph['6']['inputs']['name']}.safetensors").write_bytes(b"another")
    write_run(tmp_path, seconds=1.0)
    warnings = told(graph)[1]
    assert "Save LoRA will replace" in warnings and "1 other run called soon" in warnings
    assert told(graph, is_new=False)[1] == ""


def test_what_is_not_known_is_left_out(graph):
    graph["1"]["inputs"]["model"] = "gone.safetensors"
    graph["2"]["inputs"]["folder"] = "gone"
    assert told(graph) == ("", "")
