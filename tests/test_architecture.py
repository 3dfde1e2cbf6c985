"""The dependency direction of docs/design.md, read from the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOST = {
    "comfy",
    "comfy_api",
    "comfy_execution",
    "comfy_extras",
    "folder_paths",
    "server",
    "nodes",
    "aiohttp",
    "execution",
}
FLOORS = ("training", "training/comfy", "starter", "nodes", "commands", "dev", "tests")
"""From the ground up: a room imports from its own floor and from those below."""


def imports(path):
    """Yield (module, level) of every import statement in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level


def files(folder):
    return sorted(path for path in (ROOT / folder).rglob("*.py"))


def floor(path):
    """Return the floor that a file or folder of the checkout is on."""
    room = path.relative_to(ROOT).as_posix()
    return max(i for i, name in enumerate(FLOORS) if room == name or room.startswith(f"{name}/"))


def id_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", files("training"), ids=id_of)
def test_only_training_comfy_imports_comfyui(path):
    roots = {module.split(".")[0] for module, level in imports(path) if level == 0}
    assert floor(path) == FLOORS.index("training/comfy") or not roots & HOST


@pytest.mark.parametrize(
    "path", [p for room in FLOORS[:-2] if "/" not in room for p in files(room)], ids=id_of
)
def test_no_room_imports_from_a_floor_above_it(path):
    for module, level in imports(path):
        if level:
            target = (
                path.parents[level - 1].joinpath(*module.split(".")) if module else path.parents[level - 1]
            )
            up = target != ROOT and floor(target) > floor(path)
            assert not up, f"imports {'.' * level}{module}"


@pytest.mark.parametrize("path", files("nodes"), ids=lambda p: p.name)
def test_nodes_import_no_tensor_library(path):
    assert not {module.split(".")[0] for module, _ in imports(path)} & {
        "torch",
        "numpy",
        "comfy",
        "safetensors",
    }


def test_importing_graft_imports_no_torch():
    script = f"import importlib.util as u; s = u.spec_from_file_location('graft', r'{ROOT / '__init__.py'}', "
    script += f"submodule_search_locations=[r'{ROOT}']); m = u.module_from_spec(s); s.loader.exec_module(m); "
    script += "import sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
