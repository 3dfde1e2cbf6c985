"""Tests against the real ComfyUI: in this process (every file here may `import comfy.sd`) or as a server.

It runs on the CPU, on the GPU with GRAFT_TEST_DEVICE=cuda, or on the pretended one of
`tests/support/card.py` with GRAFT_TEST_DEVICE=card; with "cuda-dynamic" and "dynamic" under a newer
ComfyUI's dynamic VRAM (`tests/support/dynamic_vram.py`).
COMFYUI_PATH chooses another ComfyUI.
"""

import asyncio
import atexit
import copy
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import graft
from graft.commands.headless.server import find_comfyui, install_graft, make_folders, server
from graft.tests.support import card, dynamic_vram
from graft.tests.support.card import DEVICE, DYNAMIC, PRETENDED
from graft.tests.support.small_base import STARTER, put_small_base

COMFYUI = find_comfyui()
BASE = Path(tempfile.mkdtemp(prefix="graft-tests-"))
CHECKPOINTS = BASE / "models" / "checkpoints"
atexit.register(shutil.rmtree, BASE, ignore_errors=True)
collect_ignore = ["test_on_a_card.py"] if PRETENDED else ["test_crossings.py"]
collect_ignore += [] if DYNAMIC else ["test_dynamic_vram.py"]
ON_CUDA = DEVICE.startswith("cuda")


def bootstrap() -> None:
    """Make ComfyUI importable as its own main.py does, with models, input and output under BASE.

    ComfyUI reads its command line when `comfy.cli_args` is imported, and then only if asked to.
    """
    install_graft(BASE / "custom_nodes" / "graft")
    sys.path.insert(
        0, str(COMFYUI)
    )  # first, so that `nodes` and `utils` are ComfyUI's even under `python -m pytest`
    if PRETENDED:
        card.install()
    options = ["--directml"] if PRETENDED else ["--deterministic"] if ON_CUDA else ["--cpu"]
    options += [] if DEVICE == "cpu" else ["--force-fp32", "--fp32-vae", "--fp32-text-enc"]  # to compare with
    if ON_CUDA:  # with kernels that add in one order, and do not round convolutions to 10 bits
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.allow_tf32 = False
    argv, sys.argv = sys.argv, ["main.py", *options, "--base-directory", str(BASE)]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
        import utils.extra_config  # noqa: F401 (ComfyUI's own; its nodes.py puts comfy/ with a utils.py first)
    finally:
        sys.argv = argv
    if DYNAMIC:
        (dynamic_vram.install_on_card if ON_CUDA else dynamic_vram.install)()
    assert comfy.cli_args.args.base_directory == str(BASE), "comfy.cli_args was imported before this conftest"


bootstrap()


@pytest.fixture(scope="module", autouse=True)
def empty_folders() -> None:
    """Begin every file with nothing in models/, input/ and output/ but the starter's text encoder and a small
    base under the name of its own.
    """
    import folder_paths

    from graft.starter.in_comfyui import TEXT_ENCODER

    folder_paths.filename_list_cache.clear()  # it looks into the folders it has seen
    written, kept = BASE / "models" / "text_encoders" / TEXT_ENCODER, BASE / TEXT_ENCODER
    if written.exists():  # takes seconds to write
        written.rename(kept)
    for folder in ("models", "input", "output"):
        shutil.rmtree(BASE / folder, ignore_errors=True)
    make_folders(BASE)
    if kept.exists():
        kept.rename(written)
    put_small_base(CHECKPOINTS)


@pytest.fixture(scope="module")
def whole_base(empty_folders) -> None:
    """Have the starter's own base for the tests of a file."""
    (CHECKPOINTS / STARTER.name).unlink()


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """The folder of the ComfyUI under test."""
    return COMFYUI


@pytest.fixture(scope="session")
def base() -> Path:
    """The base directory of the ComfyUI in this process: models/, input/, output/ lie in it."""
    return BASE


@pytest.fixture(scope="session")
def comfy_server(comfyui, tmp_path_factory):
    """One running ComfyUI with Graft, shared by all tests; `.base` is its base directory. Do not kill it."""
    base = tmp_path_factory.mktemp("server")
    put_small_base(base / "models" / "checkpoints")
    with server(comfyui, base, cpu=not ON_CUDA) as running:
        yield running


@pytest.fixture(scope="session")
def graft_nodes():
    """ComfyUI's node table in this process, with Graft loaded as a custom node: id -> class."""
    import nodes

    for extra in (
        "nodes_sd3.py",
        "nodes_flux.py",
        "nodes_model_advanced.py",
        "nodes_train.py",
        "nodes_rebatch.py",
        "nodes_hunyuan.py",
        "nodes_images.py",
        "nodes_dataset.py",
        "nodes_string.py",
        "nodes_qwen.py",
        "nodes_wan.py",
        "nodes_edit_model.py",
        "nodes_latent.py",  # before what 0.33 imports in a circle
        "nodes_post_processing.py",
        "nodes_ace.py",
        "nodes_audio.py",
    ):
        asyncio.run(
            nodes.load_custom_node(str(COMFYUI / "comfy_extras" / extra), module_parent="comfy_extras")
        )
    asyncio.run(_load_graft(nodes.NODE_CLASS_MAPPINGS))
    return nodes.NODE_CLASS_MAPPINGS


async def _load_graft(table):
    """Load Graft as ComfyUI does, but as the modules that tests import, so that they can replace parts of
    it.
    """
    for node in await (await graft.comfy_entrypoint()).get_node_list():
        node.RELATIVE_PYTHON_MODULE = "custom_nodes.graft"
        table[node.GET_SCHEMA().node_id] = node


@pytest.fixture
def execute(graft_nodes):
    """Run prompts in this process with one cache: `execute(prompt)` returns the executor."""
    import execution

    executor = execution.PromptExecutor(
        _NoServer(),
        cache_type=execution.CacheType.CLASSIC,
        cache_args={"lru": 0, "ram": 0.0, "ram_inactive": 0.0},
    )

    def run(prompt, *, prompt_id="00000000-0000-4000-8000-000000000000", extra_data=None):
        valid, error, outputs, node_errors = asyncio.run(execution.validate_prompt(prompt_id, prompt, None))
        if not valid:
            raise ValueError(f"{error} {node_errors}")
        executor.execute(copy.deepcopy(prompt), prompt_id, extra_data or {}, outputs)
        for kind, data in executor.status_messages:
            if kind == "execution_error":
                raise RuntimeError(
                    f"{data['node_type']}: {data['exception_message']}\n{''.join(data['traceback'])}"
                )
        return executor

    return run


class _NoServer:
    """What a PromptExecutor needs of a server when nobody is connected."""

    client_id = last_node_id = last_prompt_id = None
    sockets_metadata: dict = {}

    def send_sync(self, event, data, sid=None):
        pass
