"""The routes of datasets read and write inside datasets only, for pages of this ComfyUI only."""

from __future__ import annotations

import asyncio
import io
import json
import os
from urllib.parse import urlencode

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image

from graft.nodes.dataset import DatasetFromImages
from graft.training.comfy import paths
from graft.training.comfy.dataset import folders, in_memory
from graft.training.comfy.dataset import routes as server
from graft.training.comfy.dataset import upload as uploading

OCTETS = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def here(tmp_path, monkeypatch, graft_nodes):
    """ComfyUI's folders, with two captioned images in input/cats and a secret beside it."""
    for name in ("input", "output"):
        monkeypatch.setattr(
            paths.folder_paths, f"get_{name}_directory", lambda name=name: str(tmp_path / name)
        )
    folder = tmp_path / "input" / "cats"
    folder.mkdir(parents=True)
    for index, color in enumerate(("red", "green")):
        Image.new("RGB", (200, 100 + index), color).save(folder / f"{color}.png")
        (folder / f"{color}.txt").write_text(f"a {color} cat\n")
    Image.new("RGB", (99, 99), "white").save(tmp_path / "secret.png")
    return tmp_path


def picture(color="blue", size=(80, 60)):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def ask(*requests):
    """(status, body) of (method, path, options) each, all at once."""

    async def one(client, method, path, options):
        async with client.request(method, path, **options) as answer:
            return answer.status, await answer.read()

    async def asking():
        app = web.Application()
        app.add_routes(server.routes())
        async with TestClient(TestServer(app)) as client:
            return await asyncio.gather(*(one(client, *request) for request in requests))

    return asyncio.run(asking())


def graph(folder="cats", settings=None, **inputs):
    load = {"folder": folder, "resolution": "128", "trigger": "ohwx", **inputs}
    return {
        "2": {"class_type": "GraftLoadDataset", "inputs": load},
        "3": {"class_type": "GraftDatasetSettings", "inputs": settings or {}},
    }


def post(path, **body):
    [(status, answer)] = ask(("post", f"/graft/dataset{path}", {"json": body}))
    return status, json.loads(answer)


def listed(**inputs):
    status, answer = post("", prompt=graph(**inputs), node="2")
    assert status == 200, answer
    return answer


def entry(name, **inputs):
    return next(row for row in listed(**inputs)["images"] if row["name"] == name)


def send(name, content=b"", folder="cats", **options):
    query = urlencode({"folder": folder, "name": name, **options.pop("query", {})})
    options = {"headers": OCTETS, "data": content, **options}
    [(status, answer)] = ask(("post", f"/graft/dataset/upload?{query}", options))
    return status, json.loads(answer)


def thumbnail(folder, key):
    return "get", f"/graft/dataset/thumbnail?{urlencode({'folder': folder, 'key': key})}", {}


def write(name, text, before, **inputs):
    key = folders.key_of(name)
    return post("/caption", prompt=graph(**inputs), node="2", key=key, text=text, before=before)


def files(here):
    return {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}


def test_images_are_listed_with_size_crop_and_caption(here):
    found = listed()
    assert [row["name"] for row in found["images"]] == ["green.png", "red.png"] and found["editable"]
    red = entry("red.png")
    assert (red["width"], red["height"], red["caption"]) == (200, 100, "a red cat")
    assert red["bucket"] == [128, 64] or red["bucket"] == [192, 64]
    assert red["trained"] == "ohwx, a red cat" and not red["problem"]
    left, top, right, bottom = red["crop"]
    shape = (right - left) * 200 / ((bottom - top) * 100)
    assert shape == pytest.approx(red["bucket"][0] / red["bucket"][1], rel=0.01)


