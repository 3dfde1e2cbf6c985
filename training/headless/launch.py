"""The `graft` command of this checkout, whatever its folder is called: `python launch.py train ...`.

Python does not import from ComfyUI's custom_nodes folder, so `-m graft` needs an installed package.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def import_graft() -> None:
    """Put this checkout into sys.modules as `graft`, ahead of any installed one."""
    entry = str(ROOT / "__init__.py")
    spec = importlib.util.spec_from_file_location("graft", entry, submodule_search_locations=[str(ROOT)])
    assert spec and spec.loader
    sys.modules["graft"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> int:
    """Run the checkout's command line."""
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        sys.path.pop(0)  # this folder, whose module names are not meant for others; some Pythons leave it out
    import_graft()
    return int(importlib.import_module("graft.training.cli").main())


if __name__ == "__main__":
    sys.exit(main())
