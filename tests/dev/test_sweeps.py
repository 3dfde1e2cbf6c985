"""The sweeps of dev/: what they try is there, and what goes wrong is seen. No server is started here."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import stat
import time
import traceback
from pathlib import Path

import pytest
from PIL import Image

from graft.commands.headless.server import server
from graft.dev.sweeps import bad_datasets, bad_files, bad_jobs, commands, files, kills, prompts, target
from graft.dev.sweeps.report import KINDS, Case, Problem, Report
from graft.training.data.image_file import BadImage
from graft.training.run.watch import DiskFull
from graft.training.user_error import NotFiniteError, UserError

# --- the report ---------------------------------------------------------------------------------------------


def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path, capsys):
    ran = []

    def case(name, *problems):
        return Case("some", name, lambda: ran.append(name) or list(problems))

    first = Report(tmp_path / "done.jsonl")
    first.run([case("one"), case("two", Problem("hang", "for ever \ud800"))])
    again = Report(tmp_path / "done.jsonl")
    again.run([case("one"), case("two"), case("three")])
    assert ran == ["one", "two", "three"] and again.failed and again.done.keys() == {"one", "two", "three"}
    assert "hang: two: for ever \\ud800" in capsys.readouterr().out
    table = list(again.table())
    assert table[0].split() == ["cases", "wrong", "dead", "queue", "hang", "traceback", "answer", "500"]
    assert table[1].split() == ["some", "3", "0", "0", "1", "0", "0"] and table[-1].startswith("all")


# --- commands -----------------------------------------------------------------------------------------------


def test_there_are_as_many_command_lines_as_before():
    assert len(commands.FORMS) == 11 and len(commands.FORMS) * len(bad_files.BAD) >= 462


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Forks of this process find imported what they need."""
    commands.import_commands()


@pytest.mark.parametrize("form", ["inspect", "merge LORA", "extract TUNED", "export-workflow"])
@pytest.mark.parametrize("bad", ["no bytes", "a pickle that runs code"])
def test_a_bad_file_is_refused_on_the_command_line(tmp_path, form, bad):
    assert commands.with_file(form, commands.FORMS[form], bad, tmp_path) == []


def ended(tmp_path, main):
    return commands.attempt([], tmp_path, main=main)


def kinds(problems):
    return [problem.kind for problem in problems]


def test_what_a_command_does_wrong_is_seen(tmp_path, monkeypatch):
    out = tmp_path / "out.safetensors"

    def judged(main, **options):
        return commands.judge(ended(tmp_path, main), out, **{"named": "bad", **options})

    def says(*lines, code=2):
        def main(argv):
            print(*lines, sep="\n", file=commands.sys.stderr)
            return code

        return main

    assert judged(says("graft x: bad is no file")) == []
    assert kinds(judged(says("graft x: it is no file"))) == ["wrong"]
    assert kinds(judged(says("graft x: bad", "more"))) == ["wrong"]
    assert kinds(judged(says("graft x: [Errno 2] bad"))) == ["wrong"]
    assert kinds(judged(says("bad", code=3))) == ["wrong"]
    assert kinds(judged(lambda argv: {}["x"])) == ["traceback"]
    with monkeypatch.context() as patch:
        patch.setattr(commands, "SECONDS", 0.2)
        assert kinds(judged(lambda argv: time.sleep(60))) == ["hang"]
    out.write_bytes(bad_files.lora(bad_files.floats(float("nan"), 4, 256)))
    assert kinds(judged(says(code=0))) == ["wrong"]
    assert kinds(judged(says("graft x: bad"))) == ["wrong"]
    out.write_bytes(bad_files.lora())
    assert judged(says(code=0)) == []


def test_a_bad_file_that_is_accepted_is_seen(tmp_path, monkeypatch):
    run = commands.Ended(0, "", "")
    monkeypatch.setattr(commands, "run_in", lambda scratch, words, bad: (run, scratch / "out"))
    words = commands.FORMS["merge LORA"]
    assert kinds(commands.with_file("merge LORA", words, "no bytes", tmp_path)) == ["wrong"]
    assert kinds(commands.with_file("merge LORA", words, "rank 0", tmp_path)) == ["wrong"]
    assert commands.with_file("inspect", words, "rank 0", tmp_path) == []


