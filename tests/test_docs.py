"""What the documentation names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["testing.md", "security.md", "support.md"])
def test_tests_that_a_page_names_exist(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text()
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::\w+)*::(\w+)`", text):
        assert f"def {name}(" in (REPOSITORY / path).read_text(), f"{path}::{name}"


def test_every_feature_has_a_test_or_says_that_it_has_none() -> None:
    text = (REPOSITORY / "docs" / "support.md").read_text()
    features = text.partition("## Features")[2].partition("\n## ")[0]
    rows = [line for line in features.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    for row in rows[2:]:
        _, feature, _, verified, _ = (cell.strip() for cell in row.split("|"))
        paths = re.findall(r"`(tests/[\w/]+\.py)(?:::\w+)*`", verified)
        assert paths or verified.startswith("not verified"), feature
        assert all((REPOSITORY / path).is_file() for path in paths), feature
