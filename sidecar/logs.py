"""Log lines: one event each, with fields as key=value or as JSON, on standard error.

Owns the formatters and the set-up of kvlake's root logger. Does not own levels per module, files or
rotation.

Invariants: one record is one line, whatever its fields hold (bytes are shown as short hex, text is
quoted where needed); a field never overwrites time, level, logger or event; known secrets are
masked (`redaction.py`); a message is logged at most `LINES_MAX` times a minute, whatever its
fields, and its next line has the number of omitted ones.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys
import traceback
from dataclasses import dataclass
from typing import Final, Literal

from sidecar.redaction import redacted

LOGGER: Final = "kvlake"
FIELD_CHARACTERS_MAX: Final = 2_000
LINES_MAX: Final = 20
LINES_SECONDS: Final = 60.0
MESSAGES_MAX: Final = 1_000
"""Messages that are counted at a time."""
_BYTES_SHOWN_MAX: Final = 8


def fields(**values: object) -> dict[str, object]:
    """The `extra` of a log call: `logger.info("attached", extra=fields(rank=0))`.

    Errors become text here: a record that is kept must not keep the frames of a traceback, and
    their memory.
    """
    texts = {
        name: str(value) if isinstance(value, BaseException) else value
        for name, value in values.items()
    }
    return {"kvlake_fields": texts}


def traceback_end(error: BaseException) -> str:
    """The end of an error's traceback, for a field.

    Use it instead of `exc_info` where frames hold memory that must be freed with the failed work.
    """
    return "".join(traceback.format_exception(error))[-FIELD_CHARACTERS_MAX:]


def traceback_whole(error: BaseException) -> str:
    """An error's whole traceback, known secrets masked: for one that ends the process."""
    return redacted("".join(traceback.format_exception(error)))


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value[:_BYTES_SHOWN_MAX].hex()
    if value is None or isinstance(value, bool | int | float):
        return value
    text = redacted(str(value))
    if len(text) > FIELD_CHARACTERS_MAX:
        text = text[:FIELD_CHARACTERS_MAX] + "..."
    return text


def _of(record: logging.LogRecord) -> dict[str, object]:
    values = getattr(record, "kvlake_fields", None)
    return {str(name): _plain(value) for name, value in values.items()} if values else {}


def _time(record: logging.LogRecord) -> str:
    moment = dt.datetime.fromtimestamp(record.created, dt.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO kvlake.server: attached session=1 rank=0`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback is folded into it as the field `traceback`."""
        values = _of(record)
        if record.exc_info:
            values["traceback"] = redacted(self.formatException(record.exc_info))
        shown = "".join(f" {name}={_quoted(value)}" for name, value in values.items())
        head = f"{_time(record)} {record.levelname} {record.name}"
        return f"{head}: {_one_line(redacted(record.getMessage()))}{shown}"


class JsonFormatter(logging.Formatter):
    """The same record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON: time, level, logger, event, then the fields."""
        values = _of(record)
        if record.exc_info:
            values["traceback"] = redacted(self.formatException(record.exc_info))
        own = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": redacted(record.getMessage()),
        }
        return json.dumps(values | own, ensure_ascii=False)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _quoted(value: object) -> str:
    text = str(value)
    plain = text != "" and all(c.isprintable() and c not in ' "=\\' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


class RateLimit(logging.Filter):
    """Omits lines of one message beyond `LINES_MAX` within `LINES_SECONDS`, except debug lines.

    A message is the text in the code, before its arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self._minutes: dict[tuple[str, int, str], _Minute] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged. Adds the number of omitted ones as `left_out`."""
        if record.levelno <= logging.DEBUG:
            return True
        message = (record.name, record.levelno, str(record.msg))
        minute = self._minutes.get(message)
        if minute is None or record.created - minute.began >= LINES_SECONDS:
            if minute is not None and minute.left_out:
                values = getattr(record, "kvlake_fields", {})
                record.__dict__.update(fields(**values, left_out=minute.left_out))
            if len(self._minutes) >= MESSAGES_MAX:
                # Messages of libraries may contain any text.
                self._minutes.clear()
            minute = self._minutes[message] = _Minute(record.created)
        minute.lines += 1
        minute.left_out = max(0, minute.lines - LINES_MAX)
        return minute.left_out == 0


@dataclass(slots=True)
class _Minute:
    """Lines of a message since `began`, in seconds since 1970."""

    began: float
    lines: int = 0
    left_out: int = 0


def configure(level: str, style: Literal["text", "json"]) -> None:
    """Send kvlake's records of `level` and above to standard error, once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(RateLimit())
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    # Warnings of libraries go the same way, so that secrets in them are masked. Their debug lines
    # hold whole requests, signatures included, and are never shown.
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
