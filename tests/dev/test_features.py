"""The table of what Graft does: every row has a test, every mark a row, and the page is today's."""

from __future__ import annotations

from graft.dev import features


def test_every_row_is_shown_by_a_test_and_every_mark_names_a_row():
    assert features.marked().keys() == features.rows().keys()


def test_the_page_is_the_one_that_the_command_writes():
    assert features.PAGE.read_text(encoding="utf-8") == features.page()
