"""`graft bench` and `dev/bench.py`: one row a benchmark, figures as text or as one JSON object."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from graft.commands import bench as benchmarks
from graft.commands.bench.step_profile import int8_share, profile_step
from graft.commands.cli import main
from graft.dev import bench
from graft.dev.benchmarks import faults
from graft.training.memory.quantize import quantize


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_every_row_has_a_module_and_describes_itself(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, "--help"])
    assert ended.value.code == 0 and "--json" in capsys.readouterr().out


def test_faults_prints_one_json_object_and_fails_when_a_run_did_not_survive(capsys, monkeypatch):
    killed = {"tried": 1, "equal": 1, "per_optimizer": {}}
    monkeypatch.setattr(faults, "kill_runs", lambda tries, steps: killed)
    for outcome, code in (("ok", 0), ("assert 1 == 2", 1)):
        monkeypatch.setattr(faults, "run_faults", lambda outcome=outcome: {"full disk": outcome})
        monkeypatch.setattr(sys, "argv", ["bench.py", "faults", "--json"])
        assert bench.main() == code
        assert json.loads(capsys.readouterr().out) == {"kill9": killed, "faults": {"full disk": outcome}}


def test_every_fault_is_a_test_that_exists():
    for file, test in faults.FAULTS.values():
        assert f"def test_{test}(" in faults.path_of(file).read_text(encoding="utf-8")


def test_outcomes_are_told_by_test_with_the_reason_of_a_failure(tmp_path):
    path = tmp_path / "test_two.py"
    path.write_text(
        "import pytest\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_good(n): pass\n\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_bad(n): assert n == 2, 'no room'\n"
    )
    outcomes = faults.run_tests([f"{path}::test_good", f"{path}::test_bad"])
    assert outcomes["test_good"] == "ok" and "no room" in outcomes["test_bad"]


def test_the_parts_of_a_step_are_told_apart():
    weight, x = quantize(torch.ones(64, 96), "int8", torch.float32), torch.ones(128, 96)

    def steps(count):
        for _ in range(1 + 20 * count):
            weight.multiplication.forward(weight.parts, x, None)
            x @ x.T

    parts, products = profile_step(steps)
    assert {"int8 products", "products", "quantizing", "scaling"} <= set(parts)
    assert sum(parts.values()) == pytest.approx(1, abs=0.01)
    assert products == {(128, 96, 128): 20}
    ticks = iter(range(100))
    assert int8_share(products, lambda: next(ticks)) == 1, "each takes one tick"
