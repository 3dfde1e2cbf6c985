"""dev/pairs.py from nothing to its picture, at its smallest size."""

import json
import os
import subprocess
import sys

from PIL import Image

from graft.tests.support.checkout import ROOT

SMALLEST = "--trained 2 --variants 1 --base-steps 1 --lora-steps 1 --held-out 1".split()


def test_a_pair_lora_is_trained_and_drawn_beside_its_input_and_target(tmp_path, comfyui):
    command = [sys.executable, str(ROOT / "dev" / "pairs.py"), "--work", str(tmp_path), *SMALLEST]
    subprocess.run(command, check=True, env={**os.environ, "COMFYUI_PATH": str(comfyui)}, timeout=600)
    errors = json.loads((tmp_path / "pairs.json").read_text())["errors"]
    assert errors.keys() == {"input", "base", "LoRA"} and min(errors.values()) > 0
    with Image.open(tmp_path / "pairs.png") as sheet:
        assert sheet.height > 4 * 90
    assert (tmp_path / "output" / "loras" / "cyanotype.safetensors").is_file()
