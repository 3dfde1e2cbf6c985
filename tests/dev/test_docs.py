"""The documents: short where they should be, links that lead somewhere, commands and files that exist."""

from __future__ import annotations

import re

import pytest

from graft.commands.bench import BENCHMARKS
from graft.commands.cli import COMMANDS
from graft.dev import bench
from graft.training.job.keys import DATASET_KEYS, KEYS, only, refused
from graft.training.job.read import read_job

from ..support.checkout import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


def anchors(path):
    """Return the anchors of a page's headings, as its readers' programs make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_has_one_reader_and_two_commands_for_others():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    for heading in ("Try it", "Run the tests"):
        (part,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        assert part.count("```") == 2 and len(re.findall(r"^python3 .+$", part, re.MULTILINE)) == 1


@page
def test_every_link_leads_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@page
def test_every_command_and_every_file_that_is_named_exists(path):
    text = path.read_text(encoding="utf-8")
    for command in re.findall(
        r"(?:`|^)(?:\.venv/bin/|python custom_nodes/)?graft ([a-z-]+)", text, re.MULTILINE
    ):
        assert command in COMMANDS, command
    for name in re.findall(r"graft bench ([a-z-]+)", text):
        assert name in BENCHMARKS, name
    for name in re.findall(r"dev/bench\.py ([a-z-]+)", text):
        assert name in bench.BENCHMARKS, name
    rooms = "commands|dev|docs|example_workflows|nodes|starter|tests|training|web"
    for name in re.findall(rf"(?<![\w/.])((?:{rooms})/[\w./-]*\w/?)", text):
        assert (ROOT / name).exists(), name


@page
def test_no_page_names_an_address_of_the_repository(path):
    assert "github.com/graft" not in path.read_text(encoding="utf-8")


def test_the_page_on_jobs_names_every_key_that_does_something(tmp_path):
    text = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    idle = {only(1, "").__qualname__, refused("").__qualname__}
    for key, read in {**KEYS, **DATASET_KEYS}.items():
        if getattr(read, "__qualname__", "Beside") not in (*idle, "Beside"):
            assert f"`{key.rpartition('.')[2]}`" in text or f"`{key}`" in text, key
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "job.yaml").write_text(example, encoding="utf-8")
    (tmp_path / "pictures").mkdir()
    assert read_job(tmp_path / "job.yaml").name == "rex"
