"""Scanning folders: what is found, in which order, and how every bad file is named."""

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from graft.tests.support.datasets import HEIC, add, picture
from graft.training.data import CaptionConfig, DatasetConfig, MaskConfig, fingerprint, scan
from graft.training.data import folder as folder_module
from graft.training.data.caption import LONGEST
from graft.training.data.caption_file import LARGEST, MOST_CAPTIONS
from graft.training.data.config import MOST_ADDED

SKIP = DatasetConfig(skip_bad=True)
links = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")


def names(images):
    return [sample.name for sample in images.samples]


def captions(images):
    return {sample.name: sample.captions for sample in images.samples}


def captioned(**settings):
    return DatasetConfig(caption=CaptionConfig(**settings))


def test_images_are_found_in_an_order_that_no_file_system_decides(tmp_path, monkeypatch):
    for name in ("b.png", "a.jpg", "C.webp", "a10.png", "a9.png"):
        add(tmp_path, name)
    found = names(scan(tmp_path))
    listing = os.scandir(tmp_path)
    entries = sorted(listing, key=lambda entry: entry.name, reverse=True)

    class Reversed:
        __enter__, __exit__, __iter__ = (
            (lambda s: iter(entries)),
            (lambda s, *a: None),
            (lambda s: iter(entries)),
        )

    monkeypatch.setattr(folder_module.os, "scandir", lambda path: Reversed())
    assert names(scan(tmp_path)) == found == ["C.webp", "a.jpg", "a10.png", "a9.png", "b.png"]


def test_subfolders_are_read_only_when_asked(tmp_path):
    add(tmp_path, "a.png"), add(tmp_path, "deep/er/b.png")
    (tmp_path / "5_more").mkdir()
    images, everything = scan(tmp_path), scan(tmp_path, DatasetConfig(recursive=True))
    assert names(images) == ["a.png"] and images.unread == 1
    assert names(everything) == ["a.png", "deep/er/b.png"] and everything.unread == 0


def test_a_folder_named_10_cat_is_read_with_ten_repeats(tmp_path):
    add(tmp_path, "10_cat/a.png"), add(tmp_path, "2_dog/b.png"), add(tmp_path, "2024_trip/c.png")
    images = scan(tmp_path, DatasetConfig(repeats=3))
    assert {sample.name: sample.repeats for sample in images.samples} == {
        "10_cat/a.png": 30,
        "2_dog/b.png": 6,
    }
    everything = scan(tmp_path, DatasetConfig(recursive=True))
    assert {s.name: s.repeats for s in everything.samples}["2024_trip/c.png"] == 1


def test_captions_come_from_the_first_source_that_has_one(tmp_path):
    (
        add(tmp_path, "a.png", "from txt"),
        add(tmp_path, "b.png", None),
        add(tmp_path, "c.png", None),
        add(tmp_path, "d.png", None),
    )
    (tmp_path / "a.caption").write_text("from caption")
    (tmp_path / "b.caption").write_text("from caption")
    (tmp_path / "c.json").write_text('{"caption": "from json"}')
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "d.png", "text": "from jsonl"}\n\n')
    found = captions(scan(tmp_path))
    assert [texts[0] for texts in found.values()] == ["from txt", "from caption", "from json", "from jsonl"]


@pytest.mark.feature(47)
def test_a_chosen_caption_source_is_the_only_one(tmp_path):
    add(tmp_path, "red_fox.png", "from txt")
    assert captions(scan(tmp_path, captioned(source="file name"))) == {"red_fox.png": ("red fox",)}
    add(tmp_path, "5_my_dog/x.png", "from txt")
    assert captions(scan(tmp_path, captioned(source="folder name")))["5_my_dog/x.png"] == ("my dog",)
    with pytest.raises(ValueError, match="no caption; add <name>.caption, .*red_fox.png"):
        scan(tmp_path, captioned(source="caption"))


@pytest.mark.parametrize(
    "content, expected",
    [
        ("plain", ("plain",)),
        ({"tags": ["a", "b"]}, ("a, b",)),
        ({"captions": ["one", "two"]}, ("one", "two")),
        ({"text": " spaced "}, ("spaced",)),
    ],
)
def test_a_json_caption_may_have_several_shapes(tmp_path, content, expected):
    add(tmp_path, "a.png", None)
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert captions(scan(tmp_path)) == {"a.png": expected}


