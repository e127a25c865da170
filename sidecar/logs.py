"""Log lines: one event each, with fields as key=value or as JSON, on standard error.

Owns the formatters and the set-up of kvlake's root logger. Does not own levels per module, files or
rotation.

Invariants: one record is one line, whatever its fields hold (bytes are shown as short hex, text is
quoted where needed); a field never overwrites time, level, logger or event; known secrets are
masked (`redaction.py`); a message is logged at most `LINES_MAX` times a minute, whatever its
fields, and its next line has the number of omitted ones.
"""

import datetime as dt
import json
import logging
import sys
import traceback
from typing import Final, Literal

from tiers.redaction import redacted

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
    cut = text[:FIELD_CHARACTERS_MAX]
    return text if cut == text else f"{cut}..."


def _own(record: logging.LogRecord) -> dict[str, object]:
    moment = dt.datetime.fromtimestamp(record.created, dt.UTC)
    return {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": redacted(record.getMessage()),
    }


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields; a traceback is the last."""
    given: dict[str, object] = getattr(record, "kvlake_fields", None) or {}
    values = {str(name): _plain(value) for name, value in given.items()}
    if record.exc_info:
        values["traceback"] = redacted(logging.Formatter().formatException(record.exc_info))
    return values


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO kvlake.server: attached session=1 rank=0`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        own = _own(record)
        shown = "".join(f" {name}={_quoted(value)}" for name, value in _fields_of(record).items())
        event = str(own["event"]).replace("\n", "\\n").replace("\r", "\\r")
        return f"{own['time']} {record.levelname} {record.name}: {event}{shown}"


class JsonFormatter(logging.Formatter):
    """The same record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON: the fields, then time, level, logger and event."""
        return json.dumps(_fields_of(record) | _own(record), ensure_ascii=False)


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
        self._minutes: dict[tuple[str, int, str], tuple[float, int]] = {}
        """By message: when its minute began, in seconds since 1970, and its lines since then."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged. Adds the number of omitted ones as `left_out`."""
        if record.levelno <= logging.DEBUG:
            return True
        message = (record.name, record.levelno, str(record.msg))
        began, lines = self._minutes.get(message, (0.0, 0))
        if record.created - began >= LINES_SECONDS:
            if lines > LINES_MAX:
                values = getattr(record, "kvlake_fields", {})
                record.__dict__.update(fields(**values, left_out=lines - LINES_MAX))
            if len(self._minutes) >= MESSAGES_MAX:
                # Messages of libraries may contain any text.
                self._minutes.clear()
            began, lines = record.created, 0
        self._minutes[message] = (began, lines + 1)
        return lines < LINES_MAX


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
