"""What `pip install graft-lora` would bring: all that ships, nothing else, and it works alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from graft.commands.headless.server import find_comfyui

from .support.checkout import ROOT, copy_checkout, make_environment, pip_install, plain_environment
from .support.first_lora import four_squares

ROOMS = {"commands", "nodes", "starter", "training", "web", "locales", "example_workflows", "subgraphs"}
ENTRIES = {"__init__.py", "__main__.py"}
IMPORT_ALL = """
import importlib, pkgutil, sys
import graft
from graft.commands.headless.import_comfyui import start_comfyui
start_comfyui()
found = [info.name for info in pkgutil.walk_packages(graft.__path__, "graft.")]
for name in found:
    importlib.import_module(name)
print(graft.__file__, len(found))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment into which the wheel of a copy of this checkout is installed: its programs."""
    place = tmp_path_factory.mktemp("wheel")
    programs = make_environment(place / "environment")
    pip_install(programs, str(copy_checkout(place / "graft-main")))
    return programs


@pytest.fixture(scope="module")
def installed(environment):
    """The installed folder `graft`."""
    (folder,) = environment.parent.rglob("site-packages/graft")
    return folder


def test_the_wheel_holds_the_rooms_that_ship_and_nothing_else(installed):
    assert {path.name for path in installed.iterdir()} - {"__pycache__"} == ROOMS | ENTRIES
    assert not [path for path in installed.parent.iterdir() if path.name in ("tests", "dev", "nodes")]


def test_the_wheel_holds_every_module_of_its_rooms(installed):
    def modules(root):
        return {path.relative_to(root).as_posix() for room in ROOMS for path in (root / room).rglob("*.py")}

    assert modules(installed) == modules(ROOT)


@pytest.fixture
def run(environment, tmp_path):
    """Run a program of that environment in an empty folder; return what it prints."""

    def of(program, *arguments):
        done = subprocess.run(
            [str(environment / program), *map(str, arguments)],
            cwd=tmp_path,
            env=plain_environment(COMFYUI_PATH=str(find_comfyui())),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return of


def test_every_module_of_the_wheel_imports(run, installed):
    file, count = run("python", "-c", IMPORT_ALL).split()
    assert Path(file).parent == installed and int(count) > 150


@pytest.mark.feature(105)
def test_the_wheel_trains_its_demo_and_inspects_what_came_of_it(run, tmp_path):
    (tmp_path / "input").mkdir()
    images = four_squares(tmp_path)
    small = ("--dataset", images, "--resolution", 64, "--steps", 2, "--prompt", "red apple")
    run("graft", "demo", "--cpu", *small)
    found = tmp_path / "graft-demo"
    report, loras = json.loads((found / "report.json").read_text()), sorted(found.glob("*.safetensors"))
    assert report["loras"]["four_squares"]["prompts"] == ["red apple"] and loras
    for lora in loras:
        assert json.loads(run("graft", "inspect", lora, "--json"))["layers"]
    for picture in found.glob("*.png"):
        with Image.open(picture) as image:
            assert min(image.size) > 100
    assert {path.name for path in found.glob("*.png")} >= {"samples.png", "four_squares_loss.png"}
