"""The dependency direction of docs/design.md, read from the imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graft.dev.house import FLOORS, ROOT, arrows_up, floor_of, imported_files, imports_of, source_files

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


def id_of(path):
    return str(path.relative_to(ROOT))


def roots_of(path):
    """Return the first part of every absolute import in a file."""
    return {module.split(".")[0] for module, level, _ in imports_of(path) if level == 0}


@pytest.mark.parametrize("path", source_files("training"), ids=id_of)
def test_only_training_comfy_imports_comfyui(path):
    assert floor_of(path) == FLOORS.index("training/comfy") or not roots_of(path) & HOST


@pytest.mark.parametrize("room", [room for room in FLOORS if "/" not in room])
def test_no_room_imports_from_a_floor_above_it(room):
    assert not arrows_up({path: imported_files(path) for path in source_files(room)})


@pytest.mark.parametrize("path", source_files("nodes"), ids=lambda p: p.name)
def test_nodes_import_no_tensor_library(path):
    assert not roots_of(path) & {"torch", "numpy", "comfy", "safetensors"}


@pytest.mark.parametrize("path", [p for p in source_files("tests") if p.name.startswith("test_")], ids=id_of)
def test_what_several_tests_use_is_in_tests_support(path):
    assert not {file for file in imported_files(path) if file.name.startswith("test_")}


def test_inference_mode_is_undone_at_one_border():
    engine = source_files("training") + source_files("nodes")
    undone = [id_of(path) for path in engine if "inference_mode(False)" in path.read_text("utf-8")]
    assert undone == ["training/comfy/inference_mode.py"]


def test_importing_graft_imports_no_torch():
    script = f"import importlib.util as u; s = u.spec_from_file_location('graft', r'{ROOT / '__init__.py'}', "
    script += f"submodule_search_locations=[r'{ROOT}']); m = u.module_from_spec(s); s.loader.exec_module(m); "
    script += "import sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
