"""A run ends with its report, whatever becomes of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from sidecar.exits import Exit
from tests.harness.engine import EngineFailed, EngineProcess
from tests.harness.sidecars import SidecarProcess
from tests.soak import report, run
from tests.soak.report import Told
from tests.soak.run import Soak, unexpected
from tests.soak.world import World

pytestmark = pytest.mark.promise("soak")


class DeadWorld:
    """A world in which nothing was ever started."""

    engine_pid = None
    sidecar_exit: int | None = Exit.OK

    def __init__(self, folder: Path) -> None:
        self.sidecar = SidecarProcess(folder / "sidecar", {})
        self.sidecar.log_path.write_text("2026-01-01T00:00:00Z ERROR kvlake.bug: a planted error\n")

    @property
    def engine(self) -> EngineProcess:
        raise EngineFailed("the engine ended")

    def shared_files(self) -> list[Path]:
        return []

    def runtime_files(self) -> int:
        return 0

    def engine_logs(self) -> list[Path]:
        return []


def test_a_run_that_breaks_is_reported(tmp_path: Path) -> None:
    one = Soak(cast("World", DeadWorld(tmp_path)), seconds=600, seed=1)
    one.run(chaos=True)
    found = one.judge()
    bad = {verdict.name: verdict.said for verdict in found if not verdict.good}
    assert "a planted error" in bad["errors in logs beside 0 expected"]
    assert "the engine ended" in bad["what ended the run early"]
    assert "no life was long enough" in bad["sidecar.descriptors"]
    told = Told(one, found)
    assert told.summary().count("**BAD**") == len(bad)
    document, picture = told.write(tmp_path, docs=False)
    assert json.loads(document.read_text())["totals"]["requests"] == 0
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("code", "line", "said"),
    [
        (Exit.OK, "INFO kvlake.server: drained", "none"),
        (Exit.LOSS, "WARNING kvlake.server: drained in part", "none"),
        (Exit.OK, "ERROR kvlake.bug: another error", "1, first: ERROR kvlake.bug: another error"),
        (Exit.INTERNAL, "INFO kvlake.server: drained", "1, first: the sidecar ended with 70"),
        (-9, "", "1, first: the sidecar ended with -9"),
        (None, "", "1, first: the sidecar ended with None"),
    ],
)
def test_how_the_sidecar_ends_is_judged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, line: str, said: str
) -> None:
    @contextlib.contextmanager
    def dying(*_: object, **_options: object) -> Iterator[DeadWorld]:
        made = DeadWorld(tmp_path)
        yield made
        with made.sidecar.log_path.open("a") as log:
            log.write(f"{line}\n")
        made.sidecar_exit = code

    monkeypatch.setattr(run, "world", dying)
    _, found = run.soak(tmp_path, 600, 1)
    last = found[-1]
    assert (last.name, last.said) == ("left behind, or wrong at the end", said)
    assert last.good == (said == "none")


def test_the_documentation_shows_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "soak.md"
    page.write_text(report.PAGE.read_text())
    for name, file in {"PAGE": "soak.md", "PICTURE": "soak.svg", "DOCUMENT": "soak.json"}.items():
        monkeypatch.setattr(report, name, tmp_path / file)
    one = Soak(cast("World", DeadWorld(tmp_path)), seconds=600, seed=1)
    one.run(chaos=True)
    written = Told(one, one.judge()).write(tmp_path, docs=True)
    assert [path.name for path in written] == ["soak.json", "soak.svg", "soak.md"]
    assert "| **BAD** | sidecar.descriptors" in page.read_text()
    assert "![the plot of the run](soak.svg)" in page.read_text()


def test_slots_in_use_at_the_end_are_an_error_after_a_whole_drain_only() -> None:
    slots = "2026-01-01T00:00:00Z ERROR kvlake.server: slots were still in use at the end slots=2"
    whole = "2026-01-01T00:00:00Z INFO kvlake.server: drained"
    part = "2026-01-01T00:00:00Z WARNING kvlake.server: drained in part: time is over"
    unwell = "2026-01-01T00:00:00Z ERROR kvlake.store: object store unavailable; reason"
    assert unexpected([whole, slots]) == [slots]
    assert unexpected([part, slots, unwell]) == []
    assert unexpected([part, slots, whole, slots]) == [slots]