# --- files --------------------------------------------------------------------------------------------------


def test_every_bad_file_can_be_made(tmp_path):
    """And is there: a file, or what is no file; only one of them is nothing at all."""
    sizes = {}
    for name, maker in {**bad_files.BAD, **bad_jobs.JOBS, **files.bad_checkpoints()}.items():
        path = tmp_path / f"{bad_files.file_name(name)}.safetensors"
        bad_files.put(maker, path)
        sizes[name] = path.lstat().st_size if path.exists() or path.is_symlink() else None
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    assert [name for name, size in sizes.items() if size is None] == ["nothing there"]
    assert sizes["no bytes"] == 0 and sizes["metadata of 30 MB"] > 30_000_000
    assert not list(tmp_path.iterdir())


def test_every_bad_dataset_can_be_made(tmp_path):
    for number, (name, extra) in enumerate(bad_datasets.DATASETS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        bad_datasets.make(name, folder)
        made = {path.name: path.lstat() for path in folder.iterdir()}
        assert not extra.named or extra.named in "\n".join(made), name
        if "pipe" in name:
            assert any(stat.S_ISFIFO(info.st_mode) for info in made.values()), name
        shutil.rmtree(folder)


def test_there_are_as_many_trials_as_before(tmp_path):
    with files.cases(tmp_path, Path("nowhere"), 0) as found:
        names = [case.name for case in found]
    assert len(names) >= 170 and len(set(names)) == len(names)
    assert {case.group for case in found} == {"dataset", "lora", "checkpoint", "job", "state"}


def test_how_a_bad_file_may_end():
    def judged(ended, message="", **options):
        trial = files.Trial("", lambda folder: None, {}, **{"named": "b\udce9.png", **options})
        return kinds(files.judge(trial, target.Outcome(ended, message)))

    assert (
        judged("failed", "b\udce9.png is no picture") == judged("refused", "b\\udce9.png: no picture") == []
    )
    assert judged("failed", "no picture") == judged("done") == judged("cancelled") == ["wrong"]
    assert judged("done", refused=None) == judged("cancelled", refused=None) == []
    assert judged("failed", "b\udce9.png", refused=False) == ["wrong"] and judged("done", refused=False) == []


# --- a server -----------------------------------------------------------------------------------------------


class Scripted(target.Target):
    """A server whose answers are a list, and whose log is a file."""

    def __init__(self, place, answers, log=""):
        super().__init__(place, place / "base")
        self.answers, self.text, self.stops = iter(answers), log, 0

    @property
    def server(self):
        process = type("Process", (), {"pid": target.os.getpid()})
        log = self.base / "comfyui.log"
        log.touch()
        return type("Server", (), {"log_file": log, "process": process})

    def ask(self, path, body=None):
        (self.base / "comfyui.log").write_text(self.text)
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self):
        self.stops += 1


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """A server with answers and a log, that is given no time: `scripted(answers, log)`."""
    monkeypatch.setattr(target, "STUCK_SECONDS", 0.0)
    made = itertools.count()

    def make(answers, log=""):
        place = tmp_path / str(next(made))
        place.mkdir()
        return Scripted(place, answers, log)

    return make


QUEUED = (200, {"prompt_id": "1"})
RUNS = (200, {})


def history(*messages):
    return 200, {"1": {"status": {"messages": messages}}}


DONE, STOPPED = history(), history(("execution_interrupted", {}))
FAILED = history(("execution_error", {"exception_message": "no"}))
WORKER = "Exception in thread Thread-1 (prompt_worker):\n"


