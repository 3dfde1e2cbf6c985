"""Files that a browser sends: only whole, usable ones reach a dataset, whatever a zip holds."""

from __future__ import annotations

import io
import os
import shutil
import zipfile

import pytest
from PIL import Image

from graft.tests.support.datasets import HEIC
from graft.training.data.upload import take_upload
from graft.training.data.zip_file import MOST_FILES
from graft.training.user_error import UserError


def picture(color="red", kind="PNG", size=(64, 48)):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind)
    return file.getvalue()


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    return folder


def send(place, name, content, *, replace=False, most_bytes=1 << 20):
    """What became of a file that was sent."""
    arriving = place / ".arriving"
    shutil.rmtree(arriving, ignore_errors=True)
    arriving.mkdir()
    (arriving / "file").write_bytes(content)
    return take_upload(arriving / "file", name, place.joinpath, replace=replace, most_bytes=most_bytes)


def zipped(files, **flags):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name) if isinstance(name, str) else name
            for flag, value in flags.items():
                setattr(info, flag, value)
            archive.writestr(info, content)
    return file.getvalue()


def names(place):
    return sorted(
        path.relative_to(place).as_posix()
        for path in place.rglob("*")
        if path.is_file() and path.relative_to(place).parts[0] != ".arriving"
    )


def test_an_image_and_its_caption_are_saved(place):
    assert send(place, "cat.png", picture()).saved == ["cat.png"]
    assert send(place, "10_cat/cat.txt", "a cat é".encode()).saved == ["10_cat/cat.txt"]
    assert names(place) == ["10_cat/cat.txt", "cat.png"]


def test_a_file_is_replaced_only_on_request(place):
    send(place, "cat.png", picture("red"))
    assert send(place, "cat.png", picture("red")).same == ["cat.png"]
    assert send(place, "cat.png", picture("blue")).exists == ["cat.png"]
    assert (place / "cat.png").read_bytes() == picture("red")
    assert send(place, "cat.png", picture("blue"), replace=True).saved == ["cat.png"]
    assert (place / "cat.png").read_bytes() == picture("blue")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("cat.mp4", b"film", "neither an image nor a caption; avif, bmp"),
        ("cat.png", b"film", "is not an image, whatever its extension .png says"),
        ("cat.png", b"", "the file is empty"),
        ("cat.jpg", HEIC, "is a HEIC photo"),
        ("cat.jpg", picture(kind="JPEG", size=(640, 480))[:700], "truncated or damaged"),
        ("cat.png", picture(size=(4, 4)), "too small"),
        ("cat.txt", b"\xff\xfa\xe9", "not UTF-8"),
        ("cat.txt", b"a" * (5 << 20), "too large for a caption"),
        ("cat", picture(), "neither an image"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_is_refused_with_its_reason(place, name, content, reason):
    [(refused, why)] = send(place, name, content).refused
    assert refused == name and reason in why and names(place) == []


def test_a_zip_is_unpacked_without_the_folder_that_all_is_in(place):
    content = zipped(
        {
            "photos/a.png": picture("red"),
            "photos/a.txt": "a",
            "photos/notes.mp4": b"x",
            "photos/bad.png": b"x",
            "photos/.DS_Store": b"x",
            "__MACOSX/._a.png": b"x",
        }
    )
    received = send(place, "photos.zip", content)
    assert received.saved == ["a.png", "a.txt"] and received.others == ["photos/notes.mp4"]
    assert [name for name, _ in received.refused] == ["bad.png"]
    assert names(place) == ["a.png", "a.txt"]


def test_a_folder_that_counts_repeats_stays(place):
    assert send(place, "x.zip", zipped({"10_cat/a.png": picture()})).saved == ["10_cat/a.png"]


LINK = zipfile.ZipInfo("a.png")
LINK.create_system, LINK.external_attr = 3, 0o120777 << 16


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (zipped({"a.png": picture(), "../b.png": picture()}), "leads out of its folder"),
        (zipped({"a.png": picture(), "/etc/b.png": picture()}), "leads out of its folder"),
        (zipped({"a.png": picture(), "x\\..\\..\\b.png": picture()}), "leads out of its folder"),
        (zipped({"b.png": picture(), LINK: "/etc/passwd"}), "is a link or a device"),
        (zipped({"a.png": bytes(9 << 20)}), "unpacks to 9 MB; 8 MB are the most"),
        (zipped({f"{i}.png": b"" for i in range(MOST_FILES + 1)}), f"{MOST_FILES} are the most"),
        (zipped({"a.png": picture()})[:-30], "is no zip file, or a damaged one"),
        (zipped({"a.png": picture(kind="BMP")}).replace(b"\xff\x00\x00", b"\xfe\x00\x00"), "damaged one"),
        (b"PK\3\4" + bytes(100), "is no zip file"),
        (zipped({"a.mp4": b"x"}), "holds no images or captions"),
    ],
    ids=range(10),
)
def test_a_zip_that_is_dangerous_or_damaged_is_refused_as_a_whole(place, content, reason):
    with pytest.raises(UserError, match=reason):
        send(place, "x.zip", content, most_bytes=1_000_000)
    assert names(place) == []


def test_a_zip_of_a_million_files_is_refused_before_its_directory_is_read(place, monkeypatch):
    end = b"PK\5\6" + bytes(4) + b"\xff\xff\xff\xff" + (60 << 20).to_bytes(4, "little") + bytes(6)
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("was read"))
    with pytest.raises(UserError, match="too many files"):
        send(place, "x.zip", b"PK\1\2" * 1000 + end)


def test_names_of_other_encodings_in_a_zip_are_read_or_readable(place):
    content = zipped({"caf\u00e9.png": picture()})
    assert send(place, "x.zip", content).saved == ["caf\u00e9.png"]
    unmarked = zipped({"caf??.png": picture()}).replace(b"caf??", "caf\u00e9".encode())  # as macOS writes it
    assert send(place, "x.zip", unmarked).same == ["caf\u00e9.png"]
    [saved] = send(place, "x.zip", zipped({"caf?.png": picture()}).replace(b"caf?", b"caf\xe9")).saved
    assert saved.encode() and names(place) == sorted(["caf\u00e9.png", saved])
    with pytest.raises(UserError, match="damaged"):
        send(place, "x.zip", content.replace("caf\u00e9".encode(), b"caf\xe9!"))


def test_a_full_disk_keeps_nothing_of_a_zip(small_disk):
    content = zipped({f"{i}.bmp": os.urandom(300_000) for i in range(3)})
    with pytest.raises(OSError, match="No space left"):
        send(small_disk, "x.zip", content, most_bytes=1 << 20)
    assert names(small_disk) == []
