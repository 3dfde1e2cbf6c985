"""The routes of the list of runs: what they tell, what they do to a run, and what they refuse."""

from __future__ import annotations

import json

import pytest
from PIL import Image, PngImagePlugin

from graft.tests.support.routes import ask
from graft.tests.support.runs import EVERY_STEP, go
from graft.training.comfy import paths
from graft.training.comfy.run import run_graph, session
from graft.training.files.tensor_file import TensorFile
from graft.training.loop import Progress
from graft.training.run import queued
from graft.training.run.checkpoints import Checkpoints
from graft.training.run.folder import Run

RUN = "people/anna-0123456789abcdef"
SMALL = f"/graft/sample?run={RUN}&name=step-00000002-0.png&small=1"
TRAIN = {"class_type": "GraftTrainSteps", "inputs": {"steps": 4, "name": "people/anna", "total_steps": 0}}
PROMPT = {"3": {"class_type": "GraftLoadBaseModel", "inputs": {}}, "5": TRAIN}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """An output folder with a run of four steps, cosine over them, a sample, and a secret beside."""
    root = tmp_path_factory.mktemp("base") / "output"
    folder = root / "graft" / RUN
    go(folder, 4)
    queued.note_queued(folder, "digest", 4)
    run_graph.note_graph(folder, "5", PROMPT, {"id": "w", "nodes": []})
    (folder / "samples").mkdir()
    info = PngImagePlugin.PngInfo()
    info.add_text("prompt", json.dumps(PROMPT))
    Image.new("RGB", (640, 480), "red").save(folder / "samples" / "step-00000002-0.png", pnginfo=info)
    (root / "secret-0123456789abcdef").mkdir()
    (root / "secret-0123456789abcdef" / "log.jsonl").write_text('{"step": 1}\n')
    return root


@pytest.fixture(autouse=True)
def comfyui(output, monkeypatch):
    monkeypatch.setattr(paths.folder_paths, "get_output_directory", lambda: str(output))
    monkeypatch.setattr(session, "_runs", {})


@pytest.fixture
def folder(output):
    return output / "graft" / RUN


def get(question):
    [(status, body)] = ask(question)
    assert status == 200, body
    return json.loads(body)


def post(route, status=200, headers=None, **body):
    [(found, text)] = ask(f"/graft/runs/{route}", method="post", json=body, headers=headers)
    assert found == status, text
    return json.loads(text)


def test_every_run_is_told_and_that_one_is_under_way(folder):
    [row] = get("/graft/runs/all")["runs"]
    assert (row["run"], row["step"], row["ended"], row["sample"]) == (RUN, 4, True, "step-00000002-0.png")
    assert row["live"] is None and row["bytes"] > 0
    with session.show_run(RUN, first=0, last=9, can=["save"]):
        assert get("/graft/runs/all")["runs"][0]["live"]["can"] == ["save"]
    assert get(f"/graft/runs/settings?run={RUN}")["adapter.rank"] == 4


def test_a_small_sample_is_drawn_once_into_the_cache(output):
    [(status, body)] = ask(SMALL)
    [kept] = (output / "graft" / "cache" / "thumbnails").rglob("*.jpg")
    assert status == 200 and body == kept.read_bytes()
    assert Image.open(kept).size == (320, 240)


def test_a_run_draws_and_saves_on_request_where_it_can():
    step = Progress(1, 1.0, 1e-4, 1.0, 0.1)
    with session.show_run(RUN, first=0, last=9, can=["save"]) as show:
        assert "Sample Prompts" in post("now", 400, run=RUN, what="draw")["error"]
        assert "cannot fly" in post("now", 400, run=RUN, what="fly")["error"]
        for _ in range(2):
            post("now", run=RUN, what="save")
        show(step)
        assert session.take_request(RUN, "save") and not session.take_request(RUN, "save")
    assert "not being trained" in post("now", 400, run=RUN, what="save")["error"]


def test_the_lora_of_a_run_is_put_where_load_lora_lists_it_and_replaces_no_other(output, folder):
    name = post("lora", run=RUN)["name"]
    assert name == "people/anna-000004.safetensors" and post("lora", run=RUN)["name"] == name
    written = output / "loras" / name
    assert TensorFile(written).metadata["modelspec.title"].startswith("anna")
    written.write_bytes(b"another")
    assert post("lora", run=RUN)["name"] == f"{RUN}-000004.safetensors"
    assert written.read_bytes() == b"another"


