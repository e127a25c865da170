"""The list of vLLM's defects names promises and tests that exist, and code that exists."""

from __future__ import annotations

import re
from typing import Final

import pytest

from connector import vllm_workarounds
from tests import places
from tests.promises import LIST, Area, read

LISTED: Final = (vllm_workarounds.__doc__ or "").split("\n* ")[1:]
ENTRY: Final = re.compile(
    r"(?P<defect>.+) Here: (?P<here>.+) In: (?P<releases>.+)\. Shown by: (?P<shown>[^.]+)\."
)
ENTRIES: Final = [
    found.groupdict()
    for entry in LISTED
    if (found := ENTRY.match(" ".join(entry.split()))) is not None
]


def test_every_entry_is_whole() -> None:
    assert len(ENTRIES) == len(LISTED) > 5


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["shown"].partition(",")[0])
def test_an_entry_names_what_exists(entry: dict[str, str]) -> None:
    for name in re.findall(r"`([A-Za-z_.]+)`", entry["here"]):
        assert places.find(name, package="connector")
    areas = [one for one in read(LIST.read_text()) if isinstance(one, Area)]
    promises = {promise for area in areas for promise in area.promises}
    tests = "".join(path.read_text() for path in (places.ROOT / "tests").rglob("test_*.py"))
    for shown in entry["shown"].split(", "):
        assert shown in promises or f"def {shown}(" in tests, f"{shown} is not a promise or a test"
