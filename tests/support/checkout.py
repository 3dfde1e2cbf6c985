"""A copy of this checkout under another name, as a download has it, and environments it is installed in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_DOWNLOADED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "graft-demo", "graft_tiny_clip_l.*"
)


def copy_checkout(target: Path) -> Path:
    """Copy to `target` what a download of the repository holds, and return it."""
    return Path(shutil.copytree(ROOT, target, ignore=NOT_DOWNLOADED))


def make_environment(folder: Path) -> Path:
    """Make a virtual environment with all packages of this one but Graft; return its folder of programs."""
    venv.create(folder, with_pip=False)
    names = {"base": str(folder), "platbase": str(folder)}
    scheme = (
        "venv" if "venv" in sysconfig.get_scheme_names() else sysconfig.get_default_scheme()
    )  # from 3.11 on
    own = Path(sysconfig.get_path("purelib", scheme, names))
    # Folders that a .pth file adds are not asked for .pth files: an editable Graft among them stays out.
    own.joinpath("others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return Path(sysconfig.get_path("scripts", scheme, names))


def pip_install(programs: Path, *options: str) -> None:
    """Install into the environment of `make_environment`, without the network."""
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet"]
    alone = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    subprocess.run([*pip, *alone, *options], check=True, env=plain_environment())


def plain_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without what names a ComfyUI or other places of modules."""
    own = {name: value for name, value in os.environ.items() if name not in ("COMFYUI_PATH", "PYTHONPATH")}
    return own | changes
