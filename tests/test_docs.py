"""What the documentation names is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests import places

REPOSITORY: Final = places.ROOT
PAGES: Final = sorted(
    [
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "examples").rglob("*.md"),
        *REPOSITORY.glob("*.md"),
    ]
)
# Decisions say what held on their day.
TODAYS: Final = [page for page in PAGES if page.parent.name != "adr"]
# What the soak measures has names like those of settings.
OF_SETTINGS: Final = [page for page in TODAYS if page.name != "soak.md"]


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", TODAYS, ids=name_of)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::\w+)*::(\w+)`", page.read_text()):
        assert f"def {name}(" in (REPOSITORY / path).read_text(), f"{path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are made of them where it is shown."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", OF_SETTINGS, ids=name_of)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    schema = json.loads((REPOSITORY / "configs" / "schema.json").read_text())
    files = (".py", ".json", ".yaml", ".md")
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", page.read_text()):
        section, *rest = name.split(".")
        if section in schema["properties"] and not name.endswith(files):
            assert is_setting(schema, schema["properties"][section], rest), name


def is_setting(schema: dict[str, Any], node: dict[str, Any], path: list[str]) -> bool:
    """Whether the part of the schema at `node` knows what `path` leads to."""
    if not path:
        return True
    if "$ref" in node:
        return is_setting(schema, schema["$defs"][node["$ref"].rpartition("/")[2]], path)
    choices: list[dict[str, Any]] = node.get("anyOf", [])
    below = node.get("properties", {}).get(path[0])
    return any(is_setting(schema, choice, path) for choice in choices) or (
        below is not None and is_setting(schema, below, path[1:])
    )


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


def test_every_test_of_the_connector_has_a_word_on_vllms_own_offloading() -> None:
    text = (REPOSITORY / "docs" / "support.md").read_text()
    section = text.partition("## The connector's tests on vLLM's own offloading")[2]
    section = section.partition("\n## ")[0]
    exempt, _, table = section.partition("Not asked of it")[2].partition("\n|")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    told = re.findall(r"`(test_\w+\.py)`", " ".join([exempt, *rows]))
    there = {path.name for path in (REPOSITORY / "tests" / "e2e").glob("test_*.py")}
    native = {name for name in there if name.startswith("test_native_")}
    assert sorted(told) == sorted(there - native)
    assert native <= set(re.findall(r"`(\w+\.py)`", table))
