"""What `pip install graft-lora` would bring: all that ships, nothing else, and every module of it imports."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from graft.commands.headless.server import find_comfyui

from .support.checkout import ROOT, copy_checkout, make_environment, pip_install, plain_environment

ROOMS = {"commands", "nodes", "starter", "training", "web", "locales", "example_workflows"}
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


def test_every_module_of_the_wheel_imports(environment, installed, tmp_path):
    command = [str(environment / "python"), "-c", IMPORT_ALL]
    comfyui = plain_environment(COMFYUI_PATH=str(find_comfyui()))
    done = subprocess.run(command, cwd=tmp_path, env=comfyui, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, count = done.stdout.split()
    assert Path(file).parent == installed and int(count) > 150