@pytest.mark.parametrize(
    "answers, log, ended, problems",
    [
        ([QUEUED, DONE, QUEUED, DONE], "", "done", []),
        ([QUEUED, FAILED, QUEUED, DONE], "", "failed", []),
        ([QUEUED, RUNS, (200, None), STOPPED, QUEUED, DONE], "", "cancelled", []),
        ([(400, {"error": "x"}), QUEUED, DONE], "", "refused", []),
        ([(500, "oh"), QUEUED, DONE], "", "refused", ["answer 500"]),
        ([QUEUED, DONE, QUEUED, RUNS], "", "done", ["dead queue"]),
        ([QUEUED, RUNS, (200, None), RUNS], WORKER, "never", ["dead queue"]),
        ([QUEUED, RUNS, (200, None), RUNS], "", "never", ["hang"]),
        ([target.Stuck("no answer")], "", "never", ["hang"]),
    ],
)
def test_what_a_prompt_does_to_a_server_is_seen(scripted, answers, log, ended, problems):
    made = scripted(answers, log)
    outcome = made.attempt({}, patience=0.0)
    assert (outcome.ended, kinds(outcome.problems)) == (ended, problems)
    assert made.stops == bool({"dead queue", "hang"} & {*problems}) and {*problems} <= {*KINDS}


def log_of(error, place="/x/custom_nodes/graft/nodes/train.py"):
    return f'Traceback (most recent call last):\n  File "{place}", line 1, in f\n    f()\n    ~^^\n{error}\n'


def test_errors_that_were_not_meant_for_people_are_seen():
    raw = ["KeyError: 'x'", "TypeError: no", "OSError: [Errno 36] File name too long: 'x'", "RecursionError"]
    raw += [
        "UnicodeEncodeError: 'utf-8' codec can't encode character",
        "ValueError: invalid literal for int()",
    ]
    errors = (UserError("a.png: no"), BadImage("no"), NotFiniteError("NaN"), DiskFull("no room"))
    meant = ["".join(traceback.format_exception_only(error)).strip() for error in errors]
    assert meant[0] == "graft.UserError: a.png: no"
    meant += ["FileNotFoundError: a.png is gone"]
    meant += ["comfy.model_management.InterruptProcessingException"]
    assert target.raw_tracebacks("".join(map(log_of, raw + meant))) == raw
    assert target.raw_tracebacks(log_of("KeyError: 1", "/x/comfy/sd.py")) == []
    chained = log_of("KeyError: 1") + "\nThe above exception was the direct cause ...\n\n" + log_of(meant[0])
    assert target.raw_tracebacks(chained) == []
    assert target.raw_tracebacks(chained.replace("KeyError: 1", "KeyError: 1\n  in line 1")) == []
    assert target.raw_tracebacks(chained.replace("KeyError: 1", "KeyError: 1\n")) == []


# --- prompts ------------------------------------------------------------------------------------------------

SCHEMAS = {
    "GraftLoadBaseModel": {"input": {"required": {"model": ["COMBO", {"options": ["a", "b"]}]}}},
    "GraftBuildLora": {
        "input": {
            "required": {"rank": ["INT", {"default": 4, "min": 1, "max": 64}]},
            "optional": {"model": ["MODEL", {}], "alpha": ["FLOAT", {"default": 1.0, "min": 0.0}]},
        }
    },
    "GraftSaveLora": {
        "input": {"required": {"name": ["STRING", {}], "state": ["GRAFT_STATE", {}]}},
        "output_node": True,
    },
    "GraftTrainSteps": {
        "input": {
            "required": {"start": ["GRAFT_LORA,GRAFT_STATE", {}], "steps": ["INT", {"min": 1, "max": 9}]},
            "optional": {"gpus": ["INT", {"default": 1, "min": 1, "max": 64}]},
        }
    },
}  # fmt: skip


def draw(number):
    return prompts.Draw(SCHEMAS, random.Random(f"0/{number}"), prompts.hostile_values(Path("/outside")))


def test_prompts_are_the_same_for_a_seed_and_json():
    graphs = [draw(number).prompt() for number in range(200)]
    assert [json.dumps(graph) for graph in graphs] == [json.dumps(draw(n).prompt()) for n in range(200)]