@pytest.mark.parametrize("name", ["a.json", "metadata.jsonl"])
def test_a_caption_with_half_a_letter_is_refused_by_name(tmp_path, name):
    add(tmp_path, "a.png", None)
    (tmp_path / name).write_text(json.dumps({"file_name": "a.png", "text": "a cat \ud83d"}))
    with pytest.raises(ValueError, match=r"a\.png: its caption holds half of a letter \('\\ud83d' at 6"):
        scan(tmp_path)


def test_metadata_names_images_in_subfolders_by_their_path(tmp_path):
    add(tmp_path, "in/a.png", None)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "in\\\\a.png", "prompt": "hello"}')
    assert captions(scan(tmp_path, DatasetConfig(recursive=True))) == {"in/a.png": ("hello",)}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_captions_saved_by_notepad_are_read(tmp_path, encoding):
    add(tmp_path, "a.png", None)
    (tmp_path / "a.txt").write_bytes("caf\u00e9 \u732b".encode(encoding))
    assert captions(scan(tmp_path)) == {"a.png": ("caf\u00e9 \u732b",)}


@pytest.mark.feature(48)
def test_a_missing_caption_is_an_error_unless_chosen_otherwise(tmp_path):
    add(tmp_path, "a.png", None), add(tmp_path, "b.png", "  \n")
    with pytest.raises(
        ValueError, match=r"2 files: no caption; add <name>\.txt, or .* to 'trigger'.*: a\.png, b\.png$"
    ):
        scan(tmp_path)
    assert captions(scan(tmp_path, captioned(missing="empty"))) == {"a.png": ("",), "b.png": ("",)}
    assert len(scan(tmp_path, captioned(missing="trigger", trigger="sks"))) == 2


def test_a_caption_that_asks_for_a_trigger_needs_one(tmp_path):
    add(tmp_path, "a.png", "a photo of [trigger]")
    with pytest.raises(ValueError, match=r"uses \[trigger\], but no trigger word is given"):
        scan(tmp_path)


def bad_folder(tmp_path):
    """Return a folder of one good file and many that cannot be used."""
    add(tmp_path, "good.png")
    (tmp_path / "zero.png").touch()
    add(tmp_path, "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:-200])
    add(tmp_path, "dot.png", image=picture(1, 1))
    (tmp_path / "words.webp").write_text("no image")
    add(tmp_path, "alone.png", None)
    add(tmp_path, "twin.png"), add(tmp_path, "twin.jpg")
    add(tmp_path, "latin.png", None).with_suffix(".txt").write_bytes("caf\u00e9".encode("latin-1"))
    add(tmp_path, "broken.png", None).with_suffix(".json").write_text('{"caption": ')
    return tmp_path


REASONS = {
    "alone.png": "no caption; add alone.txt",
    "broken.png": "broken.json is not valid JSON",
    "cut.jpg": "truncated or damaged",
    "dot.png": "1 x 1 px is too small",
    "latin.png": "latin.txt is not UTF-8",
    "twin.jpg": "shares its caption or mask with twin.png",
    "twin.png": "shares its caption or mask with twin.jpg",
    "words.webp": "is not an image",
    "zero.png": "the file is empty",
}


def test_one_error_names_every_bad_file_with_its_reason_and_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="9 file.s. cannot be used") as error:
        scan(bad_folder(tmp_path))
    lines = str(error.value).splitlines()
    for (name, reason), line in zip(REASONS.items(), lines[1:-1], strict=True):
        assert line.startswith(f"  {name}: ") and reason in line
    assert "'skip bad images' in Load Dataset" in lines[-1]


def test_nobody_is_told_to_skip_all_that_there_is(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"is not an image.*\nThere are no other images; repair or replace"):
        scan(tmp_path)


def test_many_images_without_a_caption_are_one_line_that_says_what_to_do(tmp_path):
    for index in range(24):
        add(tmp_path, f"{index:02}.png", None)
    with pytest.raises(ValueError, match="24 file.s. cannot be used") as error:
        scan(tmp_path)
    [_, line] = str(error.value).splitlines()
    assert "24 files: no caption" in line and line.endswith("18.png, 19.png and 4 more")


def test_twins_whose_captions_are_not_shared_are_fine(tmp_path):
    add(tmp_path, "cat.png", None), add(tmp_path, "cat.jpg", None)
    assert len(scan(tmp_path, captioned(source="file name"))) == 2
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "cat.png", "text": "1"}\n{"file_name": "cat.jpg", "text": "2"}'
    )
    assert captions(scan(tmp_path)) == {"cat.jpg": ("2",), "cat.png": ("1",)}


