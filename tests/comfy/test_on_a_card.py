"""What trains on the CPU also trains on the pretended device of `tests/support/card.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graft.tests.support.tiny_models import TINY

GRADIENTS = "test_every_adapter_parameter_has_a_gradient_by_step_two"
STOCK = "test_the_saved_file_through_the_stock_loader_is_the_attached_adapter"
UNTOUCHED = "test_the_base_is_byte_identical_after_training"
HERE = Path(__file__).parent
THERE = (
    "test_crossings.py",
    "test_training.py",
    "test_first_lora.py::test_the_workflow_trains_saves_and_samples",
    "test_text_encoders.py",
    "test_fingerprint.py::test_every_number_of_every_weight_counts[flux]",
    *(f"test_families.py::{GRADIENTS}[{name}]" for name in TINY),
    *(f"test_families.py::{STOCK}[{name}-lora]" for name in ("sdxl", "sd35m", "flux")),
    *(f"test_families.py::{UNTOUCHED}[{name}]" for name in ("sdxl", "sd35m", "flux")),
    "test_encoders.py::test_encoders_have_left_the_device_before_the_base_is_held",
)
"""The tests that run there; GRAFT_TEST_DEVICE=card runs all of tests/comfy there, which takes minutes."""
SAME = "not estimated and not plan_counts and not held_out and not compiled_blocks"
"""What counts memory or compiles, and so says nothing of a device."""


@pytest.mark.feature(87, 89, 131)
def test_what_trains_on_the_cpu_trains_on_another_device():
    """In a process of its own, which takes the device for good."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-k", SAME, *(str(HERE / name) for name in THERE)]
    environment = os.environ | {"GRAFT_TEST_DEVICE": "card"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
