"""Half of a letter, and what is large or deep, in what Graft says."""

from __future__ import annotations

import json
import logging
import traceback
from pathlib import Path

import pytest

from graft.training.files.text import make_readable, readable, require_letters, shortened, shown
from graft.training.log import log

HALF = "caf\udce9 \ud83d"


def failing():
    """Return an error with another before it and one behind it, each with half a letter in its message."""
    try:
        try:
            try:
                raise OSError(HALF)
            except OSError as error:
                raise ValueError(Path(HALF)) from error
        except ValueError:
            raise RuntimeError(f"{HALF}: no.")  # noqa: B904 (a context without a cause)
    except RuntimeError as error:
        return error


def test_half_a_letter_is_shown_by_its_code_and_whole_ones_are_left():
    assert readable(HALF) == r"caf\udce9 \ud83d"
    assert readable("café 😀\n") == "café 😀\n"


def test_an_error_can_be_written_with_all_that_its_traceback_shows():
    error = failing()
    with pytest.raises(UnicodeEncodeError):
        "".join(traceback.format_exception(error)).encode()
    make_readable(error)
    text = "".join(traceback.format_exception(error))
    assert text.encode() and text.count(r"caf\udce9 \ud83d") == 3
    assert str(error) == r"caf\udce9 \ud83d: no."


def test_an_error_without_half_a_letter_is_left_as_it_is():
    error = OSError(2, "No such file", HALF)
    make_readable(error)
    assert error.args == (2, "No such file") and error.filename == HALF


def test_what_graft_logs_can_be_written(caplog):
    try:
        raise failing()
    except RuntimeError:
        log.warning("%s cannot be read", HALF, exc_info=True)
    assert caplog.text.encode() and r"Graft: caf\udce9 \ud83d cannot be read" in caplog.text


def test_a_warning_is_printed_once_also_where_nobody_set_up_logging(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    log.warning("%s cannot be read", HALF)
    log.info("nothing of note")
    assert capsys.readouterr().err == "Graft: caf\\udce9 \\ud83d cannot be read\n"


def test_half_a_letter_is_refused_with_its_place():
    require_letters("café 😀", "the name")
    with pytest.raises(ValueError, match=r"^the name holds half of a letter \('\\udce9' at 3\), or is from"):
        require_letters(HALF, "the name")


def test_a_message_shows_little_of_what_is_large_or_deep():
    deep = json.loads("[" * 900 + "]" * 900)
    for value in ("x" * 10**6, list(range(10**6)), deep, {HALF: deep}):
        assert len(shown(value).encode()) < 200
    text = shortened("problem: " + "x" * 10**6 + " Set it to 1.")
    assert text.startswith("problem: xxx") and text.endswith("xxx Set it to 1.") and len(text) <= 600
    assert shortened("short") == "short"