def continued(folder, **changes):
    run_graph.note_graph(folder, "5", {**PROMPT, "5": {**TRAIN, "inputs": TRAIN["inputs"] | changes}}, None)
    found = get(f"/graft/runs/graph?run={RUN}")
    run_graph.note_graph(folder, "5", PROMPT, {"id": "w", "nodes": []})
    return found["how"], found["steps"]


def test_the_graph_of_a_run_says_how_it_goes_on(folder):
    found = get(f"/graft/runs/graph?run={RUN}")
    assert (found["node"], found["prompt"], found["workflow"]) == ("5", PROMPT, {"id": "w", "nodes": []})
    assert found["how"] == run_graph.FROM_STATE  # cosine ends with its steps
    assert continued(folder, total_steps=20) == (run_graph.MORE_STEPS, 8)
    assert continued(folder, total_steps=20, steps=["7", 0]) == (run_graph.FROM_STATE, 0)
    queued.note_queued(folder, "digest", 9)
    assert continued(folder, total_steps=20, steps=9) == (run_graph.AS_IS, 0)
    Checkpoints(Run(folder)).finish(4, 9)
    assert continued(folder, total_steps=20, steps=9) == (run_graph.MORE_STEPS, 13)
    queued.note_queued(folder, "digest", 4)


@pytest.mark.parametrize("kept", [None, "{}", "[" * 100_000, '{"node": "5", "prompt": {"5": 5}}'])
def test_a_run_without_a_graph_has_it_in_its_samples_or_gets_one(folder, kept):
    file, sample = folder / run_graph.GRAPH, folder / "samples" / "step-00000002-0.png"
    before, drawn = file.read_text(), sample.read_bytes()
    file.write_text(kept) if kept else file.unlink()
    assert get(f"/graft/runs/graph?run={RUN}")["prompt"] == PROMPT
    sample.write_bytes(b"")
    made = get(f"/graft/runs/graph?run={RUN}")["prompt"]
    assert made["4"]["inputs"] == {"name": RUN} and made["5"]["inputs"]["learning_rate"] == 1e-3
    sample.write_bytes(drawn)
    file.write_text(before)


OUTSIDE = ["nobody", "../secret-0123456789abcdef", "", "..", "/etc", "\x00", "people", "cache", 5, None]


@pytest.mark.parametrize("run", OUTSIDE)
def test_runs_that_are_none_are_refused(run, folder, output):
    before = sorted(output.rglob("*"))
    for route in ("delete", "lora", "now"):
        [(status, body)] = ask(f"/graft/runs/{route}", method="post", json={"run": run})
        assert status in (400, 404) and json.loads(body)["error"]
    assert sorted(output.rglob("*")) == before


@pytest.mark.parametrize("route", ["delete", "lora", "now"])
def test_other_sites_are_refused(route, folder):
    for headers in ({"Origin": "http://elsewhere"}, {"Sec-Fetch-Site": "cross-site"}):
        post(route, 403, headers, run=RUN, what="save")
    [(status, _)] = ask(f"/graft/runs/{route}", method="post", data=json.dumps({"run": RUN}).encode())
    assert status == 400 and folder.is_dir()
    [(status, _)] = ask("/graft/runs/all", headers={"Sec-Fetch-Site": "cross-site"})
    assert status == 403


def test_a_hundred_requests_at_once_are_all_answered(folder):
    questions = ["/graft/runs", "/graft/runs/all", f"/graft/log?run={RUN}", f"/graft/files?run={RUN}", SMALL]
    one_by_one = dict(zip(questions, ask(*questions)))
    answers = ask(*questions * 20, at_once=True)
    assert answers == [one_by_one[question] for question in questions * 20]


def test_a_run_is_deleted_unless_it_is_under_way(folder, output):
    with session.show_run(RUN, first=0, last=9):
        assert "Finish or Cancel it" in post("delete", 400, run=RUN)["error"] and folder.is_dir()
    session._runs.clear()
    freed = post("delete", run=RUN)["freed"]
    assert freed > 0 and not folder.exists() and get("/graft/runs/all")["runs"] == []
    assert ask(f"/graft/log?run={RUN}")[0][0] == 404
    go(folder, 1, saving=EVERY_STEP)  # and can be trained anew
    assert get("/graft/runs/all")["runs"][0]["step"] == 1
