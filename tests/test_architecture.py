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


def imports(path):
    """Yield (module, level) of every import statement in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level


def files(folder):
    return sorted(path for path in (ROOT / folder).rglob("*.py"))


def engine():
    """Return the files of training/ but training/headless, which starts ComfyUI and uses everything."""
    return [path for path in files("training") if path.parent.name != "headless"]


@pytest.mark.parametrize("path", engine(), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_training_comfy_imports_comfyui(path):
    roots = {module.split(".")[0] for module, level in imports(path) if level == 0}
    assert "comfy" in path.parent.parts or not roots & HOST


@pytest.mark.parametrize("path", engine(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_imports_what_starts_programs(path):
    assert path.name == "cli.py" or not [
        m for m, level in imports(path) if level and "headless" in m.split(".")
    ]


@pytest.mark.parametrize("path", engine(), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_engine_imports_neither_nodes_nor_its_own_comfyui_part(path):
    for module, level in imports(path):
        climbs_out = level > len(path.relative_to(ROOT / "training").parts)
        into_comfy = level and module.split(".")[0] == "comfy" and "comfy" not in path.parent.parts
        assert path.name == "cli.py" or not (climbs_out or into_comfy), f"imports {'.' * level}{module}"


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
