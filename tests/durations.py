"""How long each file of tests takes: recorded, shown, and compared.

    python -m tests.durations                       the dearest files of tests/durations.json
    python -m tests.durations NEW [--against OLD]   those of NEW, and what grew since OLD

Also a plugin of pytest. `--record-durations PATH` writes a record (`make durations`). A run on the
recorded release, without `--nightly`, ends with the files that took half as much again.

Owns the record. A file's seconds are those of its tests, their setup and teardown. Engine starts
are counted where a test's own process starts the engine; one that `kvlake demo` starts is not. An
engine that several files share is counted in the file that started it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import sys
import time
import weakref
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

RECORD: Final = Path(__file__).with_name("durations.json")
"""The record that is committed."""
GROWTH: Final = 1.5
GROWTH_SECONDS_MIN: Final = 5.0
DEAREST: Final = 20
STARTS: Final = "engine_starts"
"""An attribute of pytest's reports: seconds of each engine start in that phase of the test."""
OPTION: Final = "record_durations"


@dataclass
class File:
    """What one file of tests took."""

    seconds: float = 0.0
    tests: int = 0
    engine_starts: int = 0
    engine_start_seconds: float = 0.0


@dataclass
class Record:
    """One run: about the run as a whole, and each file."""

    run: dict[str, Any] = field(default_factory=dict[str, Any])
    files: dict[str, File] = field(default_factory=dict[str, File])

    @property
    def seconds(self) -> float:
        """Sum over all files."""
        return sum(file.seconds for file in self.files.values())

    def dump(self) -> str:
        """As JSON, with a line for each file. Whole seconds keep diffs short."""
        lines = [
            f"{json.dumps(name)}: {json.dumps(_rounded(file))}"
            for name, file in sorted(self.files.items())
        ]
        files = ",\n".join(lines)
        return f'{{\n"run": {json.dumps(self.run)},\n"files": {{\n{files}\n}}\n}}\n'


def _rounded(file: File) -> dict[str, int]:
    return {name: round(value) for name, value in asdict(file).items()}


def load(path: Path) -> Record:
    """Read what `dump` wrote."""
    stored = json.loads(path.read_text())
    return Record(stored["run"], {name: File(**file) for name, file in stored["files"].items()})


@dataclass(frozen=True)
class Grown:
    """A file that takes at least half as much again, and some seconds more."""

    name: str
    before: float | None
    """None for a file that is not recorded."""
    after: float

    def __str__(self) -> str:
        before = "not recorded" if self.before is None else f"recorded {self.before:.0f} s"
        return f"{self.name}: {self.after:.0f} s, {before}"


def grown(old: Record, new: Record) -> list[Grown]:
    """The files that grew, the largest growth first."""
    found = [
        Grown(name, old.files[name].seconds if name in old.files else None, file.seconds)
        for name, file in new.files.items()
    ]
    limit = [
        one
        for one in found
        if one.after >= GROWTH * (one.before or 0)
        and one.after - (one.before or 0) >= GROWTH_SECONDS_MIN
    ]
    return sorted(limit, key=lambda one: (one.before or 0) - one.after)


def pace(old: Record, new: Record) -> float | None:
    """How much slower the files that both have were as a whole: 1.5 says a busy machine."""
    both = old.files.keys() & new.files.keys()
    before = sum(old.files[name].seconds for name in both)
    return sum(new.files[name].seconds for name in both) / before if before else None


def dearest(record: Record, most: int = DEAREST) -> str:
    """A table of the files that take longest."""
    whole = record.seconds or 1.0
    lines = [f"{'seconds':>8} {'share':>6} {'tests':>6} {'starts':>6} {'of them':>8}  file"]
    ordered = sorted(record.files.items(), key=lambda item: -item[1].seconds)
    for name, file in [*ordered[:most], ("all files", _sum(record))]:
        lines.append(
            f"{file.seconds:8.0f} {file.seconds / whole:6.1%} {file.tests:6} "
            f"{file.engine_starts:6} {file.engine_start_seconds:6.0f} s  {name}"
        )
    about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in record.run.items())
    return "\n".join([*lines, about])


def _sum(record: Record) -> File:
    whole = File()
    for file in record.files.values():
        _add(whole, file)
    return whole


