"""Log lines: one per record, fields that cannot be mistaken for something else."""

from __future__ import annotations

import gc
import json
import logging
import weakref

import pytest

from sidecar.logs import (
    FIELD_CHARACTERS_MAX,
    LINES_MAX,
    LINES_SECONDS,
    JsonFormatter,
    RateLimit,
    TextFormatter,
    fields,
    traceback_end,
)


def record(message: str, **values: object) -> logging.LogRecord:
    made = logging.LogRecord("kvlake.test", logging.INFO, __file__, 1, message, (), None)
    made.created = 0.5
    made.__dict__.update(fields(**values))
    return made


def test_text_line() -> None:
    line = TextFormatter().format(record("attached", rank=0, key=bytes(range(32)), why="a b"))
    assert line == (
        '1970-01-01T00:00:00.500Z INFO kvlake.test: attached rank=0 key=0001020304050607 why="a b"'
    )


def test_json_fields_never_overwrite_the_record() -> None:
    document = json.loads(JsonFormatter().format(record("attached", level="fake", session=None)))
    assert document["level"] == "info"
    assert document["event"] == "attached"
    assert document["session"] is None


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_one_record_is_one_line(formatter: logging.Formatter) -> None:
    hostile = 'x\nERROR kvlake.server: forged="yes"\r\x1b[31m'
    line = formatter.format(record("line\nbreak", engine=hostile, long="y" * 10_000))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert len(line) < FIELD_CHARACTERS_MAX + 500


def test_records_keep_no_frames() -> None:
    class Held:
        pass

    def fail() -> tuple[weakref.ref[Held], logging.LogRecord]:
        held = Held()
        try:
            int("told")
        except ValueError as error:
            kept = record("failed", error=error, traceback=traceback_end(error))
        return weakref.ref(held), kept

    held, kept = fail()
    gc.collect()
    assert held() is None
    line = TextFormatter().format(kept)
    assert 'error="invalid literal' in line
    assert "ValueError: invalid literal" in line


def test_a_message_has_so_many_lines_a_minute_and_says_what_it_left_out() -> None:
    limit = RateLimit()

    def logged(message: str, at_seconds: float) -> bool:
        made = record(message, reason=f"at {at_seconds}")
        made.created = at_seconds
        passed = bool(limit.filter(made))
        if passed:
            lines.append(TextFormatter().format(made))
        return passed

    lines: list[str] = []
    passed = [logged("read failed", at) for at in range(LINES_MAX + 15)]
    assert passed == [True] * LINES_MAX + [False] * 15
    assert logged("another", 40.0)
    assert logged("read failed", LINES_SECONDS)
    assert lines[-1].endswith("left_out=15")
    assert logged("read failed", LINES_SECONDS + 1)
    assert "left_out" not in lines[-1]
