"""The check of exported files (dev/check_exports.py) over a few of them: what passes, and what it finds."""

import dataclasses
import shutil

import pytest
from safetensors.torch import load_file, save_file

from graft.dev.exports import in_comfyui, report
from graft.dev.exports.files import DTYPES

CASES = ["Flux/LoRA attn", "Flux/DoRA", "SD3.5M/text LoRA", "Flux.2/LoCon", "Chroma/LoCon"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder and its files."""
    out = tmp_path_factory.mktemp("exports")
    return out, [file for file in in_comfyui.write(out, CASES) if not file.refused]


def one(files, dtype="fp32"):
    return next(file for file in files if file.case == "LoRA attn" and file.dtype == dtype)


@pytest.mark.feature(21)
def test_comfyui_loads_what_was_trained(written):
    out, files = written
    results = list(in_comfyui.read(out, files, "ComfyUI 1"))
    assert {(result.file.family, result.file.case) for result in results} == {
        tuple(case.split("/")) for case in CASES
    }
    assert not report.faults(results)
    assert all(result.layers for result in results)
    expected = [result for result in results if not report.reason(result)]
    assert all(result.ratio == pytest.approx(1.0, abs=2e-3) for result in expected)


@pytest.mark.feature(21)
def test_diffusers_loads_what_was_trained(written):
    pytest.importorskip("diffusers")
    from graft.dev.exports import in_diffusers

    out, files = written
    results = list(in_diffusers.read(out, files, f"diffusers {in_diffusers.version}"))
    assert not report.faults(results)
    sound = {result.file.family for result in results if result.sound}
    assert sound == {"Flux", "SD3.5M", "Flux.2", "Chroma"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lost_alpha_a_lost_layer_and_numbers_that_are_none_are_found(written, dtype, tmp_path):
    out, files = written
    file = one(files, dtype)
    shutil.copytree(out / "Flux", tmp_path / "Flux")
    tensors = load_file(file.path(out))
    first = min(tensors).rpartition(".")[0]
    changed = {
        "alpha": {key: tensor for key, tensor in tensors.items() if not key.endswith("alpha")},
        "layer": {key.replace(first, first + "x"): tensor for key, tensor in tensors.items()},
        "absent": {key: tensor for key, tensor in tensors.items() if not key.startswith(first)},
        "nan": {**tensors, f"{first}.lora_up.weight": tensors[f"{first}.lora_up.weight"] / 0},
    }
    found = {}
    for name, weights in changed.items():
        other = dataclasses.replace(file, format=name)
        save_file(weights, other.path(tmp_path))
        [result] = in_comfyui.read(tmp_path, [other], "ComfyUI")
        found[name] = report.fault(result)
    assert found["alpha"].startswith("relative error of 1.0e+00 in ")
    assert found["nan"].startswith("relative error of inf in ")
    assert found["layer"].startswith("1 layers lost") and "lora key not loaded" in found["layer"]
    assert found["absent"].startswith("1 layers lost") and "not loaded" not in found["absent"]


def test_a_file_that_loads_though_it_is_listed_as_missing_is_a_fault(written, monkeypatch):
    out, files = written
    results = list(in_comfyui.read(out, [one(files)], "ComfyUI 1"))
    assert not report.faults(results)
    row = report.Missing("ComfyUI *", "no reason", family="Flux")
    monkeypatch.setattr(report, "MISSING", (row,))
    [line] = report.faults(results)
    assert line.endswith("MISSING lists them (no reason), but they load")
    assert report.table(results).endswith("not there, 1 files: no reason")
