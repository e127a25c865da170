"""What all commands share: output, errors that end a command, the configuration, tables.

Does not own the exit codes (`sidecar/exits.py`).
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from sidecar.exits import Exit
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from sidecar.config.model import Config

Document = dict[str, Any]


class CommandError(Exception):
    """The command ends with `code`; by default, the message says what to change in the command."""

    code = Exit.USAGE


class NotStarted(CommandError):
    """A process cannot be started now; a later attempt may succeed."""

    code = Exit.START


class NoAnswer(CommandError):
    """The sidecar gave no usable answer; the message says what to check."""

    code = Exit.NO


def say(text: str) -> None:
    """Write lines to standard output."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def say_json(document: object) -> None:
    """Write a document as JSON to standard output."""
    say(json.dumps(document, indent=2))


def complain(text: str) -> None:
    """Write a message to standard error."""
    sys.stderr.write(f"kvlake: {text}\n")
    sys.stderr.flush()


def load_config(path: Path | None) -> Config:
    """The configuration. Its secrets are masked in all output. Raises `CommandError`."""
    from sidecar.config.model import ConfigError, load
    from sidecar.redaction import conceal

    try:
        config = load(path)
    except ConfigError as error:
        raise CommandError(
            "\n".join(("the configuration cannot be used:", *error.problems))
        ) from error
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


def age(seconds: float, now_seconds: float) -> str:
    """How long ago a time was, such as "3d"; "-" for none."""
    if not seconds:
        return "-"
    old = int(max(0.0, now_seconds - seconds))
    for name, factor in (("d", 86_400), ("h", 3600), ("m", 60)):
        if old >= factor:
            return f"{old // factor}{name}"
    return f"{old}s"
