"""A machine with a graphics card, PyTorch and little else runs the tests for such a card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MISSING = (
    "aiohttp", "alembic", "av", "bitsandbytes", "comfy_aimdo", "comfy_kitchen", "diffusers", "kornia", "peft",
    "prodigyopt", "schedulefree", "spandrel", "sqlalchemy", "torchsde", "transformers",
)  # fmt: skip
HIDE = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MISSING}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.parametrize("chosen", [["-m", "gpu"], ["tests/test_gpu.py"]], ids=["mark", "file"])
def test_tests_for_a_card_are_collected_without_comfyui_and_its_packages(tmp_path, chosen):
    (tmp_path / "sitecustomize.py").write_text(HIDE, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COMFYUI_PATH": str(tmp_path / "nowhere")}
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--collect-only", *chosen]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_gpu.py" in done.stdout and "error" not in done.stdout
