"""What all commands share: output, errors that end a command, the configuration, tables."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sidecar.exits import Exit
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    # Its models take 0.3 s to build: `kvlake --help` and `status` do without.
    from sidecar.config.model import Config

_T = TypeVar("_T")
Document = dict[str, Any]
Options = argparse.Namespace
"""The command line's options, by the names in `parser.py`."""


class CommandError(Exception):
    """The command ends with `code`; by default, the message says what to change in the command."""

    code = Exit.USAGE


class NotStarted(CommandError):
    """A process cannot be started now; a later attempt may succeed."""

    code = Exit.START


class NoAnswer(CommandError):
    """The answer is no, or there is none; the message says what to check."""

    code = Exit.NO


def say(text: str) -> None:
    """Write lines to standard output."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def show(document: _T, text: Callable[[_T], str], *, as_json: bool) -> None:
    """Write a document to standard output, as JSON or as text."""
    say(json.dumps(document, indent=2) if as_json else text(document))


def complain(text: str, command: str = "kvlake") -> None:
    """Write a message of this command to standard error."""
    sys.stderr.write(f"{command}: {text}\n")
    sys.stderr.flush()


def load_config(path: Path | None) -> "Config":
    """The configuration. Its secrets are masked in all output. Raises `CommandError`."""
    from sidecar.config.model import ConfigError, load
    from tiers.redaction import conceal

    try:
        config = load(path)
    except ConfigError as error:
        raise CommandError(f"the configuration cannot be used:\n{error}") from error
    conceal(config.secrets())
    return config


def table(rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell. The first row has their names."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    )


def document_table(documents: Iterable[Document], columns: Mapping[str, str]) -> str:
    """A table of documents. `columns` has the field for each title.

    A size has a unit; a field that is null or missing is a dash.
    """
    rows = [[_cell(name, one.get(name)) for name in columns.values()] for one in documents]
    return table([tuple(columns), *rows])


def _cell(name: str, value: object) -> object:
    if value is None:
        return "-"
    return approximate_size(float(str(value))) if "bytes" in name else value


def duration(seconds: float) -> str:
    """A duration for people to read, in its two largest units: "3d4h", "12s"."""
    whole = int(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{whole % 60}s" if minutes else f"{whole}s"


def age(seconds: float, now_seconds: float) -> str:
    """How long ago a time was; "-" for none."""
    return duration(max(0.0, now_seconds - seconds)) if seconds else "-"
