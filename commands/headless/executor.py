"""ComfyUI's executor in this process, without a server: the parts of its main.py that nodes need."""

from __future__ import annotations

import asyncio
import copy
import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...training.job.graph import Prompt
from ...training.user_error import UserError
from .import_comfyui import import_comfyui

PROMPT_ID = "00000000-0000-4000-8000-000000000000"


def set_up_comfyui(comfyui: Path, options: Sequence[str]) -> None:
    """Make ComfyUI's modules importable and set up as its command line with `options` would."""
    import_comfyui(comfyui, options)
    import folder_paths
    import utils.extra_config
    from comfy.cli_args import args

    own = comfyui / "extra_model_paths.yaml"
    for file in ([str(own)] if own.is_file() else []) + list(
        itertools.chain(*(args.extra_model_paths_config or []))
    ):
        utils.extra_config.load_extra_path_config(file)
    for kind in ("output", "input", "user"):
        if folder := getattr(args, f"{kind}_directory", None):
            getattr(folder_paths, f"set_{kind}_directory")(str(Path(folder).absolute()))
    for kind in ("checkpoints", "diffusion_models", "clip", "vae", "loras"):
        folder_paths.add_model_folder_path(kind, str(Path(folder_paths.get_output_directory()) / kind))


class Executor:
    """Executes parts of one graph; outputs of nodes are cached for the next part."""

    def __init__(self, prompt: Prompt, extra_data: dict[str, Any]) -> None:
        """Load the nodes that `prompt` needs. Raises UserError for what the server would refuse."""
        import execution

        self.prompt = copy.deepcopy(prompt)
        self.extra_data = extra_data
        load_nodes({node["class_type"] for node in prompt.values()})
        valid, error, self.outputs, errors = asyncio.run(
            execution.validate_prompt(PROMPT_ID, self.prompt, None)
        )
        if not valid:
            raise UserError(f"ComfyUI refuses the graph: {error} {errors}")
        self.executor = execution.PromptExecutor(
            _NoServer(),
            cache_type=execution.CacheType.CLASSIC,
            cache_args={"lru": 0, "ram": 0.0, "ram_inactive": 0.0},
        )

    def run(self, nodes: Sequence[str]) -> None:
        """Execute some nodes and all that they need. Raises UserError with the words of one that fails."""
        self.executor.execute(copy.deepcopy(self.prompt), PROMPT_ID, self.extra_data, list(nodes))
        for kind, data in self.executor.status_messages:
            if kind == "execution_error":
                raise UserError(f"{data['node_type']}: {data['exception_message'].strip()}")
            if kind == "execution_interrupted":
                raise KeyboardInterrupt


def load_nodes(kinds: set[str]) -> None:
    """Load Graft's nodes and ComfyUI's, and other people's where a class is in neither."""
    import nodes

    asyncio.run(_load_graft(nodes.NODE_CLASS_MAPPINGS))
    if kinds - nodes.NODE_CLASS_MAPPINGS.keys():
        asyncio.run(nodes.init_builtin_extra_nodes())
    if missing := kinds - nodes.NODE_CLASS_MAPPINGS.keys():
        asyncio.run(_load_others(nodes))
        asyncio.run(_load_graft(nodes.NODE_CLASS_MAPPINGS))
        missing -= nodes.NODE_CLASS_MAPPINGS.keys()
    if missing:
        raise UserError(f"ComfyUI has no node {', '.join(sorted(missing))}; install its custom node.")


async def _load_graft(table: dict[str, Any]) -> None:
    extension = importlib.import_module(__name__.partition(".commands.")[0])
    for node in await (await extension.comfy_entrypoint()).get_node_list():
        node.RELATIVE_PYTHON_MODULE = "custom_nodes.graft"
        table[node.GET_SCHEMA().node_id] = node


async def _load_others(nodes: Any) -> None:
    import server

    server.PromptServer(asyncio.get_running_loop())  # custom nodes add their routes to it
    await nodes.init_external_custom_nodes()


class _NoServer:
    """The attributes of a server that a PromptExecutor needs when no client is connected."""

    client_id = last_node_id = last_prompt_id = None
    sockets_metadata: dict[str, Any] = {}

    def send_sync(self, event: str, data: Any, sid: Any = None) -> None:
        """Send nothing: no client is connected."""