def test_a_hundred_bad_files_are_listed_and_the_others_counted(tmp_path):
    for number in range(103):
        picture(1, number + 1).save(tmp_path / f"{number:03}.png")
    with pytest.raises(ValueError, match=r"099\.png: 1 x 100 px is too small.*\n  \.\.\. and 3 more\n"):
        scan(tmp_path)


def test_the_rest_is_trained_when_skipping_is_allowed(tmp_path):
    images = scan(bad_folder(tmp_path), SKIP)
    assert names(images) == ["good.png"] and sorted(bad.name for bad in images.skipped) == list(REASONS)


def test_nothing_left_after_skipping_is_an_error(tmp_path):
    (tmp_path / "zero.png").touch()
    with pytest.raises(ValueError, match=r"zero\.png: the file is empty"):
        scan(tmp_path, SKIP)


def test_a_missing_or_empty_folder_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="no such folder; create it"):
        scan(tmp_path / "nowhere")
    (tmp_path / "photo.raw").touch()
    with pytest.raises(ValueError, match=r"no images in this folder \(avif, .*webp are read\)\.$"):
        scan(tmp_path)


def test_a_folder_of_folders_names_those_that_can_be_chosen(tmp_path):
    for name in ("img/10_woman/a.png", "img/5_face/b.png", "reg/1_woman/c.png", "old/more/d.png"):
        add(tmp_path, name)
    (tmp_path / "log").mkdir()
    with pytest.raises(ValueError, match=r"There are some in img, old/more, reg inside it: choose one"):
        scan(tmp_path)
    assert names(scan(tmp_path / "img")) == ["10_woman/a.png", "5_face/b.png"]


def test_files_that_are_no_images_are_counted(tmp_path):
    add(tmp_path, "a.png")
    for name in ("a.mp4", "b.MP4", "notes.md", ".hidden", "._a.png"):
        (tmp_path / name).touch()
    assert scan(tmp_path).ignored == ((".md", 1), (".mp4", 2))


def test_a_photo_of_a_phone_is_named_with_what_to_do(tmp_path):
    add(tmp_path, "a.png")
    (tmp_path / "IMG_1.HEIC").write_bytes(HEIC)
    with pytest.raises(ValueError, match=r"IMG_1\.HEIC: is a HEIC photo.*convert it to JPEG"):
        scan(tmp_path)
    assert [bad.name for bad in scan(tmp_path, SKIP).skipped] == ["IMG_1.HEIC"]


def test_a_phones_photo_beside_its_converted_picture_is_no_image(tmp_path):
    add(tmp_path, "IMG_1.jpg")
    (tmp_path / "IMG_1.HEIC").write_bytes(HEIC)
    images = scan(tmp_path)
    assert names(images) == ["IMG_1.jpg"] and images.ignored == ((".heic", 1),)


@pytest.mark.skipif(sys.platform == "win32", reason="a.txt and a.TXT are one file there")
def test_extensions_of_captions_are_taken_in_any_case(tmp_path):
    add(tmp_path, "A.JPG", None), add(tmp_path, "b.png", None)
    (tmp_path / "A.TXT").write_text("loud"), (tmp_path / "b.Json").write_text('{"text": "mixed"}')
    images = scan(tmp_path)
    assert captions(images) == {"A.JPG": ("loud",), "b.png": ("mixed",)} and images.ignored == ()
    (tmp_path / "A.txt").write_text("plain")
    assert captions(scan(tmp_path))["A.JPG"] == ("plain",)


