"""What every test gets: this checkout as the package `graft`, whatever its folder is called.

Tests import it by that name: `from graft.training.loop import train`.
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = (
    "1"  # of this process and those it starts: sums of several threads differ in bits
)

ROOT = Path(__file__).resolve().parent.parent
BROWSER = "tests/browser/"

pytest.register_assert_rewrite("graft.tests")
runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()


class RootIsNoTestPackage:
    """Keep pytest from importing the root's `__init__.py`, ComfyUI's entry point, as a test package's."""

    @staticmethod
    def pytest_collect_directory(path, parent):
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config):
    config.pluginmanager.register(RootIsNoTestPackage)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Return one process per core and one more, as the browser's mostly waits."""
    return 1 + (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each file to one process, and those of the browser to the same one: they share a server."""
    from xdist.scheduler import LoadFileScheduling

    class Rooms(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return BROWSER if nodeid.startswith(BROWSER) else super()._split_scope(nodeid)

    return Rooms(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path, config):
    """Let `-m gpu` read the one file of these tests: others want a ComfyUI and packages that a machine with a
    graphics card may lack.
    """
    others = collection_path.parent == Path(__file__).parent and collection_path.name != "test_gpu.py"
    return True if others and config.option.markexpr == "gpu" else None


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent / "comfy" in item.path.parents:
            item.add_marker(pytest.mark.comfy)
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("browser") and not (_has_browser() or os.environ.get("CI")):
            item.add_marker(pytest.mark.skip(reason="no Chromium"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_browser() -> bool:
    return any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB; skipped where this user may not mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
