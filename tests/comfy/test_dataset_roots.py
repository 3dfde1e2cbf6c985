"""The lines that an error prints for extra_model_paths.yaml, read by ComfyUI itself."""

import folder_paths
from utils.extra_config import load_extra_path_config

from graft.training.comfy.paths import dataset_roots
from graft.training.data import resolve_dataset
from graft.training.data.roots import yaml_lines


def test_the_printed_lines_register_that_folder(tmp_path, monkeypatch):
    (tmp_path / "photos 2024").mkdir()
    (tmp_path / "extra.yaml").write_text(yaml_lines(tmp_path / "photos 2024"), encoding="utf-8")
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", dict(folder_paths.folder_names_and_paths))
    load_extra_path_config(str(tmp_path / "extra.yaml"))
    assert resolve_dataset("photos 2024", dataset_roots()) == tmp_path / "photos 2024"
