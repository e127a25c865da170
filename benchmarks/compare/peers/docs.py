"""The section of `docs/evidence/compare.md` that a comparison fills.

Invariant: what is between the two marks is a function of the report alone.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from benchmarks.compare.peers.report import (
    COLUMNS,
    DISTANCE_HEADINGS,
    behind,
    behind_text,
    cells_of,
    distance_cells,
    distances,
    rows_of,
    scenarios_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.compare.peers.report import Report

BEGIN: Final = "<!-- Comparison: made by `make compare`, do not edit -->"
END: Final = "<!-- end of comparison -->"
COLUMNS_MAX: Final = 100
QUIET_LOAD: Final = 0.3


def fill(page: Path, report: Report, pictures: dict[str, str]) -> None:
    """Replace the section of a page. Raises `ValueError` if the page has no marks."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page}: has no section between {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{section(report, pictures)}\n{END}{after}")


def section(report: Report, pictures: dict[str, str]) -> str:
    """Where kvlake is behind, how it was measured, pictures, and a table for each scenario.

    `pictures` maps a description to the path of a picture, relative to the page.
    """
    lines = ["### Where kvlake is behind", ""]
    found = list(behind(report))
    if found:
        lines += paragraph(
            f"In {len(found)} figures another arm is better than an arm of kvlake: failures "
            "first, then the furthest behind:"
        )
        for one in found:
            lines += wrapped(behind_text(one), "- ", "  ")
        lines.append("")
    else:
        lines += ["No figure of another arm is better.", ""]
    if far := [distance_cells(one) for one in distances(report)]:
        lines += ["### How far kvlake is from the engine itself", ""]
        lines += paragraph(
            "The arm `limit` finds everything in its engine's own cache: what it takes is the "
            "engine's own, and no cache beside an engine can save it. Times in milliseconds."
        )
        lines += ["| " + " | ".join(row) + " |" for row in (DISTANCE_HEADINGS, *far)]
        lines.insert(len(lines) - len(far), "|---" * len(DISTANCE_HEADINGS) + "|")
        lines.append("")
    lines += ["### How it was measured", "", *paragraph(about(report))]
    for name, path in pictures.items():
        lines += [f"![{name}]({path})", ""]
    for scenario in scenarios_of(report):
        lines += table_of(report, scenario)
    return "\n".join(lines)


def about(report: Report) -> str:
    """Machine, releases, date, load and command."""
    machine = report["machine"]
    load = machine["load_before"]
    quiet = "under" if load < QUIET_LOAD else "not under"
    releases = ", ".join(f"{name} {release}" for name, release in report["releases"].items())
    quick = " This was a quick run, with fewer requests." if report["quick"] else ""
    return (
        f"{report['date']}, {machine['cpu']}, {machine['cores']} cores, Python "
        f"{machine['python']}. Load average before the start: {load:.2f}, {quiet} {QUIET_LOAD}. "
        f"Releases: {releases}. Command: `{report['command']}`, {report['seconds'] / 60:.0f} "
        f"minutes. Trace: {report['trace']}.{quick}"
    )


def table_of(report: Report, scenario: str) -> list[str]:
    """The table of one scenario, and what there is to say of its arms."""
    rows = rows_of(report, scenario)
    lines = [f"### {scenario}", ""]
    if text := report["scenarios"].get(scenario):
        lines += paragraph(text)
    if any(row["requests"] for row in rows):
        lines.append("| | " + " | ".join(heading for heading, _ in COLUMNS) + " |")
        lines.append("|---" * (len(COLUMNS) + 1) + "|")
        for row in rows:
            if row["requests"]:
                lines.append("| " + " | ".join(cells_of(report, row)) + " |")
        lines.append("")
    notes = [row for row in rows if row["note"]]
    for row in notes:
        lines += wrapped(f"{row['arm']}: {plain(row['note'])}", "- ", "  ")
    return [*lines, *([""] if notes else [])]


def plain(note: str) -> str:
    """A note without what Markdown would read as markup."""
    return note.replace("|", "/").replace("<", "(").replace(">", ")").replace("`", "'")


def paragraph(text: str) -> list[str]:
    """Wrapped, with an empty line after it."""
    return [*wrapped(text, "", ""), ""]


def wrapped(text: str, first: str, later: str) -> list[str]:
    """Lines of at most 100 columns."""
    return textwrap.wrap(
        text,
        COLUMNS_MAX,
        initial_indent=first,
        subsequent_indent=later,
        break_on_hyphens=False,
    )
