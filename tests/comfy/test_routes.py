"""The routes under /graft/ give what lies in a run's folder, and nothing else, whatever is asked of them."""

from __future__ import annotations

import json
import os
import random
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from aiohttp import web

import graft
from graft.tests.support.opened_files import watched
from graft.tests.support.routes import ask
from graft.training.comfy import paths
from graft.training.comfy.run import routes as server
from graft.training.comfy.run import session
from graft.training.loop import STOP, Progress
from graft.training.run import queued, run_log

CASES = int(os.environ.get("GRAFT_FUZZ_CASES", 2000))
RUN = "people/anna-0123456789abcdef"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of three steps with two samples, beside a secret that is no part of it."""
    monkeypatch.setattr(paths.folder_paths, "get_output_directory", lambda: str(tmp_path / "output"))
    folder = tmp_path / "output" / "graft" / RUN
    for step in (2, 3):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (folder / "log.jsonl").write_text(
        "".join(json.dumps({"step": s, "loss": 1 / s}) + "\n" for s in (1, 2, 3))
    )
    (folder / "samples").mkdir()
    for step in (3, 2):
        (folder / "samples" / f"step-{step:08d}-0.png").write_bytes(b"picture %d" % step)
    (folder / "samples" / "notes.txt").write_text("secret")
    (folder / "samples" / "input-1.png").write_bytes(b"original")
    (tmp_path / "output" / "graft" / "other").mkdir()
    (tmp_path / "output" / "secret.png").write_text("secret")
    (tmp_path / "log.jsonl").write_text('{"step": 1, "secret": 1}\n')
    return folder


def get(question):
    status, body = ask(question)[0]
    assert status == 200
    return json.loads(body)


def test_the_log_comes_from_a_byte_on(run):
    whole = get(f"/graft/log?run={RUN}")
    assert [entry["step"] for entry in whole["entries"]] == [1, 2, 3] and not whole["more"]
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": NaN}\n{"step": 5')  # a line that is being written
    later = get(f"/graft/log?run={RUN}&start={whole['next']}")
    assert later["entries"] == [{"step": 4, "loss": None}] and later["start"] == whole["next"]
    (run / "log.jsonl").write_text('{"step": 1}\n')
    assert get(f"/graft/log?run={RUN}&start={later['next']}")["start"] == 0


def test_a_run_that_has_begun_has_nothing_before_its_first_step(run):
    with session.show_run("people/begun-0", first=0, last=9):
        assert get("/graft/log?run=people/begun-0")["entries"] == []
        assert get("/graft/files?run=people/begun-0") == {"samples": [], "inputs": [], "checkpoints": []}
    session._runs.pop("people/begun-0")
    assert ask("/graft/log?run=people/begun-0")[0][0] == 404


def test_a_long_log_comes_in_parts(run, monkeypatch):
    monkeypatch.setattr(run_log, "CHUNK", 40)
    assert [entry["step"] for entry in all_entries(run / "log.jsonl")] == [1, 2, 3]


def all_entries(path):
    entries, start, more = [], 0, True
    while more:
        part = run_log.read_entries(path, start)
        entries += part["entries"]
        start, more = part["next"], part["more"]
    return entries


def test_a_line_longer_than_a_part_does_not_hide_the_steps_behind_it(run, monkeypatch):
    monkeypatch.setattr(run_log, "CHUNK", 40)
    (run / "log.jsonl").write_text('{"step": 1}\n{"step": 2, "x": "' + 123 * "x" + '"}\n{"step": 3}\n')
    assert [entry["step"] for entry in all_entries(run / "log.jsonl")] == [1, 3]


def test_numbers_beyond_json_come_out_as_none(run):
    (run / "log.jsonl").write_text('{"step": 1, "loss": 1e309, "lr": [-1e999, Infinity, NaN, 1e-3]}\n')
    [(_, body)] = ask(f"/graft/log?run={RUN}")
    [entry] = json.loads(body, parse_constant=pytest.fail)["entries"]
    assert entry == {"step": 1, "loss": None, "lr": [None, None, None, 1e-3]}


def test_samples_and_checkpoints_are_listed_by_step(run):
    found = get(f"/graft/files?run={RUN}")
    assert found["checkpoints"] == [2, 3]
    assert [(s["step"], s["number"]) for s in found["samples"]] == [(2, 0), (3, 0)]
    assert ask(f"/graft/sample?run={RUN}&name={found['samples'][1]['name']}") == [(200, b"picture 3")]
    assert found["inputs"] == [{"name": "input-1.png", "number": 1}]
    assert ask(f"/graft/sample?run={RUN}&name=input-1.png") == [(200, b"original")]


def test_links_that_lead_out_of_the_run_are_not_followed(run):
    link = run / "samples" / "step-00000009-0.png"
    try:
        link.symlink_to(run.parents[2] / "secret.png")
        (run.parent / "linked").symlink_to(run.parents[4], target_is_directory=True)
    except OSError:
        pytest.skip("no symbolic links here")
    assert [sample["step"] for sample in get(f"/graft/files?run={RUN}")["samples"]] == [2, 3]
    answers = ask(f"/graft/sample?run={RUN}&name={link.name}", "/graft/log?run=people/linked")
    assert [status for status, _ in answers] == [404, 404]


def test_finish_ends_a_run_under_way_and_no_other(run):
    live = session.LiveRun(RUN, "5", "w", 0, 9, 1)
    with session.show_run(RUN, first=0, last=9, node_id="5", workflow="w") as show:
        assert get("/graft/runs")["runs"][-1] == {**vars(live), "step": 0}
        step = Progress(1, 1.0, 1e-4, 1.0, 0.1)
        assert show(step) is None
        assert ask(f"/graft/finish/{RUN}", "/graft/finish/other", method="post")[1][0] == 404
        assert show(step) == STOP
    assert ask(f"/graft/finish/{RUN}", method="post")[0][0] == 404
    assert not get("/graft/runs")["runs"][-1]["running"]


def graph(name="anna", **inputs):
    """A graph that trains, in API form."""
    train = {"name": name, "dataset": ["3", 0], "steps": 9, "learning_rate": 1e-4, **inputs}
    return {
        "3": {"class_type": "GraftLoadDataset", "inputs": {"folder": "anna", "weight": 1}},
        "5": {"class_type": "GraftTrainSteps", "inputs": train},
        "6": {"class_type": "GraftSaveLora", "inputs": {"state": ["5", 2]}},
    }


def shown(prompt, workflow="w", node="5"):
    [(status, body)] = ask("/graft/runs", method="post", json={"prompt": prompt, "workflow": workflow})
    assert status == 200
    return json.loads(body)["runs"].get(node)


@pytest.fixture
def trained(run, monkeypatch):
    """Two runs of one node in one workflow on this server, anna's and rex's; a third of an earlier server."""
    monkeypatch.setattr(session, "_runs", {})
    for name in ("anna-0", "rex-0"):
        settings = queued.run_settings(graph(name[:-2]), "5")
        with session.show_run(name, first=0, last=9, node_id="5", workflow="w", settings=settings):
            pass
    early = graph("people/anna", learning_rate=3e-4)
    queued.note_queued(run, queued.run_settings(early, "5"), 3)
    return early


def test_a_node_shows_the_run_of_its_own_settings_whatever_was_trained_in_its_workflow_since(trained):
    assert shown(graph("anna"))["run"] == "anna-0" and shown(graph("anna"))["same"]
    assert shown(graph("rex"), "another")["run"] == "rex-0" and shown(graph("rex"))["same"]
    changed = shown(graph("anna", learning_rate=10))
    assert changed["run"] == "rex-0" and not changed["same"]
    assert shown(graph("anna", learning_rate=10), "another") is None


def test_a_node_shows_a_run_that_an_earlier_server_trained(trained, run):
    found = shown(trained, "another")
    assert found == {"run": RUN, "last": 3, "running": False, "finishing": False, "same": True}
    (run / "queued.json").write_text("[" * 100_000)
    assert shown(trained, "another") is None


def test_settings_are_the_same_however_their_numbers_are_written_and_whatever_the_nodes_are_called(trained):
    same = json.loads(
        json.dumps(graph("anna", steps=300, gpus=2)).replace('"3"', '"30"').replace(": 1}", ": 1.0}")
    )
    assert shown(same)["run"] == "anna-0" and shown(same)["same"]
    before = graph("anna")
    before["3"]["inputs"]["folder"] = "rex"
    assert not shown(before)["same"]


def test_a_graph_is_any_json_that_a_client_sends(trained):
    circle = {"5": {"class_type": "GraftTrainSteps", "inputs": {"start": ["6", 0], "name": ["6", 1]}}}
    circle["6"] = {"class_type": "x", "inputs": {"start": ["5", 0]}}
    assert shown(circle)["run"] == "rex-0"
    for name in ("../..", "", 5, None, [], "\ud800", "a" * 999, "people/../.."):
        assert not shown(graph(name))["same"]
    chain = {str(i): {"class_type": "x", "inputs": {"a": [str(i + 1), 0]}} for i in range(5000)}
    for body in (chain, 5, [], "x", None, {"5": 5}, {"5": {"inputs": []}}):
        assert ask("/graft/runs", method="post", json={"prompt": body})[0][0] == 400
    for text in ("[" * 100_000, "{", "5", "[]", "{}", "\udcff"):
        assert ask("/graft/runs", method="post", data=text.encode("utf-8", "surrogatepass"))[0][0] == 400


PIECES = (
    "..", "../", "..\\", "/", "\\", "%2e%2e%2f", "....//", "people", "anna-0123456789abcdef", RUN, "other",
    "log.jsonl", "samples", "step-00000003-0.png", "step-00000003-0.png/..", "notes.txt", "secret.png",
    "/etc/passwd", "C:\\", "~", "file://", "\x00", "\n", "\u202e", "\ud7ff", "\U0001f600", "\xe9" * 120,
    "a" * 900, "NaN", "-1", "1e9", "9" * 40, "\u0663", " ", ".", "con", "nul.png", "*", "?", "[a-z]*", "%",
    "%00", "%s", "{0}", "'", '"', "<script>", "", "&run=", "#",
)  # fmt: skip


def question(draw):
    """A request to one of the routes with values made of PIECES, well encoded or not."""

    def value():
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 4)))
        return quote(text, safe="") if draw.random() < 0.7 else quote(text, safe="/%&=\\.:~+")

    path = draw.choice(("log", "files", "sample", "runs", "finish/" + value(), value()))
    names = draw.choices(("run", "name", "start", "x"), k=draw.randint(0, 3))
    given = {"run": RUN} if draw.random() < 0.5 else {}
    pairs = [*given.items(), *((name, value()) for name in names)]
    return f"/graft/{path}?" + "&".join(f"{name}={text}" for name, text in pairs)


def test_no_request_brings_an_error_of_the_server_or_a_file_that_is_no_part_of_a_run(run):
    draw = random.Random(0)
    before = {path: path.stat().st_mtime_ns for path in run.parents[3].rglob("*")}
    with watched() as opened:
        answers = ask(*(question(draw) for _ in range(CASES)))
    assert {status for status, _ in answers} <= {200, 400, 404, 405}
    assert any(status == 200 for status, _ in answers)
    assert not any(b"secret" in body or b"root:" in body for _, body in answers)
    allowed = {run / "log.jsonl", *(run / "samples").glob("step-*.png")}
    assert {Path(path) for path, _ in opened} <= allowed
    assert {path: path.stat().st_mtime_ns for path in run.parents[3].rglob("*")} == before


def test_routes_are_added_once_and_a_second_copy_of_graft_is_named(monkeypatch, caplog, tmp_path):
    running = SimpleNamespace(routes=web.RouteTableDef())
    monkeypatch.setattr(server, "running_server", lambda: running)
    server.add_routes()
    server.add_routes()
    assert len(running.routes) == len(server.routes()) and not caplog.records
    copy = tmp_path / "graft-main" / "training" / "comfy" / "server.py"
    copy.parent.mkdir(parents=True)
    copy.write_text("async def runs(request): ...")
    spec = spec_from_file_location("copy_of_graft", copy)
    spec.loader.exec_module(module := module_from_spec(spec))
    running.routes = web.RouteTableDef()
    running.routes.get("/graft/runs")(module.runs)
    server.add_routes()
    assert len(running.routes) == 1 and "installed twice" in caplog.text
    assert str(tmp_path / "graft-main") in caplog.text and str(Path(graft.__file__).parent) in caplog.text
