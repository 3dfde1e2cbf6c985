"""The `graft` command of this checkout, whatever its folder is called: `python custom_nodes/graft plan ...`.

Python does not import from ComfyUI's custom_nodes folder, so `-m graft` needs an installed package.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def import_graft() -> None:
    """Put this checkout into sys.modules as `graft`, ahead of any installed one."""
    entry = str(ROOT / "__init__.py")
    if getattr(sys.modules.get("graft"), "__file__", None) == entry:
        return
    spec = importlib.util.spec_from_file_location("graft", entry, submodule_search_locations=[str(ROOT)])
    assert spec and spec.loader
    sys.modules["graft"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> int:
    """Run the checkout's command line."""
    if Path(sys.path[0] or ".").resolve() == ROOT:
        sys.path.pop(0)  # its `nodes` and `training` would be taken for ComfyUI's; some Pythons leave it out
    import_graft()
    return int(importlib.import_module("graft.commands.cli").main())


if __name__ == "__main__":
    sys.exit(main())
