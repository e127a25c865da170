"""Everything that `make test` leaves out, in stages that can be resumed.

    python -m tests.nightly.run                     every stage that has not passed on these sources
    python -m tests.nightly.run --list              the stages, and the last result of each
    python -m tests.nightly.run --only 'simulate-*' soak
    python -m tests.nightly.run --again fuzz        also where it has passed
    python -m tests.nightly.run --any-commit        only what has passed on no commit
    python -m tests.nightly.run --report            write docs/evidence/nightly.md and its source

Owns running the stages one after another. Does not own which there are (`stages.py`), what is kept
of them (`records.py`) and how it is shown (`report.py`).

Invariants: a stage is recorded at its end and not before; an interruption ends the stage's
processes and records nothing of it; the exit code is 0 only if every stage that was asked for has
passed, now or as recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from tests.nightly import counts, records, report
from tests.nightly.records import Record
from tests.nightly.stages import Stage, all_stages

STOP_SECONDS_MAX: Final = 60.0
"""For what an interrupted stage takes down: engines, servers, shared memory."""
TIMED_OUT: Final = 124
INTERRUPTED: Final = 130


def run_stage(stage: Stage, folder: Path) -> Record:
    """Run a stage to its end, and record it."""
    commit, dirty = records.head(), records.is_dirty()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{stage.name}.log"
    started = time.monotonic()
    exit_code = _run(stage, log)
    text = log.read_text(errors="replace")
    counted = stage.read(text)
    failures = list(counted.failures)
    if exit_code and not failures:
        failures = [counts.last_line(text)]
    record = Record(
        stage=stage.name,
        commit=commit,
        # A change during the run counts too.
        dirty=dirty or records.is_dirty() or records.head() != commit,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - started),
        exit_code=exit_code,
        unit=counted.unit,
        passed=counted.passed,
        failed=counted.failed,
        skipped=counted.skipped,
        failures=failures,
        log=os.path.relpath(log, records.REPOSITORY),
    )
    records.save(record, folder)
    return record


def _run(stage: Stage, log: Path) -> int:
    # Variables of the make that runs this are not meant for the one of a stage.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    with log.open("wb") as output, _process(stage, output.fileno(), environment) as process:
        try:
            return process.wait(stage.seconds_max)
        except subprocess.TimeoutExpired:
            _end(process)
            output.write(f"\nended after {stage.seconds_max / 60:.0f} minutes\n".encode())
            return TIMED_OUT


@contextlib.contextmanager
def _process(
    stage: Stage, output: int, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        stage.command,
        cwd=records.REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment | {"NO_COLOR": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that tests take down what they started; then for good."""
    for number, seconds in ((signal.SIGINT, STOP_SECONDS_MAX), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def run(
    stages: Sequence[Stage],
    folder: Path,
    found: Mapping[str, Record],
    *,
    again: Sequence[str] = (),
    any_commit: bool = False,
) -> dict[str, Record]:
    """Run the stages that have not passed; return the records of all."""
    latest = dict(found)
    for number, stage in enumerate(stages, start=1):
        record = latest.get(stage.name)
        head = f"[{number}/{len(stages)}] {stage.name}"
        if record is not None and not _matches(stage, again) and _counts(record, any_commit):
            print(f"{head}: passed on {record.revision}", flush=True)
            continue
        print(f"{head}: runs, about {stage.minutes} minutes", flush=True)
        latest[stage.name] = record = run_stage(stage, folder)
        result = "passed" if record.good else f"FAILED, see {record.log}"
        print(f"{head}: {result}, {record.passed:,} {record.unit}, {record.seconds} s", flush=True)
    return latest


def _counts(record: Record, any_commit: bool) -> bool:
    return record.good if any_commit else record.holds()


def _matches(stage: Stage, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(stage.name, pattern) for pattern in patterns)


def _chosen(stages: list[Stage], patterns: Sequence[str]) -> list[Stage]:
    for pattern in patterns:
        if not any(_matches(stage, [pattern]) for stage in stages):
            raise SystemExit(f"{pattern!r} is no stage; --list shows them")
    return [stage for stage in stages if not patterns or _matches(stage, patterns)]


def main(
    stages: list[Stage] | None = None,
    folder: Path = records.FOLDER,
    results: Path = records.RESULTS,
    page: Path = records.PAGE,
) -> int:
    """The command; 0 if every stage that was asked for has passed."""
    given = _options()
    # Also where it was started in the background, with SIGINT ignored: stages inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    stages = all_stages(folder) if stages is None else stages
    found = records.load(folder, results)
    if given.report:
        report.publish(stages, found, results, page)
        print(f"wrote {page} and {results}")
        return 0
    patterns = [*given.only, *given.again]
    chosen = _chosen(stages, patterns)
    if given.list:
        print(report.summary(chosen, found), end="")
        return 0
    try:
        found = run(chosen, folder, found, again=given.again, any_commit=given.any_commit)
    except KeyboardInterrupt:
        print("interrupted: the stage that ran is not recorded", flush=True)
        found, code = records.load(folder, results), INTERRUPTED
    else:
        code = 0 if all(found[stage.name].good for stage in chosen) else 1
    print(report.summary(chosen, found), end="")
    return code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nightly.run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    parser.add_argument("--list", action="store_true", help="show stages and results, run nothing")
    parser.add_argument(
        "--report", action="store_true", help="write docs/evidence/nightly.md, run nothing"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="names or patterns")
    parser.add_argument("--again", nargs="+", default=[], metavar="STAGE", help="run these again")
    parser.add_argument(
        "--any-commit", action="store_true", help="accept a result of another commit, too"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
