"""Names of datasets stay inside the folders that may be read."""

import sys

import pytest
import yaml

from graft.tests.support.datasets import add
from graft.training.data import list_datasets, resolve_dataset
from graft.training.data import roots as roots_module
from graft.training.data.roots import yaml_lines

links = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")


@pytest.fixture
def roots(tmp_path):
    """ComfyUI's input folder and a registered dataset, each with images."""
    add(tmp_path / "input/cats", "a.png"), add(tmp_path / "elsewhere/photos/dogs", "b.png")
    add(tmp_path / "private", "c.png")
    return [tmp_path / "input", tmp_path / "elsewhere/photos"]


@pytest.mark.parametrize(
    "name, place", [("cats", "input/cats"), ("dogs", "elsewhere/photos/dogs"), ("photos", "elsewhere/photos")]
)
def test_names_are_found_in_the_input_folder_and_in_registered_ones(roots, tmp_path, name, place):
    assert resolve_dataset(name, roots) == tmp_path / place


def test_folders_in_folders_are_named_with_either_slash(roots, tmp_path):
    for name in ("photos/dogs", "photos\\dogs", " photos/dogs/ ", "./photos//dogs"):
        assert resolve_dataset(name, roots) == tmp_path / "elsewhere/photos/dogs"


def test_the_menu_lists_what_can_be_chosen(roots):
    (roots[0] / "3d").mkdir()  # by ComfyUI
    found = list_datasets(roots)
    assert found == ["cats", "photos", "photos/dogs"]
    assert all(resolve_dataset(name, roots).is_dir() for name in found)
    assert list_datasets([*roots, roots[0] / "gone"]) == found


def test_the_menu_lists_folders_in_folders(roots):
    (roots[0] / "kohya/img/10_woman").mkdir(parents=True), (roots[1] / "dogs/old").mkdir()
    assert list_datasets(roots) == ["cats", "kohya", "kohya/img", "photos", "photos/dogs", "photos/dogs/old"]


def test_the_menu_looks_at_a_bounded_number_of_files(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        for number in range(4):
            (tmp_path / name / str(number)).mkdir(parents=True)
    monkeypatch.setattr(roots_module, "LOOKED_AT", 7)
    monkeypatch.setattr(roots_module, "OF_EACH", 3)
    found = list_datasets([tmp_path])
    assert [name[0] for name in found] == ["a"] * 4 + ["b"] * 4 + ["c"] * 2


@pytest.mark.parametrize("name", ["../private", "cats/../../private", "..", "cats\\..\\..\\private"])
def test_a_name_cannot_lead_out_with_dots(roots, name):
    with pytest.raises(ValueError, match=r"leads out of its folder with '\.\.'(.|\n)*graft_datasets:"):
        resolve_dataset(name, roots)


def test_two_folders_of_one_name_are_refused_rather_than_guessed(roots):
    add(roots[0] / "photos", "d.png")
    with pytest.raises(ValueError, match="'photos' is the name of .*input/photos and .*elsewhere/photos; "):
        resolve_dataset("photos", roots)
    assert resolve_dataset("photos/dogs", roots) == roots[1] / "dogs"


def test_a_registered_folder_goes_before_a_folder_in_another_one(roots, tmp_path):
    add(roots[1] / "reg", "a.png"), add(tmp_path / "reg", "b.png")
    assert resolve_dataset("reg", [*roots, tmp_path / "reg"]) == tmp_path / "reg"
    assert resolve_dataset("reg", roots) == roots[1] / "reg"


def test_a_full_path_is_refused_with_the_lines_that_register_it(roots, tmp_path):
    with pytest.raises(ValueError, match="is a full path") as error:
        resolve_dataset(str(tmp_path / "private"), roots)
    assert f"graft:\n    base_path: {tmp_path}\n    graft_datasets: private" in str(error.value)


@pytest.mark.parametrize(
    "name", ["D:\\photos", "d:/photos", "\\\\server\\share\\photos", "//server/share/photos", "C:photos"]
)
def test_a_windows_path_is_refused_on_every_system(roots, name):
    with pytest.raises(ValueError, match="is a full path(.|\n)*graft_datasets: photos"):
        resolve_dataset(name, roots)


@links
def test_a_link_out_of_the_root_is_refused_with_the_lines_for_its_target(roots, tmp_path):
    (roots[0] / "shortcut").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match="a link that leads out of") as error:
        resolve_dataset("shortcut", roots)
    assert f"base_path: {tmp_path}\n    graft_datasets: private" in str(error.value)


@links
def test_a_link_inside_the_root_is_followed(roots):
    (roots[0] / "alias").symlink_to(roots[0] / "cats")
    assert resolve_dataset("alias", roots) == roots[0] / "alias"


@pytest.mark.parametrize("name", ["", "  ", ".", "a\0b"])
def test_no_name_says_where_to_put_a_folder(roots, name):
    with pytest.raises(ValueError, match="no dataset folder chosen; put a folder with images into .*input"):
        resolve_dataset(name, roots)


def test_an_unknown_name_lists_the_known_ones(roots):
    with pytest.raises(ValueError, match="'birds' not found. The folders are: cats, photos, photos/dogs"):
        resolve_dataset("birds", roots)


@pytest.mark.parametrize(
    "folder", ["/data/photos", "D:\\my photos\\2024", "/a/yes", "/x/#1: it's", "/srv/2023-01-01", "/a/-b"]
)
def test_the_printed_lines_mean_that_folder_to_a_yaml_reader(folder):
    read = yaml.safe_load(yaml_lines(folder))["graft"]
    slash = "\\" if "\\" in folder else "/"
    assert read["base_path"] + slash + read["graft_datasets"] == folder
