"""One server and one browser for all of these tests: `tests/conftest.py` gives them to one process. Each file
has a new tab, and files, runs and folders by names of its own. Screenshots go to $GRAFT_ARTIFACTS, else to
pytest's own folder.
"""

import os
from pathlib import Path

import pytest
from PIL import Image

from graft.commands.headless.server import find_comfyui, server
from graft.tests.support.chromium import chromium
from graft.tests.support.editor import Editor
from graft.tests.support.small_base import put_small_base


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    """A ComfyUI with Graft, and four captioned squares in input/tiny."""
    base = tmp_path_factory.mktemp("browser-server")
    put_small_base(base / "models" / "checkpoints")
    folder = base / "input" / "tiny"
    folder.mkdir(parents=True)
    for color in ("red", "green", "blue", "white"):
        Image.new("RGB", (64, 64), color).save(folder / f"{color}.png")
        (folder / f"{color}.txt").write_text(f"a {color} square")
    with server(find_comfyui(), base, cpu=True) as started:
        started.request("/settings", {"Comfy.TutorialCompleted": True})  # no welcome dialog
        yield started


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def editor(running, browser):
    browser.call("Storage.clearDataForOrigin", origin=f"http://{running.address}", storageTypes="all")
    with browser.another_tab() as page:
        yield Editor(page, running.address)


@pytest.fixture(scope="module", params=[False, True], ids=["classic", "vue"])
def vue(request, running):
    """Each rendering in turn; true in Nodes 2.0. A page shows it once it is opened."""
    running.request("/settings", {"Comfy.VueNodes.Enabled": request.param})
    yield request.param
    running.request("/settings", {"Comfy.VueNodes.Enabled": False})


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory):
    folder = os.environ.get("GRAFT_ARTIFACTS")
    return Path(folder) if folder else tmp_path_factory.mktemp("screenshots")


@pytest.fixture(autouse=True)
def screenshot(request, editor, running, artifacts):
    """Keep what the page looked like at the end of every test, and show what the server said if it failed."""
    logged = len(running.log())
    yield
    print(running.log()[logged:])
    editor.page.screenshot(artifacts / f"{request.node.name}.png")
