"""Rows of the kill matrix on their way from the process that ran it to the one that prints it."""

from __future__ import annotations

from dataclasses import replace

from tests.e2e.kill_table import CELLS, Row, from_plain, plain


def test_rows_go_to_another_process_and_are_the_same_there() -> None:
    rows = {cell: replace(Row.of(cell), struck_at="seen", outcome="ok") for cell in CELLS}
    found = plain(rows)
    assert all(type(value) is str for fields in found for value in fields.values())
    assert from_plain(found) == rows
