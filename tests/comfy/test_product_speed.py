"""What *auto* asks of the device: are this file's 8-bit products faster than whole ones?"""

import json

import pytest
import torch

from graft.training.comfy import paths
from graft.training.comfy.model import product_speed

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Replace the clock: 8-bit products take as long as is put in front, whole ones 2 seconds."""
    monkeypatch.setattr(paths, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(product_speed, "refusal", lambda format, device: "")
    stored, calls = [1.0], []

    def seconds(compute, device):
        compute()
        calls.append(compute.__name__)
        return stored[0] if compute.__name__ == "multiply_as_stored" else 2.0

    monkeypatch.setattr(product_speed, "_seconds", seconds)
    product_speed.is_faster.cache_clear()
    yield stored, calls, tmp_path / "cache" / "products.json"
    product_speed.is_faster.cache_clear()


def ask():
    product_speed.is_faster.cache_clear()  # as a new process does
    return product_speed.is_faster("int8", CPU)


@pytest.mark.parametrize(("seconds", "faster"), [(1.0, True), (3.0, False)])
def test_the_faster_way_is_measured_once_and_remembered(measured, seconds, faster):
    stored, calls, file = measured
    stored[0] = seconds
    assert [ask(), ask()] == [faster, faster]
    assert sorted(calls) == ["multiply_as_stored", "multiply_whole"]
    (key,) = json.loads(file.read_text())
    assert key.startswith("int8, ") and torch.__version__ in key


@pytest.mark.parametrize("damage", ["{", "[]", '"no"', "null"])
def test_a_damaged_note_is_measured_again(measured, damage):
    stored, calls, file = measured
    file.parent.mkdir()
    file.write_text(damage)
    assert ask() and ask()
    assert len(calls) == 2


def test_another_version_of_pytorch_is_measured_again(measured, monkeypatch):
    stored, calls, _ = measured
    assert ask()
    monkeypatch.setattr(product_speed.torch, "__version__", "99")
    stored[0] = 3.0
    assert not ask()


def test_a_device_without_such_products_is_not_measured(measured, monkeypatch):
    _, calls, file = measured
    monkeypatch.setattr(product_speed, "refusal", lambda format, device: "not implemented")
    assert not ask() and not calls and not file.exists()


def test_a_folder_that_cannot_be_written_costs_only_the_memory(measured, caplog):
    _, calls, file = measured
    file.parent.write_text("a file where the folder should be")
    assert ask()
    assert "the next start measures again" in caplog.text


def test_what_a_block_computes_in_a_second_is_measured_once_on_enough_tokens(measured, monkeypatch):
    _, _, file = measured
    rows = []

    def seconds(compute, device):
        compute()
        rows.append(len(rows))
        return 0.01 * len(rows)

    monkeypatch.setattr(product_speed, "_seconds", seconds)
    found = []
    for _ in range(2):
        product_speed.operations_a_second.cache_clear()
        found.append(product_speed.operations_a_second(torch.float32, CPU))
    assert rows == [0, 1], "the second size took 0.02 seconds"
    assert found[0] == found[1] > 1e9 and list(json.loads(file.read_text()).values()) == [found[0]]
    product_speed.operations_a_second.cache_clear()
