"""The `graft` command: what it does with files, and what it says of those that it cannot use."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import graft
from graft.commands import clean, train
from graft.commands.cli import main
from graft.training.files.lora.metadata import with_hashes
from graft.training.files.lora.read import read_lora
from graft.training.job.read import read_job
from graft.training.user_error import FileError, UserError

from ..support.lora_files import PREFIX, checkpoint, lora_path, lora_tensors, weight_differences

QKV = f"{PREFIX}blocks.0.attn.qkv.weight"


@pytest.fixture
def at(tmp_path):
    """Paths of base, tuned and lora, and of results in `out`."""
    base, other = checkpoint(), checkpoint(seed=5)
    save_file(base, tmp_path / "base.safetensors", {"format": "pt", "modelspec.title": "Base"})
    save_file({key: base[key] + 0.1 * other[key] for key in base}, tmp_path / "tuned.safetensors")
    lora_path(tmp_path, ss_base_model_version="sdxl_base_v1-0")
    return lambda name: str(tmp_path / f"{name}.safetensors")


def test_extract_writes_a_lora_that_merges_back(at, capsys):
    assert main(["extract", at("base"), at("tuned"), "-o", at("out"), "--rank", "99", "--dtype", "fp32"]) == 0
    assert "out.safetensors: 4 layers, rank 6 to 8" in (report := capsys.readouterr().out)
    assert "first_stage_model.conv.weight" in report
    assert main(["merge", at("base"), at("out"), "-o", at("again")]) == 0
    assert torch.allclose(load_file(at("again"))[QKV], load_file(at("tuned"))[QKV], atol=1e-5)


def test_merge_adds_the_lora_and_keeps_the_metadata(at, capsys):
    assert main(["merge", at("base"), at("lora"), "-o", at("out"), "--strength", "0.5"]) == 0
    difference = load_file(at("out"))[QKV] - load_file(at("base"))[QKV]
    assert torch.allclose(difference, 0.5 * weight_differences(lora_tensors())[QKV], atol=1e-5)
    with safe_open(at("out"), "pt") as merged:
        assert merged.metadata()["modelspec.title"] == "Base"
    assert main(["merge", at("out"), at("lora"), "-o", at("twice")]) == 2
    assert "already merged into out.safetensors" in capsys.readouterr().err


def test_resize_by_rank_and_by_energy(at):
    assert main(["resize", at("lora"), "-o", at("small"), "--rank", "2"]) == 0
    small = read_lora(Path(at("small")))
    assert {layer.rank for layer in small.layers.values()} == {2} and small.metadata["ss_network_dim"] == "2"
    assert small.layers["lora_unet_conv_in"].tensors["lora_up.weight"].dtype == torch.float16
    again = with_hashes(load_file(at("small")), small.metadata)
    assert small.metadata == again and small.metadata["ss_network_args"] == "{}"
    assert main(["resize", at("lora"), "-o", at("share"), "--energy", "0.9", "--dtype", "fp32"]) == 0


@pytest.mark.parametrize("layout", ["kohya", "native", "peft"])
def test_convert_keeps_what_the_lora_computes_and_its_metadata(at, layout):
    assert main(["convert", at("lora"), "-o", at("out"), "--layout", layout, "--base", at("base")]) == 0
    assert main(["convert", at("out"), "-o", at("back"), "--base", at("base")]) == 0
    back, file = read_lora(Path(at("back"))), read_lora(Path(at("lora")))
    assert back.metadata.items() >= file.metadata.items()
    assert back.metadata == with_hashes(load_file(at("back")), file.metadata)
    for name, layer in file.layers.items():
        assert torch.equal(back.layers[name].product(), layer.product())


def test_inspect_for_people_and_for_machines(at, capsys):
    assert main(["inspect", at("lora")]) == 0
    assert "sdxl_base_v1-0" in capsys.readouterr().out
    assert main(["inspect", at("lora"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 4


COMMANDS = {
    "merge": ["merge", "base", "lora"],
    "extract": ["extract", "base", "tuned", "--rank", "2"],
    "resize": ["resize", "lora", "--rank", "2"],
    "convert": ["convert", "lora"],
}


def call(at, command, output, **instead):
    """Run a command with the files it needs, or others in their place."""
    files = {name: instead.get(name, at(name)) for name in ("base", "lora", "tuned")}
    words = [files.get(word, word) for word in COMMANDS[command]]
    return main([*words, "-o", output])


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_replaces_the_file_it_reads(at, command, capsys):
    source = at(COMMANDS[command][1])
    before = Path(source).read_bytes()
    assert call(at, command, source) == 2
    assert "would replace a file that it is made from" in capsys.readouterr().err
    os.link(source, at("link"))
    assert call(at, command, at("link")) == 2
    assert Path(source).read_bytes() == before


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_cannot_be_written_is_one_line(at, command, capsys):
    Path(at("x")).with_suffix("").write_text("a file, not a folder")
    for output, message in (
        (str(Path(at("x")).with_suffix("") / "out.safetensors"), "cannot be written"),
        (str(Path(at("x")).with_suffix(".ckpt")), "give it that extension"),
    ):
        assert call(at, command, output) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not list(Path(at("x")).parent.glob(".*"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_result_goes_into_a_folder_that_exists(at, command, capsys):
    folder = Path(at("x")).parent / "no" / "such"
    assert call(at, command, str(folder / "out.safetensors")) == 2
    error = capsys.readouterr().err
    assert f"the folder {folder} does not exist; make it, or choose another." in error
    assert not folder.parent.exists() and error.count("\n") == 1


def test_the_version_is_the_projects(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    text = (Path(graft.__file__).parent / "pyproject.toml").read_text(encoding="utf-8")
    number = capsys.readouterr().out.removeprefix("graft ").strip()
    assert ended.value.code == 0 and f'\nversion = "{number}"\n' in text


@pytest.mark.parametrize("command", ["train", "export-workflow"])
def test_a_file_that_the_system_does_not_give_is_one_line_with_its_name_and_no_number(
    tmp_path, command, capsys
):
    (tmp_path / "file").touch()
    cases = {
        "nothere.yaml": "does not exist; look at how its path is written.",
        ".": "is a folder; give a file.",
        "file/job.yaml": "leads through a file as if it were a folder; look at how its path is written.",
    }
    for name, message in list(cases.items())[: 1 if os.name == "nt" else None]:
        assert main([command, str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == f"graft {command}: {tmp_path / name}: {message}\n"


def test_all_errors_of_a_job_are_said_before_comfyui_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "server", lambda *args, **options: pytest.fail("ComfyUI was started"))
    comfyui = tmp_path / "comfyui"
    (comfyui / "comfy").mkdir(parents=True), (comfyui / "main.py").touch()
    (comfyui / "input" / "cats").mkdir(parents=True)
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    job = tmp_path / "job.yaml"
    for folder, count in (("/path/to/images/folder", 2), ("dogs", 2), ("cats", 1)):
        job.write_text(
            f"{{model: {{name_or_path: base.safetensors}}, train: {{steps: x}}, "
            f"datasets: [{{folder_path: {folder}}}]}}"
        )
        assert main(["train", str(job)]) == 2
        error = capsys.readouterr().err
        assert "train.steps: expected a number, found 'x'." in error
        assert (f"datasets[0].folder_path: {folder} does not exist" in error) is (count == 2)


def test_a_dataset_is_looked_for_where_comfyui_would_find_it(tmp_path, monkeypatch):
    comfyui = tmp_path / "comfyui"
    (comfyui / "comfy").mkdir(parents=True), (comfyui / "main.py").touch()
    (comfyui / "input" / "cats" / "small").mkdir(parents=True)
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    there = ["cats", "cats/small", "starter/dataset", "demo/dataset"]
    names = (*there, "dogs", "../comfyui", "tests")
    assert [name for name in names if train.has_dataset(name)] == there
    example = Path(graft.__file__).parent / "example_workflows" / "jobs" / "first_lora.yaml"
    assert read_job(example, train.has_dataset).name == "first_lora"
    (comfyui / "extra_model_paths.yaml").write_text("mine:\n    graft_datasets: /photos\n")
    assert train.has_dataset("dogs")


def test_clean_refuses_a_folder_that_holds_nothing_of_graft(tmp_path, capsys):
    (tmp_path / "holiday.png").touch()
    assert main(["clean", str(tmp_path)]) == 2
    assert "holds nothing that Graft encoded" in capsys.readouterr().err
    (tmp_path / "latents").mkdir()
    assert main(["clean", str(tmp_path)]) == 0


@pytest.mark.parametrize("days", ["nan", "inf", "-1"])
def test_clean_refuses_days_that_are_none_before_it_looks_at_the_folder(days, tmp_path, capsys):
    assert main(["clean", str(tmp_path), "--unused-days", days]) == 2
    assert "unused-days: " in capsys.readouterr().err


def raw_file(path, header):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    return str(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"__metadata__": ["kohya"]}, "its metadata is not a mapping of text to text"),
        (
            {"a\x1b[2Jb": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}},
            "names that cannot be printed",
        ),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "convert", "resize"])
def test_a_header_that_no_program_writes_is_one_line(command, header, message, tmp_path, capsys):
    file = raw_file(tmp_path / "odd.safetensors", header)
    output = ["-o", str(tmp_path / "out.safetensors")] if command != "inspect" else []
    assert main([command, file, *output, *(["--rank", "1"] if command == "resize" else [])]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and said.removesuffix("\n").isprintable()


def test_a_link_to_itself_is_one_line(at, capsys):
    os.symlink(at("loop"), at("loop"))
    assert main(["convert", at("loop"), "-o", at("out")]) == 2
    said = capsys.readouterr().err
    assert "loop.safetensors" in said and said.count("\n") == 1


def test_a_difference_too_large_to_resize_is_named_with_its_layer(at, capsys):
    tensors = {key: 1e30 * tensor for key, tensor in lora_tensors().items()}
    save_file(tensors, at("large"))
    assert main(["resize", at("large"), "-o", at("out"), "--rank", "2"]) == 2
    said = capsys.readouterr().err
    assert "large.safetensors: lora_" in said and "infinite numbers or NaN" in said


def test_half_a_letter_in_metadata_is_written_as_its_code(at):
    header = {"__metadata__": {"ss_tag_frequency": "\ud800"}}
    for key, tensor in lora_tensors().items():
        first = sum(
            entry["data_offsets"][1] - entry["data_offsets"][0] for entry in list(header.values())[1:]
        )
        span = [first, first + 4 * tensor.numel()]
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    body = b"".join(tensor.numpy().tobytes() for tensor in lora_tensors().values())
    Path(at("half")).write_bytes(len(text).to_bytes(8, "little") + text + body)
    assert main(["convert", at("half"), "-o", at("out"), "--layout", "kohya"]) == 0
    assert read_lora(Path(at("out"))).metadata["ss_tag_frequency"] == r"\ud800"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("command", ["train", "export-workflow"])
def test_a_pipe_as_a_job_file_is_named_and_not_waited_for(command, tmp_path, capsys):
    os.mkfifo(tmp_path / "job.yaml")
    output = ["-o", str(tmp_path / "graph.json")] if command == "export-workflow" else []
    assert main([command, str(tmp_path / "job.yaml"), *output]) == 2
    assert "job.yaml: it is a pipe, a socket or a device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("card", "lots"), ("resolution", "big"), ("resolution", "9" * 12), ("batch", "9" * 12), ("rank", "0")],
)
def test_plan_refuses_a_size_that_is_none_before_it_looks_at_the_file(option, value, capsys):
    assert main(["plan", "nothere.safetensors", f"--{option}", value]) == 2
    said = capsys.readouterr().err.replace("'", "")
    assert said.startswith(f"graft plan: {option}: {value}")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user without rights")
def test_a_folder_without_rights_is_one_line(at, capsys):
    folder = Path(at("x")).parent / "closed"
    folder.mkdir(mode=0o555)
    assert call(at, "resize", str(folder / "out.safetensors")) == 2
    assert "cannot be written (Permission denied)" in capsys.readouterr().err


def test_a_full_disk_leaves_the_old_file_and_nothing_else(at, capsys, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    Path(at("out")).write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", full)
    assert call(at, "resize", at("out")) == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert Path(at("out")).read_bytes() == b"before" and not list(Path(at("out")).parent.glob(".*"))


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_and_broken_files_are_one_line(at, command, capsys):
    Path(at("broken")).write_bytes(b"no")
    for name, message in (("nowhere", "cannot be read"), ("broken", "not a safetensors file")):
        for place in set(COMMANDS[command]) & {"base", "lora", "tuned"}:
            assert call(at, command, at("out"), **{place: at(name)}) == 2
            error = capsys.readouterr().err
            assert f"{name}.safetensors: " in error and message in error and error.count("\n") == 1
    assert not Path(at("out")).exists()


def test_letters_that_a_console_lacks_end_no_command(at, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", console)
    name = "\u732b"
    os.rename(at("lora"), at(name))
    assert main(["inspect", at(name)]) == 0
    console.flush()
    assert b"\\u732b" in console.buffer.getvalue()


def test_a_bug_keeps_its_traceback_and_what_the_user_can_solve_is_one_line(monkeypatch, capsys):
    for error in (UserError("rank: 0 is too low."), FileError("a.png: cannot be read.")):
        monkeypatch.setattr(clean, "run", lambda _, error=error: _raise(error))
        assert main(["clean", "cache"]) == 2
        assert capsys.readouterr().err == f"graft clean: {error}\n"
    monkeypatch.setattr(clean, "run", lambda _: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["clean", "cache"])


def _raise(error):
    raise error
