"""What the documentation names is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests import places
from tests.promises import LIST, PAGE, Area, read

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
# What `make nightly` found, by file of tests, is written by it.
OF_DOCS: Final = [
    page for page in PAGES if page.is_relative_to(REPOSITORY / "docs") and page.name != "nightly.md"
]
SUPPORT: Final = REPOSITORY / "docs" / "reference" / "support.md"
SECTIONS: Final = {
    one.title: one.promises for one in read(LIST.read_text()) if isinstance(one, Area)
}
ON_SUPPORT: Final = (
    "Models and requests",
    "What a request may ask for",
    "Ranks and engines",
    "Engines with different layouts",
    "Refused, with a reason",
    "KV events",
    "vLLM's own offloading",
)
# What the soak measures has names like those of settings.
OF_SETTINGS: Final = [page for page in TODAYS if page.name != "soak.md"]


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", OF_DOCS, ids=name_of)
def test_no_page_names_tests(page: Path) -> None:
    """The page of promises names them: `make promises` writes it from markers on the tests."""
    assert not re.findall(r"\btest_\w+\.py", page.read_text())


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
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def prose(page: Path) -> list[tuple[int, str]]:
    """The lines of a page outside tables, with their numbers."""
    lines = enumerate(page.read_text().splitlines(), 1)
    return [(number, line) for number, line in lines if not line.lstrip().startswith("|")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_outside_tables_are_short(page: Path) -> None:
    # An image is one word that cannot be wrapped.
    lines = [one for one in prose(page) if not one[1].startswith("![")]
    assert [number for number, line in lines if len(line) > 100] == []


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


def test_the_support_page_is_short() -> None:
    assert len(SUPPORT.read_text().splitlines()) < 150


@pytest.mark.parametrize("page", [SUPPORT, PAGE], ids=name_of)
def test_cells_hold_words_and_no_paragraphs(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert not [cell for row in rows for cell in row.split("|") if len(cell.strip()) > 120]


def test_every_line_of_the_support_page_has_a_promise_or_says_that_it_has_none() -> None:
    known = set[str]().union(*SECTIONS.values())
    rows = re.findall(r"^\| (.+) \| (.+) \| ?(.*)\|$", SUPPORT.read_text(), re.MULTILINE)
    assert len(rows) > 80
    for what, state, promises in rows:
        if what == "what":
            continue
        unproven = state.startswith(("not verified", "share nothing"))
        assert unproven == (not promises), what
        assert ids_in(promises) <= known, what


def test_every_promise_to_users_is_on_the_support_page() -> None:
    of_users = {one for title in ON_SUPPORT for one in SECTIONS[title]}
    assert of_users - ids_in(SUPPORT.read_text()) == set()


def test_the_security_page_has_all_promises_of_security() -> None:
    text = (REPOSITORY / "docs" / "reference" / "security.md").read_text()
    claims = {" ".join(one.split()) for one in re.split(r"^- |\n\n", text, flags=re.MULTILINE)}
    assert set(SECTIONS["Security"].values()) - claims == set()


def ids_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z0-9-]+)`", text))
