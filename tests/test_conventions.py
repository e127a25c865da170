"""What CONTRIBUTING asks of commit subjects and of the changelog."""

from __future__ import annotations

import re
import subprocess
from typing import Final

import pytest

from tests import places

FIRST: Final = "fa7e95d5fe4c"
"""The last commit before subjects were verified."""
SUBJECT: Final = re.compile(r"[a-z0-9 ,./_-]+: \S.*")
SUBJECT_LENGTH_MAX: Final = 72
HEADING: Final = re.compile(r"Unreleased|\d+\.\d+\.\d+ \(\d{4}-\d{2}-\d{2}\)")
KINDS: Final = {"Added", "Changed", "Fixed", "Removed"}


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=places.ROOT, capture_output=True, text=True, check=False)


def test_commit_subjects_follow_the_convention() -> None:
    found = git("log", "--no-merges", "--format=%s", f"{FIRST}..HEAD")
    if found.returncode:
        pytest.skip("this copy of the repository has no history")
    subjects = found.stdout.splitlines()
    long = [one for one in subjects if len(one) > SUBJECT_LENGTH_MAX]
    other = [one for one in subjects if not SUBJECT.fullmatch(one)]
    assert (long, other) == ([], [])


def test_the_changelog_has_versions_with_dates() -> None:
    text = (places.ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [one for one in versions if not HEADING.fullmatch(one)] == []
    assert versions[1:] == sorted(versions[1:], key=number, reverse=True)
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= KINDS


def number(heading: str) -> tuple[int, ...]:
    return tuple(int(part) for part in heading.split(" ", 1)[0].split("."))


def test_the_newest_version_of_the_changelog_is_the_projects() -> None:
    versions = re.findall(r"^## (\d\S+)", (places.ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    project = re.search(
        r'^version = "(.+)"$', (places.ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert project is not None
    assert versions[0] == project[1]
