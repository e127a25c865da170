"""The result of one check of `kvlake doctor`, as one line."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CheckResult(enum.StrEnum):
    """What one check found."""

    PASS = "pass"  # noqa: S105 (no password)
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was checked, what was found, and what to do unless it passed."""

    verdict: CheckResult
    about: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.verdict:4}  {self.about}: {self.found}"
        return f"{line}; {self.remedy}" if self.remedy else line


def passed(about: str, found: str, remedy: str = "") -> Check:
    """A check that passed."""
    return Check(CheckResult.PASS, about, found, remedy)


def warning(about: str, found: str, remedy: str = "") -> Check:
    """A check that found something to know."""
    return Check(CheckResult.WARN, about, found, remedy)


def failed(about: str, found: str, remedy: str = "") -> Check:
    """A check that found something to fix."""
    return Check(CheckResult.FAIL, about, found, remedy)
