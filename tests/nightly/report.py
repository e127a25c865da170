"""The results of a nightly run as a table, for the terminal and for docs/evidence/nightly.md.

Owns rendering, and writing the committed results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.nightly import records
from tests.nightly.records import Record
from tests.nightly.stages import Stage

HEAD = """# The nightly run

`make nightly` runs everything that `make test` leaves out, in [stages](testing.md#the-nightly-run).
This page has the last result of each stage. `make nightly NIGHTLY_ARGS=--report` writes it.
"""
COLUMNS = ("stage", "shows", "result", "passed", "failed", "skipped", "minutes", "commit", "date")


def summary(stages: Sequence[Stage], found: Mapping[str, Record]) -> str:
    """A sentence, the table, and the failures by name."""
    run = [found[stage.name] for stage in stages if stage.name in found]
    failed = [record for record in run if not record.good]
    counted = (
        f"{len(stages)} stages: {len(run) - len(failed)} passed, {len(failed)} failed, "
        f"{len(stages) - len(run)} not run."
    )
    lines = [counted, "", *_table(stages, found)]
    if failed:
        # A table, because its lines may be as long as the names of tests.
        lines += [
            "",
            "Failures:",
            "",
            "| stage | exit code | first failures |",
            "| --- | --- | --- |",
        ]
        lines += map(_failure, failed)
    return "\n".join(lines) + "\n"


def _table(stages: Sequence[Stage], found: Mapping[str, Record]) -> list[str]:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    rows += [_row(stage, found.get(stage.name)) for stage in stages]
    return [f"| {' | '.join(row)} |" for row in rows]


def _row(stage: Stage, record: Record | None) -> tuple[str, ...]:
    if record is None:
        return (stage.name, stage.shows, "not run", *[""] * (len(COLUMNS) - 3))
    return (
        stage.name,
        stage.shows,
        "passed" if record.good else "**failed**",
        f"{record.passed:,} {record.unit}",
        str(record.failed),
        str(record.skipped),
        f"{record.seconds / 60:.1f}",
        record.revision,
        record.date[:10],
    )


def _failure(record: Record) -> str:
    return f"| {record.stage} | {record.exit_code} | {'; '.join(record.failures)} |"


def publish(
    stages: Sequence[Stage],
    found: Mapping[str, Record],
    results: Path = records.RESULTS,
    page: Path = records.PAGE,
) -> None:
    """Write the results that are committed. Stages that no longer exist are dropped."""
    known = [found[stage.name] for stage in stages if stage.name in found]
    records.write_whole(results, records.dump(known))
    records.write_whole(page, f"{HEAD}\n{summary(stages, found)}")