def _add(whole: File, part: File) -> None:
    whole.seconds += part.seconds
    whole.tests += part.tests
    whole.engine_starts += part.engine_starts
    whole.engine_start_seconds += part.engine_start_seconds


# --- the plugin ----------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", metavar="PATH", help="write what each file of tests took, as JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(OPTION) is not None:
        config.pluginmanager.register(EngineStarts(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config))


class EngineStarts:
    """Measures engine starts in the process that runs the tests, and adds them to its reports."""

    def __init__(self, config: pytest.Config) -> None:
        from tests.harness.engine import EngineProcess

        self._seconds: list[float] = []
        begun: weakref.WeakKeyDictionary[EngineProcess, float] = weakref.WeakKeyDictionary()
        start, wait_ready = EngineProcess.__init__, EngineProcess.wait_ready

        @functools.wraps(start)
        def timed_start(engine: EngineProcess, *args: Any, **options: Any) -> None:
            begun[engine] = time.monotonic()
            start(engine, *args, **options)

        @functools.wraps(wait_ready)
        def timed_wait(engine: EngineProcess, *args: Any, **options: Any) -> EngineProcess:
            try:
                return wait_ready(engine, *args, **options)
            finally:
                self._seconds.append(time.monotonic() - begun[engine])

        patch = pytest.MonkeyPatch()
        patch.setattr(EngineProcess, "__init__", timed_start)
        patch.setattr(EngineProcess, "wait_ready", timed_wait)
        config.add_cleanup(patch.undo)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        # xdist hands further attributes of a report over to the process that prints.
        vars(report)[STARTS] = self._seconds.copy()
        self._seconds.clear()
        return report


class Recorder:
    """Adds up the reports, in the process that prints; writes and compares at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._path: str | None = config.getoption(OPTION)
        self._started = time.monotonic()
        self._failed = 0
        self._old = load(RECORD) if RECORD.exists() else None
        self._nightly = bool(config.getoption("--nightly", False))
        self.record = Record(
            {
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                "vllm": _release(),
                "cores": os.cpu_count(),
                "load_average": round(os.getloadavg()[0], 1),
            }
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = self.record.files.setdefault(report.nodeid.partition("::")[0], File())
        starts: list[float] = getattr(report, STARTS, [])
        _add(file, File(report.duration, report.when == "setup", len(starts), sum(starts)))
        self._failed += report.failed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._compare(terminalreporter)
        if self._path is not None:
            wall_seconds = round(time.monotonic() - self._started)
            self.record.run |= {"wall_seconds": wall_seconds, "failed": self._failed}
            Path(self._path).write_text(self.record.dump())
            terminalreporter.write_line(f"durations: wrote {self._path}")

    def _compare(self, reporter: pytest.TerminalReporter) -> None:
        """Only with what the record is of: the same release, without what runs nightly."""
        old = self._old
        if old is None or self._nightly or old.run["vllm"] != self.record.run["vllm"]:
            return
        found = grown(old, self.record)
        if found:
            reporter.section("files that take longer than recorded")
            for one in found:
                reporter.write_line(str(one))
            reporter.write_line(_paces(old, self.record))


def _release() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # `make gpu-test` needs none.
        return "none"


def _paces(old: Record, new: Record) -> str:
    ratio = pace(old, new)
    if ratio is None:
        return "no recorded file ran"
    return (
        f"all recorded files that ran took {ratio:.2f} times their seconds; load average "
        f"{new.run['load_average']} at the start, {old.run['load_average']} when recorded"
    )


# --- the command ---------------------------------------------------------------------------------


def main() -> int:
    """Print the dearest files, and those that grew."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.durations", description="Show how long each file of tests takes."
    )
    parser.add_argument("new", nargs="?", type=Path, default=RECORD)
    parser.add_argument("--against", type=Path, default=RECORD, help="default: the committed one")
    parser.add_argument("--most", type=int, default=DEAREST, help="how many files are shown")
    given = parser.parse_args()
    new = load(given.new)
    print(dearest(new, given.most))
    if given.new.resolve() != given.against.resolve():
        old = load(given.against)
        found = grown(old, new)
        print(*found, sep="\n")
        print(f"{len(found)} files grew by half or more; {_paces(old, new)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
