"""What the documentation names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["testing.md", "security.md"])
def test_tests_that_a_page_names_exist(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text()
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert f"def {name}(" in (REPOSITORY / path).read_text(), f"{path}::{name}"
