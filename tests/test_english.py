"""Phrases that make a reader stop: neither documentation nor docstrings and comments use them."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests import places

REMEDIES: Final = {
    r"(?:^|[.:;] |- |\| )Of (?!course)[a-z`]": "name the subject: 'bytes of a block', 'per chunk'",
    r"\banew\b": "again",
    r"\bso many (?!as\b)": "this many",
    r"\b[Ww]hoever\b": "name who it is",
    r"\bwhat waits\b": "what is queued, or the work that is queued",
}
CODE: Final = ("connector", "sidecar", "tiers", "tests", "benchmarks", "examples")


def python_prose(path: Path) -> Iterator[str]:
    """The comments and the long strings of a file."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")
        elif token.type == tokenize.STRING and token.string.startswith('"""'):
            yield token.string.strip('"')


def page_prose(path: Path) -> Iterator[str]:
    """The paragraphs and table rows of a page, without code."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    yield from re.sub(r"`[^`]*`", "`", text).splitlines()


def found_in(text: str) -> list[str]:
    return [
        f"{match[0]!r}: {remedy}"
        for phrase, remedy in REMEDIES.items()
        if (match := re.search(phrase, re.sub(r"`\w+`", "`", text), re.MULTILINE))
    ]


@pytest.mark.parametrize("package", CODE)
def test_docstrings_and_comments_are_plain(package: str) -> None:
    wrong = [
        (str(path.relative_to(places.ROOT)), found)
        for path in sorted((places.ROOT / package).rglob("*.py"))
        if path != Path(__file__)
        for text in python_prose(path)
        if (found := found_in(text))
    ]
    assert wrong == []


def test_pages_are_plain() -> None:
    pages = [*places.ROOT.glob("*.md"), *(places.ROOT / "docs").rglob("*.md")]
    wrong = [
        (page.name, found)
        for page in pages
        for text in page_prose(page)
        if (found := found_in(text))
    ]
    assert wrong == []
