"""What one check of `kvlake doctor` found, as one line.

Owns the words of a line. Does not own any check.
"""

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
    """One line: what was looked at, what was found, and what to do unless it passed."""

    verdict: CheckResult
    about: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.verdict:4}  {self.about}: {self.found}"
        return f"{line}; {self.remedy}" if self.remedy else line
