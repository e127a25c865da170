"""Every promise has a test, and the page that says so is what its generator writes."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.promises import COLLECTED, LIST, PAGE, Evidence, ids_of, page, problems, read

SECTIONS: Final = read("""
[[area]]
title = "Requests"
promises = { abort = "An abort stores nothing.", salt = "Salts share nothing." }
[[matrix]]
title = "Models"
within = ["connector"]
covers = "tests/e2e"
rows = { llama = "a llama", gemma = "gemma 3" }
columns = { hit = "hit", kill = "kill" }
empty = { "gemma × kill" = "not verified." }
""")


def shows(*ids: str, at: str = "tests/e2e/test_one.py", **more: Any) -> Evidence:
    return Evidence(f"{at}::test_{'_'.join(ids)}", frozenset(ids), **more)


TESTS: Final = [
    shows("abort", "connector", "llama", "hit", kind="real engine", nightly=True),
    shows("abort", at="tests/connector/test_two.py", kind="vLLM's classes"),
    shows("salt", at="tests/connector/test_two.py", nightly=True),
    shows("connector", parameters="llama-kill"),
    shows("connector", "gemma", "hit", nightly=True),
]


def test_nothing_is_wrong_with_all_promises_shown() -> None:
    assert problems(SECTIONS, TESTS) == []


def test_the_page() -> None:
    assert page(SECTIONS, TESTS).splitlines()[-15:] == [
        "## Requests",
        "",
        "| id | promise | `make test` | *nightly* only |",
        "|---|---|---|---|",
        "| `abort` | An abort stores nothing. | vLLM's classes | real engine |",
        "| `salt` | Salts share nothing. |  | unit |",
        "",
        "## Models",
        "",
        "| | hit | kill |",
        "|---|---|---|",
        "| a llama | *nightly* | test |",
        "| gemma 3 | *nightly* | none |",
        "",
        "- gemma 3 × kill: not verified.",
    ]


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ([*TESTS[:2], *TESTS[3:]], "salt: no test"),
        (TESTS[:4], "Models: gemma × hit: no test"),
        ([*TESTS, shows("connector", "gemma", "kill")], "Models: gemma × kill: has a test now"),
        ([*TESTS, shows("sald", at="tests/a.py")], "tests/a.py::test_sald: unknown promise 'sald'"),
        ([*TESTS, shows(at="tests/e2e/test_b.py")], "tests/e2e/test_b.py: in no row of Models"),
    ],
)
def test_what_is_wrong_is_said(tests: list[Evidence], problem: str) -> None:
    assert problems(SECTIONS, tests) == [problem]


class Suite:
    @pytest.mark.promise("one")
    def test_it(self) -> None: ...


class Overriding(Suite):
    def test_it(self) -> None: ...


def test_a_method_that_overrides_another_keeps_its_promises(request: pytest.FixtureRequest) -> None:
    module = request.node.getparent(pytest.Module)
    collected = pytest.Class.from_parent(module, name=Overriding.__name__)
    assert ids_of(pytest.Function.from_parent(collected, name="test_it")) == {"one"}


def test_every_promise_has_a_test_and_the_page_says_which(pytestconfig: pytest.Config) -> None:
    tests = pytestconfig.stash.get(COLLECTED, None)
    if tests is None:
        pytest.skip("only some tests were collected; `make check` collects all")
    sections = read(LIST.read_text())
    assert problems(sections, tests) == []
    assert PAGE.read_text() == page(sections, tests), "run `make promises`"