def test_unusable_images_duplicates_and_those_left_out_are_marked(here):
    folder = here / "input" / "cats"
    (folder / "copy.png").write_bytes((folder / "red.png").read_bytes())
    (folder / "copy.txt").write_text("a copy")
    (folder / "torn.png").write_bytes((folder / "red.png").read_bytes()[:60])
    picture_file = folder / "bare.png"
    picture_file.write_bytes(picture())
    assert entry("bare.png")["problem"] == "no caption"
    assert entry("bare.png", missing_captions="trigger")["trained"] == "ohwx"
    assert "truncated" in entry("torn.png")["problem"]
    assert entry("red.png")["same_as"] == "copy.png" and not entry("copy.png")["same_as"]
    assert entry("torn.png", leave_out="torn.png\nbare*")["left_out"] == "torn.png"
    assert entry("bare.png", leave_out="torn.png\nbare*")["left_out"] == "bare*"


def test_settings_of_a_connected_node_count(here):
    link = ["3", 0]
    assert not listed(settings={"captions_from": "file name"}, dataset_settings=link)["editable"]
    assert entry("red.png", settings={"square": True}, dataset_settings=link)["bucket"] == [128, 128]


def test_a_thumbnail_is_drawn_once(here, monkeypatch):
    key = folders.key_of("red.png")
    [(status, body)] = ask(thumbnail("cats", key))
    assert status == 200 and Image.open(io.BytesIO(body)).size == (200, 100)
    [kept] = (here / "output" / "graft" / "cache" / "thumbnails").rglob("*.jpg")
    monkeypatch.setattr(
        "graft.training.data.thumbnail.read_image", lambda *_, **__: pytest.fail("drawn again")
    )
    assert ask(thumbnail("cats", key)) == [(200, kept.read_bytes())]


@pytest.mark.feature(158)
def test_a_caption_is_written_beside_its_image_and_read_again(here):
    assert write("red.png", " a crimson cat ", "a red cat") == (200, {"caption": "a crimson cat"})
    assert (here / "input" / "cats" / "red.txt").read_text() == "a crimson cat\n"
    assert not list((here / "input").rglob(".writing-*"))


def test_a_caption_that_was_changed_meanwhile_is_not_overwritten(here):
    (here / "input" / "cats" / "red.txt").write_text("by another hand")
    status, answer = write("red.png", "mine", "a red cat")
    assert status == 409 and "by another hand" in answer["error"]
    assert (here / "input" / "cats" / "red.txt").read_text() == "by another hand"


def test_a_caption_keeps_the_file_that_a_camera_made(here):
    folder = here / "input" / "cats"
    (folder / "red.txt").rename(folder / "red.TXT")
    assert write("red.png", "new", "a red cat")[0] == 200
    assert (folder / "red.TXT").read_text() == "new\n" and not (folder / "red.txt").is_file()


@pytest.mark.parametrize(
    ("name", "text", "inputs"),
    [
        ("red.png", "x" * 20_000, {}),
        ("red.png", "half \ud800", {}),
        ("../../secret.png", "x", {}),
        ("red.txt", "x", {}),
        ("", "x", {}),
        ("gone.png", "x", {}),
        ("red.png", "x", {"folder": "../.."}),
        ("red.png", "x", {"folder": ["9", 0]}),
        ("red.png", "x", {"settings": {"captions_from": "json"}, "dataset_settings": ["3", 0]}),
    ],
)
def test_what_is_no_caption_of_a_dataset_is_refused(here, name, text, inputs):
    before = files(here)
    status, answer = write(name, text, "a red cat", **inputs)
    assert status == 400 and answer["error"] and files(here) == before


@pytest.mark.feature(158)
def test_a_file_is_taken_into_a_new_folder_of_the_input(here):
    status, answer = send("a/cat.png", picture(), folder="dogs")
    assert (status, answer["saved"]) == (200, ["a/cat.png"])
    assert (here / "input" / "dogs" / "a" / "cat.png").read_bytes() == picture()
    assert not list((here / "input").rglob(f"{uploading.ARRIVING}*"))


