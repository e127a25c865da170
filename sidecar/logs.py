"""Log lines that people read and machines parse: one line, one event, fields as key=value.

Owns the two formatters and the set-up of the root of kvlake's loggers. Does not own levels per
module, files or rotation: lines go to standard error and whoever runs the sidecar keeps them.

Invariants: one record is one line, whatever its fields hold (keys of chunks are shown as short
hex, text is quoted when it needs to be); a field never overwrites time, level, logger or event;
known secrets are masked (`redaction.py`).
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys
import traceback
from typing import Final, Literal

from sidecar.redaction import redacted

LOGGER: Final = "kvlake"
FIELD_CHARACTERS_MAX: Final = 2_000
_BYTES_SHOWN_MAX: Final = 8


def fields(**values: object) -> dict[str, object]:
    """The `extra` of a log call: `logger.info("attached", extra=fields(rank=0))`.

    Errors become text here: whoever keeps a record must not keep the frames of a traceback, and
    the memory that they hold.
    """
    told = {
        name: str(value) if isinstance(value, BaseException) else value
        for name, value in values.items()
    }
    return {"kvlake_fields": told}


def story_of(error: BaseException) -> str:
    """The end of an error's traceback as text, for a field.

    In place of `exc_info` where frames hold memory that must go when the work that failed ends.
    """
    return "".join(traceback.format_exception(error))[-FIELD_CHARACTERS_MAX:]


def story_whole(error: BaseException) -> str:
    """An error's whole traceback as text, known secrets masked: for one that ends the process."""
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


def configure(level: str, style: Literal["text", "json"]) -> None:
    """Send kvlake's records of `level` and above to standard error, once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    # What libraries warn of takes the same way, so that their secrets are masked too. Their debug
    # lines hold whole requests, signatures included, and are not shown at any level.
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