def test_every_widget_gets_good_and_bad_values_and_few_prompts_train():
    graphs, seen, trained = [draw(number) for number in range(1500)], {}, 0
    for drawn in graphs:
        graph = drawn.prompt()
        for entry in graph.values():
            for name, value in entry["inputs"].items():
                seen.setdefault((entry["class_type"], name), set()).add(repr(value))
        trained += any(entry["class_type"] == "GraftTrainSteps" for entry in graph.values())
    for kind, schema in SCHEMAS.items():
        for name in {**schema["input"]["required"], **schema["input"].get("optional", {})}:
            assert (kind, name) in seen
    assert {"64", "65", "nan", "'x'", "4"} - seen["GraftBuildLora", "rank"] <= {"'x'", "4"}
    assert {"'a'", "'b'", repr("\ud800"), repr("/etc/passwd")} <= seen["GraftLoadBaseModel", "model"]
    assert not {"2", "7.5", "64"} & seen["GraftTrainSteps", "gpus"], "so many processes would be started"
    assert 0 < trained < 0.4 * len(graphs)
    assert any(drawn.spoiled == [] for drawn in graphs) and any(len(drawn.spoiled) > 1 for drawn in graphs)


def test_files_that_change_where_none_may_are_seen():
    assert prompts.changed({"a": 1, "b": 1, "c": 1}, {"b": 2, "c": 1, "d": 1}) == {"a", "b", "d"}


# --- kills --------------------------------------------------------------------------------------------------


def test_there_are_as_many_kills_as_before_at_every_moment():
    chains = kills.chains(random.Random(0))
    every = [kill for chain in chains for kill in chain]
    assert len(every) == 25 and {kill.moment for kill in every} == {*kills.MOMENTS}
    assert {kill.signal for kill in every} == {"SIGKILL", "SIGTERM", "SIGINT"}
    assert all(len(chain) == 1 for chain in chains if chain[0].moment == "gpus=2")


def write_output(folder):
    run = folder / "graft" / "sweep-0123"
    for place in (folder / "loras", run / "samples", run / "checkpoints" / "step-00000001"):
        place.mkdir(parents=True)
    made_at = {"made_at": str(folder)}
    (folder / "loras" / "sweep.safetensors").write_bytes(bad_files.lora(metadata=made_at))
    for number in range(2):
        Image.new("RGB", (8, 8), "red").save(run / "samples" / f"step-00000000-{number}.png")
    (run / "log.csv").write_text("step,loss,lr,grad_norm,seconds\n1,0.5,0.1,2,9.9\n")
    (run / "checkpoints" / "step-00000001" / "state.json").write_text('{"digest": "d", "seconds": 1}')
    return run


def test_what_a_kill_cost_is_seen(tmp_path):
    for name in ("whole", "killed"):
        run = write_output(tmp_path / name / "output")
    whole = kills.results(tmp_path / "whole" / "output")

    def lost():
        return kills.differences(whole, kills.results(tmp_path / "killed" / "output"))

    log = (run / "log.csv").read_text()
    (run / "log.csv").write_text(log.replace("9.9", "1.1"))
    assert len(whole) == 5 and lost() == []
    (run / "log.csv").write_text(log.replace("0.5", "0.6"))
    assert lost() == ["differs: graft/sweep-0123/log.csv"]
    (run / "log.csv").write_text(log)
    (run / "samples" / "step-00000000-1.png").unlink()
    assert lost() == ["missing: graft/sweep-0123/samples/step-00000000-1.png"]
    (run / "samples" / "step-00000000-1.png").write_bytes(
        (run / "samples" / "step-00000000-0.png").read_bytes()
    )
    (tmp_path / "killed" / "output" / "loras" / "sweep.safetensors").write_bytes(bad_files.lora(layer="x"))
    assert lost() == ["differs: loras/sweep.safetensors"]
    (tmp_path / "killed" / "output" / "loras" / ".writing-1").touch()
    assert kills.leftovers(tmp_path / "killed") == ["output/loras/.writing-1"]


def test_a_server_is_left_alone_by_a_target_that_never_needed_it(tmp_path):
    with target.Target(tmp_path, tmp_path / "base") as made:
        made.watch()
    compile((tmp_path / "base" / "custom_nodes" / "witness" / "__init__.py").read_text(), "witness", "exec")
    assert server is target.server