def test_an_existing_file_is_replaced_only_on_request(here):
    assert send("red.png", picture())[1]["exists"] == ["red.png"]
    assert send("red.png", picture(), query={"replace": "1"})[1]["saved"] == ["red.png"]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("../x.png", "cats"),
        ("/etc/x.png", "cats"),
        ("a/../../x.png", "cats"),
        ("x.png", "../cats"),
        ("x.png", "/tmp"),
        ("x.png", ""),
        ("", "cats"),
        (".hidden.png", "cats"),
        ("x.png", ".hidden"),
        ("con.png", "cats"),
        ("a\0.png", "cats"),
        ("x" * 300 + ".png", "cats"),
        ("caf\udce9.png", "cats"),
    ],
)
def test_a_name_that_leads_elsewhere_or_that_no_file_may_have_is_refused(here, name, folder):
    before = files(here)
    query = urlencode({"folder": folder, "name": name}, errors="surrogateescape")
    [(status, body)] = ask(("post", f"/graft/dataset/upload?{query}", {"headers": OCTETS, "data": picture()}))
    answer = json.loads(body)
    assert status == 400 or answer["refused"] or answer["saved"] == ["caf\ufffd.png"], answer
    after = files(here)
    assert {path: after[path] for path in before} == before
    assert all(path.parent == here / "input" / "cats" for path in after.keys() - before.keys())


def test_a_file_over_the_limit_is_refused_whether_or_not_it_says_its_size(here, monkeypatch):
    monkeypatch.setattr(uploading.args, "max_upload_size", 0.01)
    status, answer = send("x.png", b"x" * 20_000)
    assert status == 413 and "--max-upload-size" in answer["error"]

    async def pieces():
        for _ in range(20):
            yield b"x" * 1000

    assert send("x.png", pieces())[0] == 413
    assert not list((here / "input").rglob(f"{uploading.ARRIVING}*"))


def test_a_connection_that_is_lost_half_way_leaves_nothing(here):
    async def losing():
        app = web.Application()
        app.add_routes(server.routes())
        async with TestServer(app) as started:
            _, writer = await asyncio.open_connection(started.host, started.port)
            writer.write(
                b"POST /graft/dataset/upload?folder=cats&name=x.png HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/octet-stream\r\nContent-Length: 5000000\r\n\r\n" + bytes(1000)
            )
            await writer.drain()
            while not (arrived := list((here / "input").rglob(f"{uploading.ARRIVING}*"))):
                await asyncio.sleep(0.01)
            writer.transport.abort()
            while arrived[0].exists():
                await asyncio.sleep(0.01)

    before = files(here)
    asyncio.run(asyncio.wait_for(losing(), 30))
    assert files(here) == before


def test_a_full_disk_is_told_and_nothing_is_kept(here, monkeypatch):
    before = files(here)

    def fill(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(uploading, "_write", fill)
    status, answer = send("x.png", picture())
    assert status == 507 and "disk is full" in answer["error"] and files(here) == before


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "null"},
    ],
)
def test_other_origins_are_refused(here, headers):
    body = {
        "prompt": graph(),
        "node": "2",
        "key": folders.key_of("red.png"),
        "text": "x",
        "before": "a red cat",
    }
    before = files(here)
    answers = ask(
        ("post", "/graft/dataset", {"json": body, "headers": headers}),
        ("post", "/graft/dataset/caption", {"json": body, "headers": headers}),
        (*thumbnail("cats", folders.key_of("red.png"))[:2], {"headers": headers}),
        (
            "post",
            "/graft/dataset/upload?folder=cats&name=x.png",
            {"headers": {**OCTETS, **headers}, "data": b"x"},
        ),
    )
    assert [status for status, _ in answers] == [403] * 4 and files(here) == before


def test_what_a_form_of_another_site_can_send_is_refused(here):
    text = json.dumps({"prompt": graph(), "node": "2", "key": folders.key_of("red.png"), "text": "x"})
    plain = {"data": text, "headers": {"Content-Type": "text/plain"}}
    answers = ask(
        ("post", "/graft/dataset/caption", plain),
        ("post", "/graft/dataset/upload?folder=cats&name=x.png", plain),
    )
    assert [status for status, _ in answers] == [400, 400]


