"""The table of plans is corrected by a step that is really computed, and trains nothing."""

from __future__ import annotations

import pytest
import torch

from graft.tests.support.memory import BATCH, CONFIG
from graft.tests.support.tiny import TinyDenoiser
from graft.training.memory import plan_table as module
from graft.training.memory.plan import MemoryPlan, candidates, every_plan, make_estimator
from graft.training.memory.plan_table import Probe, probe, tabulate_plans


def test_a_step_takes_about_what_was_estimated():
    denoiser = TinyDenoiser()
    measured = probe(denoiser, denoiser.specs, CONFIG, BATCH, candidates(CONFIG.memory))
    estimate = make_estimator(denoiser, denoiser.specs, CONFIG, BATCH)(measured.plan).step
    assert measured.plan == MemoryPlan("resident", "none") and measured.seconds > 0
    assert measured.peak == pytest.approx(estimate.peak, rel=0.1)
    assert all("forward" not in vars(part) for part in denoiser.module.modules())


def test_a_plan_that_runs_out_of_memory_is_not_the_one_measured():
    class Small(TinyDenoiser):
        calls = 0

        def denoise(self, *args):
            self.calls += 1
            if self.calls == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().denoise(*args)

    denoiser = Small()
    assert probe(denoiser, denoiser.specs, CONFIG, BATCH, candidates(CONFIG.memory)).plan == MemoryPlan(
        "resident", "selective"
    )


def test_every_plan_is_corrected_by_it(monkeypatch):
    def rows(factor):
        step = make_estimator(denoiser, denoiser.specs, CONFIG, BATCH)(MemoryPlan("resident", "none")).step
        measured = Probe(MemoryPlan("resident", "none"), round(step.peak * factor), 2.0)
        monkeypatch.setattr(module, "probe", lambda *args: measured)
        return tabulate_plans(denoiser, denoiser.specs, CONFIG, BATCH, every_plan()).splitlines()

    denoiser = TinyDenoiser()
    plain, doubled = rows(1), rows(2)
    assert "2 s" in plain[1] and "measured with base resident, checkpointing none" in plain[-2]

    def steps(lines):
        return [float(line.split("MiB")[2]) for line in lines[1 : 1 + len(every_plan())]]

    assert steps(doubled) == pytest.approx([2 * size for size in steps(plain)], abs=0.11)
