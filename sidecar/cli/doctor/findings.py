"""The result of one check of `kvlake doctor`, as one line."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Final


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


passed: Final = functools.partial(Check, CheckResult.PASS)
warning: Final = functools.partial(Check, CheckResult.WARN)
failed: Final = functools.partial(Check, CheckResult.FAIL)
