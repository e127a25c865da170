"""What the tools of the nightly run print at their end, as counts.

Owns reading their output. Whether a stage passed is for its exit code to say: a tool that ends
before it prints anything has no counts here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

FAILURES_MAX: Final = 10
"""Names that are kept of one stage."""
FAILURE_LENGTH_MAX: Final = 160
_PYTEST: Final = re.compile(r"^(?:=+ )?(\d+ [a-z]+(?:, \d+ [a-z]+)*) in [\d.]+s", re.MULTILINE)
_PYTEST_FAILURE: Final = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True)
class Counts:
    """How many of what passed, failed and were skipped."""

    unit: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    """Names of the first that failed."""


def of_pytest(text: str) -> Counts:
    """The last summary line: `make check` and `make test-release` print other things before."""
    summaries = _PYTEST.findall(text)
    number: dict[str, int] = {}
    for part in summaries[-1].split(", ") if summaries else ():
        count, word = part.split()
        number[word.removesuffix("s")] = int(count)
    if not summaries and "no tests ran in " in text:
        return Counts("tests", failures=("pytest collected no test",))
    return Counts(
        "tests",
        passed=number.get("passed", 0),
        failed=number.get("failed", 0) + number.get("error", 0),
        skipped=number.get("skipped", 0) + number.get("xfailed", 0),
        failures=_first(_PYTEST_FAILURE.findall(text)),
    )


def of_simulation(text: str) -> Counts:
    """`make simulate`: it ends with the first seed that breaks a rule."""
    broken = re.findall(r"^seed \d+ broke a rule.*", text, re.MULTILINE)
    lived = re.findall(r"^(\d+)(?: of \d+)? seeds, ", text, re.MULTILINE)
    passed = int(lived[-1]) if lived else 0
    return Counts("seeds", passed=passed, failed=len(broken), failures=_first(broken))


def of_fuzzing(text: str) -> Counts:
    """`make fuzz`."""
    found = re.findall(r"^(.*): FOUND something", text, re.MULTILINE)
    targets = re.search(r"^fuzz: (\d+) targets", text, re.MULTILINE)
    passed = int(targets[1]) - len(found) if targets else 0
    return Counts("targets", passed=passed, failed=len(found), failures=_first(found))


def of_live_fuzzing(text: str) -> Counts:
    """`python -m tests.fuzz.live`: the first finding ends it."""
    found = re.findall(r"^live: FOUND: (.*)", text, re.MULTILINE)
    attacks = re.search(r'^live: \{"attacks": (\d+)', text, re.MULTILINE)
    passed = int(attacks[1]) if attacks else 0
    return Counts("attacks", passed=passed, failed=len(found), failures=_first(found))


def of_soak(text: str) -> Counts:
    """`make soak`."""
    bad = re.findall(r"^\| \*\*BAD\*\* \| (.*?) \|", text, re.MULTILINE)
    verdicts = re.search(r"(\d+) of \d+ verdicts are good", text)
    passed = int(verdicts[1]) if verdicts else 0
    return Counts("verdicts", passed=passed, failed=len(bad), failures=_first(bad))


def last_line(text: str) -> str:
    """What a tool said last: the failure of a stage that has no other name for it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:FAILURE_LENGTH_MAX] if lines else "no output"


def _first(names: list[str]) -> tuple[str, ...]:
    return tuple(name[:FAILURE_LENGTH_MAX] for name in names[:FAILURES_MAX])