def test_a_broken_metadata_line_is_named(tmp_path):
    add(tmp_path, "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "fine"}\n{"text": "whose?"}')
    with pytest.raises(ValueError, match=r"metadata\.jsonl, line 2: not"):
        scan(tmp_path)


def test_masks_belong_to_their_image_and_are_no_images(tmp_path):
    add(tmp_path, "a.png"), add(tmp_path, "a-mask.png", None), add(tmp_path, "gas-mask.png")
    images = scan(tmp_path)
    assert {sample.name: sample.mask for sample in images.samples} == {
        "a.png": "a-mask.png",
        "gas-mask.png": "",
    }
    off = scan(tmp_path, DatasetConfig(mask=MaskConfig(source="off")))
    assert names(off) == ["a.png", "gas-mask.png"] and not off.samples[0].mask


@links
def test_a_symlink_loop_is_walked_once(tmp_path):
    add(tmp_path, "in/a.png")
    (tmp_path / "in/again").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    assert names(scan(tmp_path, DatasetConfig(recursive=True))) == ["in/a.png"]


@links
def test_a_link_out_of_the_folder_is_named(tmp_path):
    outside = add(tmp_path / "outside", "a.png")
    add(tmp_path / "set", "b.png")
    (tmp_path / "set/a.png").symlink_to(outside)
    (tmp_path / "set/a.txt").symlink_to(outside.with_suffix(".txt"))
    with pytest.raises(ValueError, match=r"is a link that leads out of the folder.*: a\.png"):
        scan(tmp_path / "set")


@pytest.mark.parametrize(
    "stem", ["\u732b \U0001f408", "e\u0301te\u0301", "quote's & 100%", "x" * 240, "-dash", "a.b.c"]
)
def test_unicode_and_very_long_names_are_read(tmp_path, stem):
    add(tmp_path, f"{stem}.png", None)
    (tmp_path / f"{stem}.txt").write_text("found", encoding="utf-8")
    assert captions(scan(tmp_path)) == {f"{stem}.png": ("found",)}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has file names that are no text")
def test_a_file_name_that_is_no_valid_text_is_read(tmp_path):
    add(tmp_path, "a.png", "found")
    for extension in (b".png", b".txt"):
        os.rename(tmp_path / f"a{extension.decode()}", os.fsencode(tmp_path) + b"/\xff" + extension)
    (name,) = names(scan(tmp_path))
    assert os.fsencode(name) == b"\xff.png"


def test_a_file_that_vanishes_during_the_scan_is_named(tmp_path):
    for name in "abcdefghij":
        add(tmp_path, f"{name}.png")
    vanish = lambda done, total, message: done == 1 and (tmp_path / "j.png").unlink(missing_ok=True)  # noqa: E731
    with pytest.raises(ValueError, match=r"j\.png: disappeared"):
        scan(tmp_path, on_progress=vanish)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    add(tmp_path, "a.png"), add(tmp_path, "locked/b.png")
    scandir = os.scandir
    refuse = lambda path: scandir(path if Path(path).name != "locked" else path / "gone")  # noqa: E731
    monkeypatch.setattr(folder_module.os, "scandir", refuse)
    with pytest.raises(ValueError, match="locked: the folder cannot be read"):
        scan(tmp_path, DatasetConfig(recursive=True))


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    add(tmp_path, "a.png"), add(tmp_path, "secret.png")
    stat = Path.stat

    def refuse(self, **options):
        if self.name == "secret.png":
            raise PermissionError(13, "Permission denied")
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ValueError, match=r"secret\.png: .*Permission denied"):
        scan(tmp_path)


