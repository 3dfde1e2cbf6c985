"""Files that follow from the nodes' schemas: run `python dev/write_help.py` after a setting or node changed.

That is the list of inputs in each page of web/docs, and the English names in locales/en. The text around the
lists is by hand. A node without a page gets one to fill in.
"""

from __future__ import annotations

import importlib
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEAD = "## Inputs\n\n"
NAMES = {"regularisation": "regularization"}
"""Ids in saved graphs whose English name is another."""


def name_of(id: str) -> str:
    """Return the English name of an input or output."""
    return NAMES.get(id, id.replace("_", " "))


def page(schema: Any, text: str) -> str:
    """Return the text of a node's help page with the list of today's inputs."""
    text = text or f"# {schema.display_name}\n\n{schema.description}\n\n{HEAD}\n## Example\n"
    return re.sub(rf"{re.escape(HEAD)}(- .*\n)*", lambda _: HEAD + inputs_of(schema), text)


def inputs_of(schema: Any) -> str:
    """Return a line for each input of a node: the editor's help panel is too narrow for a table."""
    lines = []
    for entry in schema.inputs:
        default = f" ({_default(entry)})" if _default(entry) else ""
        lines.append(f"- **{name_of(entry.id)}**{default}: {entry.tooltip}\n")
    return "".join(lines)


def _default(entry: Any) -> str:
    default = getattr(entry, "default", None)
    if default is None:
        return ""
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def english(schemas: list[Any]) -> str:
    """Return the content of locales/en/nodeDefs.json. Outputs that go by their type's name need no other."""
    nodes = {}
    for schema in schemas:
        inputs = {entry.id: {"name": name_of(entry.id)} for entry in schema.inputs}
        outputs = {
            str(i): {"name": name_of(output.display_name)}
            for i, output in enumerate(schema.outputs)
            if output.display_name.upper() != output.get_io_type()
        }
        nodes[schema.node_id] = {"display_name": schema.display_name, "inputs": inputs} | (
            {"outputs": outputs} if outputs else {}
        )
    return json.dumps(nodes, indent=1) + "\n"


def files(schemas: list[Any], root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield every file that follows from the nodes' schemas, and what it is to hold."""
    for schema in schemas:
        path = root / "web" / "docs" / f"{schema.node_id}.md"
        yield path, page(schema, path.read_text(encoding="utf-8") if path.exists() else "")
    yield root / "locales" / "en" / "nodeDefs.json", english(schemas)


def main() -> None:
    """Write the files and name those that change."""
    runpy.run_path(str(ROOT / "__main__.py"))["import_graft"]()
    importlib.import_module("graft.commands.headless.import_comfyui").start_comfyui()
    nodes = importlib.import_module("graft.nodes.all_nodes").ALL_NODES
    for path, text in files([node.define_schema() for node in nodes]):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8", newline="\n")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
