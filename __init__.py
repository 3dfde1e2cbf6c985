"""Graft: train LoRAs inside ComfyUI, with ComfyUI's own models."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():  # type: ignore[no-untyped-def]
    """Give ComfyUI the nodes and set up the routes; importing the package alone imports nothing."""
    from comfy_api.latest import ComfyExtension

    from .training.optional_packages import require_torch

    require_torch()  # first: what follows does not load with an older one

    from .nodes.all_nodes import ALL_NODES
    from .starter.in_comfyui import register
    from .training.comfy.run.routes import add_routes
    from .training.signals import save_at_exit

    class Graft(ComfyExtension):
        async def get_node_list(self):  # type: ignore[no-untyped-def]
            return ALL_NODES

    register()
    add_routes()
    save_at_exit()
    return Graft()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