def test_scanning_reports_progress_and_can_be_cancelled(tmp_path):
    for name in "abcd":
        add(tmp_path, f"{name}.png")
    seen = []
    scan(tmp_path, on_progress=lambda done, total, message: seen.append((done, total)))
    assert list(dict.fromkeys(seen)) == [(0, 1), (0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    with pytest.raises(KeyboardInterrupt):
        scan(tmp_path, on_progress=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))


def test_the_fingerprint_notices_every_edit_without_opening_a_file(tmp_path, monkeypatch):
    add(tmp_path, "a.png"), add(tmp_path, "in/b.png")
    seen = [fingerprint(tmp_path)]
    assert seen[0] == fingerprint(tmp_path)
    (tmp_path / "a.txt").write_text("another caption")
    seen.append(fingerprint(tmp_path))
    add(tmp_path, "a-mask.png", None)
    seen.append(fingerprint(tmp_path))
    (tmp_path / "a.png").rename(tmp_path / "c.png")
    seen += [fingerprint(tmp_path), fingerprint(tmp_path, DatasetConfig(recursive=True))]
    seen.append(fingerprint(tmp_path, replace(SKIP, repeats=2)))
    assert len(set(seen)) == 6


def test_a_read_only_folder_is_no_obstacle(tmp_path):
    add(tmp_path, "a.png")
    tmp_path.chmod(0o555)
    try:
        assert names(scan(tmp_path)) == ["a.png"]
    finally:
        tmp_path.chmod(0o755)


PIPES = ["a.txt", "a.caption", "a.json", "metadata.jsonl", "b.png", "b.npz"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders there")
@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_is_named_and_not_waited_for(tmp_path, name):
    add(tmp_path, "a.png", None)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}.*\(it is a pipe, a socket or a device"):
        scan(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders there")
def test_a_pipe_that_nobody_reads_is_no_obstacle(tmp_path):
    add(tmp_path, "a.png", "found")
    os.mkfifo(tmp_path / "commands")
    assert captions(scan(tmp_path)) == {"a.png": ("found",)}


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no sockets in folders there")
def test_a_socket_is_named(tmp_path, monkeypatch):
    add(tmp_path, "a.png", None)
    monkeypatch.chdir(tmp_path)  # the address of a socket may be no longer than 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("a.txt")
        with pytest.raises(ValueError, match=r"a\.txt cannot be read \(it is a pipe, a socket"):
            scan(tmp_path)


DEEP = "[" * 100_000
TOO_MUCH = {
    "a.txt": ("word " * 2_000_000, rf"its caption a\.txt has more than {LARGEST} characters"),
    "a.caption": ("x" * (LONGEST + 1), rf"its caption, as trained, has {LONGEST + 1} characters"),
    "a.json": (DEEP, r"a\.json is not valid JSON \(its lists lie too deep"),
    "metadata.jsonl": (DEEP, r"metadata\.jsonl, line 1: not \{.*its lists lie too deep"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_caption_that_is_too_long_or_too_deep_is_named(tmp_path, name):
    add(tmp_path, "a.png", None), add(tmp_path, "b.png", "fine")
    text, reason = TOO_MUCH[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name if name == 'metadata.jsonl' else 'a.png'}: .*{reason}"):
        scan(tmp_path)
    assert captions(scan(tmp_path, SKIP)) == {"b.png": ("fine",)}


def test_a_line_of_metadata_without_an_end_is_named(tmp_path):
    add(tmp_path, "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "fine"}\n' + "x" * (LARGEST + 2))
    with pytest.raises(ValueError, match=r"metadata\.jsonl, line 2 has more than"):
        scan(tmp_path)


def test_a_list_of_captions_has_a_limit(tmp_path):
    add(tmp_path, "a.png", None)
    for count in (MOST_CAPTIONS, MOST_CAPTIONS + 1):
        (tmp_path / "a.json").write_text(json.dumps({"captions": [f"number {i}" for i in range(count)]}))
        if count <= MOST_CAPTIONS:
            assert len(captions(scan(tmp_path))["a.png"]) == count
    with pytest.raises(
        ValueError, match=rf"a\.json: {count} captions for one image; at most {MOST_CAPTIONS} are"
    ):
        scan(tmp_path)


def test_what_a_caption_grows_to_counts_towards_its_limit(tmp_path):
    add(tmp_path, "a.png", "[trigger] " * 100)
    assert scan(tmp_path, captioned(trigger="x" * 100))
    with pytest.raises(ValueError, match=r"a\.png: its caption, as trained, has 2\d{4} characters"):
        scan(tmp_path, captioned(trigger="x" * 200))


@pytest.mark.parametrize("name", ["prefix", "suffix", "trigger"])
def test_what_is_added_to_every_caption_has_a_limit(name):
    captioned(**{name: "x" * MOST_ADDED})
    with pytest.raises(
        ValueError, match=f"the {name} has {MOST_ADDED + 1} letters; the limit is {MOST_ADDED}"
    ):
        captioned(**{name: "x" * (MOST_ADDED + 1)})


def test_a_metadata_file_is_read_line_by_line_and_cancel_is_asked_for_at_each(tmp_path):
    add(tmp_path, "a.png")
    line = json.dumps(
        {"file_name": "a.png", "text": "letters \u2028 that end lines elsewhere"}, ensure_ascii=False
    )
    (tmp_path / "metadata.jsonl").write_text(f"{line}\n" * 1000, encoding="utf-8")
    seen = []
    scan(tmp_path, captioned(source="jsonl"), on_progress=lambda *event: seen.append(event))
    assert len(seen) > 1000


def test_cancel_is_asked_for_at_each_file_of_a_folder(tmp_path):
    for number in range(50):
        (tmp_path / f"{number}.txt").write_text("")
    add(tmp_path, "a.png")
    calls = []
    fingerprint(tmp_path, check=lambda: calls.append(1))
    assert len(calls) > 2 * 50
