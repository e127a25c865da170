"""Rows of the kill matrix on their way from the process that ran it to the one that prints it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.e2e.kill_table import CELLS, Backend, Row, from_plain, markdown, plain

pytestmark = pytest.mark.promise("kill-matrix", "kill-table")


def test_rows_go_to_another_process_and_are_the_same_there() -> None:
    rows = {cell: replace(Row.of(cell), struck_at="seen", outcome="ok") for cell in CELLS}
    found = plain(rows)
    assert all(type(value) is str for fields in found for value in fields.values())
    assert from_plain(found) == rows


def test_each_matrix_of_which_something_was_run_is_shown_whole() -> None:
    for backend in Backend:
        cells = [cell for cell in CELLS if cell.backend is backend]
        table = markdown({cells[-1]: Row.of(cells[-1])})
        assert table.startswith(f"{backend}:")
        assert table.count("| not run |") == len(cells) - 1
    assert all(
        f"{backend}:" in markdown({cell: Row.of(cell) for cell in CELLS}) for backend in Backend
    )
