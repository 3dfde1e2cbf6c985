"""What Train Steps says before Run: what a run takes by its graph alone, and what would be regretted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from graft.tests.support.first_lora import first_lora
from graft.training.comfy import paths
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
    assert "s a step" not in told(graph)[0]
    write_run(tmp_path, seconds=7.0)
    assert "about 7 min, at the 14 s a step" in told(graph)[0]


def test_memory_and_disk_are_those_of_the_plans(graph):
    lines, warnings = told(graph)
    assert "memory (" in lines and "of disk" in lines and warnings == ""
    graph["80"] = {"class_type": "GraftMemorySettings", "inputs": {"budget_gb": 0.01}}
    graph[TRAIN]["inputs"]["memory_settings"] = ["80", 0]
    assert "of memory or more; 10.2 MiB are there" in told(graph)[1]


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
