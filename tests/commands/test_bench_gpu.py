"""`graft bench gpu` does its list piece by piece, and says what is left."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from graft.commands.bench import gpu
from graft.commands.bench.gpu_parts import PARTS, PLANS
from graft.commands.cli import main
from graft.training.user_error import UserError

THREE = PARTS[:3]


def arguments(tmp_path, **changed):
    known = {"device": "cpu", "size": "dry", "results": tmp_path / "r.json", "minutes": 9.0, "again": False}
    return Namespace(**{**known, **changed})


class Clock:
    """Each part takes 200 seconds."""

    now = 0.0

    def __call__(self):
        return self.now

    def run(self, part, left):
        assert left >= part.seconds
        self.now += 200
        return {"failed": "no"} if part is THREE[1] else {"rows": []}


def test_a_call_does_the_parts_that_end_in_time_and_the_next_goes_on(tmp_path):
    args, clock = arguments(tmp_path, minutes=6), Clock()
    found = gpu.run_next(THREE, args, clock.run, clock)
    assert list(found["parts"]) == [part.name for part in THREE[:2]]
    assert json.loads(args.results.read_text()) == found
    again = gpu.run_next(THREE, args, clock.run, clock)
    assert list(again["parts"]) == [part.name for part in THREE] and clock.now == 600
    gpu.run_next(THREE, args, clock.run, clock)
    assert clock.now == 600, "all is done"


def test_what_failed_is_done_again_only_when_asked(tmp_path):
    clock = Clock()
    gpu.run_next(THREE, arguments(tmp_path, minutes=60), clock.run, clock)
    gpu.run_next(THREE, arguments(tmp_path, minutes=60, again=True), clock.run, clock)
    assert clock.now == 800


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"device": "cpu", "size": "dry", "parts": 3}'])
def test_another_file_is_not_written_over(tmp_path, content):
    args = arguments(tmp_path)
    args.results.write_text(content)
    with pytest.raises(UserError, match="holds no results"):
        gpu.run_next(THREE, args, Clock().run)
    assert args.results.read_text() == content


def test_results_of_another_device_are_not_mixed(tmp_path):
    gpu.run_next(THREE[:1], arguments(tmp_path), Clock().run)
    with pytest.raises(UserError, match="holds results of .*cpu.* not of .*cuda"):
        gpu.run_next(THREE, arguments(tmp_path, device="cuda", size="full"), Clock().run)


def test_a_part_that_is_unknown_is_named(capsys):
    assert main(["bench", "gpu", "--only", "nothing"]) == 2
    assert "no part is named nothing; the parts are sdxl bf16, " in capsys.readouterr().err


def test_every_plan_of_every_model_is_on_the_list_and_fits_a_call():
    names = {part.name for part in PARTS}
    assert {f"{model} {plan}" for model in ("sdxl", "sd35m", "sd35l", "flux") for plan in PLANS} <= names
    assert {"dynamic on", "dynamic off", "tests", "sdxl plans", "flux in 11 GiB"} <= names
    assert len(names) == len(PARTS) and all(part.seconds <= 60 * gpu.MINUTES for part in PARTS)


def test_a_part_runs_in_a_process_of_its_own_and_stands_in_the_table(tmp_path, capsys):
    command = ["bench", "gpu", "--device", "cpu", "--size", "dry", "--only", "flux stream", "tests"]
    assert main([*command, "--results", str(tmp_path / "r.json"), "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["flux", "stream", "stream,", "block-offload"], lines
    assert lines[-2:] == ["tests: these tests are for a GPU", "2 of 2 parts are done."]


def test_a_part_that_fails_or_takes_too_long_is_told_with_its_reason(tmp_path):
    args = arguments(tmp_path, folder=None, program=["-c", "import sys; sys.exit('no memory left')"])
    assert gpu._run_alone(THREE[0], args, 60.0)["failed"] == "no memory left"
    args.program = ["-c", "import time; time.sleep(60)"]
    assert gpu._run_alone(THREE[0], args, 0.2) == {"failed": "did not end within 0 s"}
    assert "sdxl bf16: no memory left" in gpu.as_table({"parts": {"sdxl bf16": {"failed": "no memory left"}}})