def test_the_images_that_come_with_graft_are_not_changed(here, monkeypatch):
    monkeypatch.setattr(folders, "GRAFT", here / "input" / "cats")
    assert "come with Graft" in listed()["why"] and not listed()["editable"]
    assert write("red.png", "x", "a red cat")[0] == 400 and send("x.png", picture())[0] == 400


def test_links_that_lead_out_are_not_followed(here):
    folder = here / "input" / "cats"
    try:
        (folder / "out.png").symlink_to(here / "secret.png")
        (here / "input" / "linked").symlink_to(here / "output", target_is_directory=True)
    except OSError:
        pytest.skip("no symbolic links here")
    assert "leads out" in entry("out.png")["problem"]
    assert ask(thumbnail("cats", folders.key_of("out.png")))[0][0] == 400
    assert send("x.png", picture(), folder="linked")[0] == 400


def test_a_dataset_of_the_graph_is_shown_while_it_is_in_memory(here):
    output = DatasetFromImages.execute(
        images=[torch.rand(2, 48, 64, 3)], captions=["one\ntwo"], resolution=["64"], trigger=[""],
        missing_captions=["error"], repeats=[1], caption_dropout=[0.0], flip=[False],
    )  # fmt: skip
    [word] = output.ui["graft_set"]
    status, answer = post("", set=word)
    assert status == 200 and [row["caption"] for row in answer["images"]] == ["one", "two"]
    query = urlencode({"set": word, "key": answer["images"][1]["key"]})
    [(status, body)] = ask(("get", f"/graft/dataset/thumbnail?{query}", {}))
    assert status == 200 and Image.open(io.BytesIO(body)).size == (64, 48)
    del output
    assert in_memory.known_set(word) is None
    assert "run the node again" in post("", set=word)[1]["error"]


def test_any_body_is_answered_without_an_error_of_the_server(here):
    graphs = (5, {}, {"2": 5}, graph(resolution=5), graph(flip="x", resolution="no"), graph(leave_out=5))
    bodies = [5, [], "x", None, {}, {"set": ["x"]}, {"prompt": graph(), "node": [1]}]
    bodies += [{"prompt": prompt, "node": 2} for prompt in graphs]
    answers = ask(
        *(("post", f"/graft/dataset{path}", {"json": body}) for body in bodies for path in ("", "/caption"))
    )
    assert {status for status, _ in answers} <= {200, 400}
    texts = ("[" * 100_000, "{", b"\xff")
    json_type = {"Content-Type": "application/json"}
    answers = ask(*(("post", "/graft/dataset", {"data": text, "headers": json_type}) for text in texts))
    assert {status for status, _ in answers} == {400}
    keys = ("zz", "", "00", folders.key_of("../../secret.png"), "c3", folders.key_of("a" * 1500))
    answers = ask(*(thumbnail("cats", key) for key in keys))
    answers += ask(*(("get", f"/graft/dataset/thumbnail?set=x&key={key}", {}) for key in keys))
    assert {status for status, _ in answers} == {400}


def test_a_hundred_requests_at_once_are_all_answered(here):
    key = folders.key_of("red.png")
    body = {"json": {"prompt": graph(), "node": "2"}}
    uploads = [
        ("post", f"/graft/dataset/upload?folder=cats&name={i}.png", {"headers": OCTETS, "data": picture()})
        for i in range(34)
    ]
    others = [thumbnail("cats", key)] * 33 + [("post", "/graft/dataset", body)] * 33
    answers = ask(*uploads, *others)
    assert {status for status, _ in answers} == {200}
    assert len(list((here / "input" / "cats").glob("*.png"))) == 36
    assert sorted(os.listdir(here / "input")) == ["cats"]
