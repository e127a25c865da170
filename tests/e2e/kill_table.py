"""The kill matrix as a table: its cells, what came of each, and how that is shown.

Owns names and rendering, nothing that runs. A cell that was not run is in the table too, as such.
"""

from __future__ import annotations

import enum
import itertools
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from pathlib import Path


class Backend(enum.StrEnum):
    """Which of kvlake's two ways into vLLM the engines take."""

    CONNECTOR = "KVLakeConnector"
    OFFLOADING = "vLLM's own offloading"


class Victim(enum.StrEnum):
    """Who is struck."""

    SIDECAR = "sidecar"
    WORKER = "worker"
    CORE = "engine core"
    S3 = "S3 server"


class Signal(enum.StrEnum):
    """With what: for good, or until later than every deadline."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"


class Stage(enum.StrEnum):
    """What is under way for the victim's engine at that moment."""

    ATTACH = "attach"
    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"
    WRITE = "write"
    DRAIN = "drain"
    COPY_IN = "copy in"
    COPY_OUT = "copy out"


@dataclass(frozen=True)
class Cell:
    """One experiment."""

    victim: Victim
    signal: Signal
    stage: Stage
    backend: Backend = Backend.CONNECTOR

    @property
    def kills_an_engine(self) -> bool:
        """Whether vLLM ends after it: it does not survive the loss of a process."""
        return self.signal is Signal.KILL and self.victim in (Victim.WORKER, Victim.CORE)

    def __str__(self) -> str:
        return f"{self.victim}-{self.signal}-{self.stage}".replace(" ", "-")


OF_HOST_TIER: Final = (Stage.COPY_IN, Stage.COPY_OUT)
"""Stages that there are only where vLLM has a host tier of its own."""
CELLS: Final = [
    Cell(victim, signal, stage, backend)
    for backend, victim, signal, stage in itertools.product(Backend, Victim, Signal, Stage)
    if backend is Backend.OFFLOADING or stage not in OF_HOST_TIER
]


TELLING: Final = frozenset(
    Cell(*experiment)
    for experiment in (
        (Victim.SIDECAR, Signal.STOP, Stage.LOAD),
        (Victim.SIDECAR, Signal.KILL, Stage.STORE),
        (Victim.SIDECAR, Signal.KILL, Stage.ATTACH),
        (Victim.WORKER, Signal.KILL, Stage.LOAD),
        (Victim.WORKER, Signal.STOP, Stage.STORE),
        (Victim.CORE, Signal.STOP, Stage.ATTACH),
        (Victim.CORE, Signal.KILL, Stage.DRAIN),
        (Victim.S3, Signal.STOP, Stage.LOOKUP),
        (Victim.S3, Signal.KILL, Stage.WRITE),
    )
)
"""Each victim with each signal, and each stage, at least once. The others run nightly."""


def in_order_of_running(backend: Backend) -> list[Cell]:
    """All cells, those that kill an engine spread out: its successor takes a while to start."""
    cells = [cell for cell in CELLS if cell.backend is backend]
    kills = [cell for cell in cells if cell.kills_an_engine]
    others = [cell for cell in cells if not cell.kills_an_engine]
    between = len(others) // len(kills)
    ordered: list[Cell] = []
    for kill in kills:
        ordered += [*others[:between], kill]
        del others[:between]
    return ordered + others


@dataclass
class Row:
    """What came of a cell, in words. An empty field was not reached."""

    victim: str
    signal: str
    stage: str
    struck_at: str = ""
    """What was seen to be under way when the signal was sent."""
    requests: str = ""
    """How the requests ended that were under way."""
    others: str = ""
    """How the engine beside it fared meanwhile."""
    equal: str = ""
    """Requests whose tokens, log probabilities and KV bytes were compared with the oracle."""
    back: str = ""
    """Seconds from the victim's return until both engines were attached."""
    left: str = ""
    """What was left over."""
    outcome: str = "failed"
    backend: str = Backend.CONNECTOR

    @classmethod
    def of(cls, cell: Cell) -> Row:
        """A row of which nothing is known yet."""
        return cls(cell.victim, cell.signal, cell.stage, backend=cell.backend)

    @property
    def cell(self) -> Cell:
        """The cell that it is of."""
        return Cell(
            Victim(self.victim), Signal(self.signal), Stage(self.stage), Backend(self.backend)
        )


@dataclass(frozen=True)
class _Column:
    title: str
    field: str


_COLUMNS: Final = (
    _Column("victim", "victim"),
    _Column("signal", "signal"),
    _Column("stage", "stage"),
    _Column("under way at that moment", "struck_at"),
    _Column("its requests", "requests"),
    _Column("the engine beside it", "others"),
    _Column("equal to the oracle", "equal"),
    _Column("attached again, s", "back"),
    _Column("left over", "left"),
    _Column("", "outcome"),
)

ROWS: Final = pytest.StashKey[dict[Cell, Row]]()


def markdown(rows: dict[Cell, Row], *, whole: bool = True) -> str:
    """A table for each matrix of which something was run, with what was not run if `whole`."""
    tables = [
        f"{backend}:\n\n{_table(rows, backend, whole)}"
        for backend in Backend
        if any(cell.backend is backend for cell in rows)
    ]
    return "\n".join(tables)


def _table(rows: dict[Cell, Row], backend: Backend, whole: bool) -> str:
    lines = [
        "| " + " | ".join(column.title for column in _COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
    ]
    for cell in CELLS:
        if cell.backend is not backend or not (whole or cell in rows):
            continue
        row = rows.get(cell) or replace(Row.of(cell), outcome="not run")
        values = asdict(row)
        lines.append("| " + " | ".join(values[column.field] for column in _COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def plain(rows: dict[Cell, Row]) -> list[dict[str, str]]:
    """Rows as JSON has them, in the order of the table: of nothing but strings.

    What goes to another process of pytest's may not be of a subclass, as names of victims are.
    """
    found = [asdict(rows[cell]) for cell in CELLS if cell in rows]
    return [{name: str(value) for name, value in fields.items()} for fields in found]


def from_plain(found: list[dict[str, str]]) -> dict[Cell, Row]:
    """What `plain` made."""
    rows = [Row(**fields) for fields in found]
    return {row.cell: row for row in rows}


def write(rows: dict[Cell, Row], folder: Path) -> None:
    """Leave the table in `folder`, as JSON and as markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kill-matrix.json").write_text(json.dumps(plain(rows), indent=2) + "\n")
    (folder / "kill-matrix.md").write_text(markdown(rows))


def read(folder: Path) -> dict[Cell, Row]:
    """What `write` left, so that a matrix can be run in parts."""
    path = folder / "kill-matrix.json"
    return from_plain(json.loads(path.read_text())) if path.exists() else {}
