"""Each promise of the core, broken on purpose, is noticed by the simulation."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable

import pytest

from tests import places
from tests.simulation import search
from tests.simulation.__main__ import main
from tests.simulation.clock import Violation
from tests.simulation.life import Result, simulate
from tests.simulation.mutation import Mutation
from tests.simulation.mutations import MUTATIONS, named
from tests.simulation.search import (
    SEARCH_SECONDS_MAX,
    Noticed,
    notice,
    notice_all,
    notice_at_once,
    shrink,
)

SEEDS = 60
QUICK = "a job is answered twice"


@pytest.fixture(scope="module")
def fates() -> dict[str, Noticed]:
    """On all cores: each mutation in the life named beside it, else until a life notices it."""
    fates = {fate.mutation.name: fate for fate in notice_at_once(MUTATIONS)}
    unnoticed = [fate.mutation for fate in fates.values() if fate.result is None]
    return fates | {fate.mutation.name: fate for fate in notice_all(unnoticed, range(SEEDS))}


@pytest.mark.promise("mutations")
@pytest.mark.slow
@pytest.mark.timeout(SEARCH_SECONDS_MAX)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_promise_is_noticed(mutation: Mutation, fates: dict[str, Noticed]) -> None:
    fate = fates[mutation.name]
    sound = [f"--seed {one.seed}: {one.violation}" for one in fate.unsound]
    assert not sound, f"lives of {mutation.often} that break a rule without it: {sound}"
    assert fate.result is not None, f"{mutation.name}: {fate.seeds} lives broke no rule"
    assert fate.result.rule


def test_each_mutation_applies_and_goes() -> None:
    """Where the code has moved on, it says so, rather than prove nothing."""
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        with mutation.applied():
            pass
    assert simulate(0).violation is None


def test_a_mutation_of_code_that_is_not_there_is_an_error() -> None:
    gone = Mutation("gone", "Leases.expire", "no such code", "pass")
    with pytest.raises(LookupError, match=r"'gone'.*no such code"), gone.applied():
        pass


def test_a_life_that_breaks_a_rule_without_the_mutation_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lived: Counter[int] = Counter()

    def live(seed: int, often: object) -> Result:
        lived[seed] += 1
        # The life with the mutation comes first.
        broken = seed == 0 or lived[seed] == 1
        return Result(seed, 1, "", Counter(), Violation("a rule") if broken else None)

    monkeypatch.setattr(search, "simulate", live)
    fate = notice(named(QUICK), range(3))
    assert [one.seed for one in fate.unsound] == [0]
    assert fate.result is not None
    assert fate.result.seed == 1


def test_the_mutations_are_those_of_the_docs() -> None:
    text = places.page("testing.md").read_text()
    told = [name for name in (mutation.name for mutation in MUTATIONS) if f"| {name} |" in text]
    assert told == [mutation.name for mutation in MUTATIONS]


# --- a failure, and how to look at it ------------------------------------------------------------


@pytest.fixture
def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str]]:
    """The exit code and the output of a command line."""

    def run(command: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["simulation", *shlex.split(command)])
        code = main()
        return code, capsys.readouterr().out

    return run


def test_a_seed_that_fails_prints_the_command_that_replays_it(
    told: Callable[[str], tuple[int, str]],
) -> None:
    code, first = told(f"--mutation '{QUICK}' --seed 2")
    assert code == 1
    (line,) = [line for line in first.splitlines() if line.startswith("replay it: ")]
    start, _, options = line.partition("tests.simulation ")
    assert start == "replay it: python -m "
    assert options == f"--seed 2 --mutation '{QUICK}' --trace"
    code, again = told(options)
    assert code == 1
    broken = [line for line in first.splitlines() if "broke a rule" in line]
    assert broken == [line for line in again.splitlines() if "broke a rule" in line] != []
    # The trace ends with what broke the rule.
    assert "JobOutcome" in again


@pytest.mark.slow
def test_a_search_tells_how_each_mutation_fared(told: Callable[[str], tuple[int, str]]) -> None:
    code, text = told(f"--mutation '{QUICK}' --seeds 4 --workers 1")
    assert code == 0
    assert f"{QUICK}: a job is answered once (seed 0)" in text
    assert "1 of 1 mutations noticed" in text


@pytest.mark.slow
def test_shrinking_leaves_what_the_failure_needs() -> None:
    mutation = named("a corrupt chunk stays in sight")
    with mutation.applied():
        seed, rule = _failure(mutation)
        without = shrink(seed, rule, mutation.often)
        assert without, "of many faults, most have nothing to do with it"
        whole = simulate(seed, often=mutation.often, trace=True)
        short = simulate(seed, often=mutation.often, without=without, trace=True)
    assert short.rule == whole.rule == rule
    assert _faults(short.lines) < _faults(whole.lines)
    assert "memory damaged" in " ".join(line for line in short.lines if "FAULT" in line)


def _failure(mutation: Mutation) -> tuple[int, str]:
    for seed in (mutation.seed, *range(SEEDS)):
        result = simulate(seed, often=mutation.often)
        if result.violation is not None:
            return seed, result.rule
    raise AssertionError(f"{mutation.name} is not noticed")


def _faults(lines: list[str]) -> int:
    return sum("FAULT" in line for line in lines)
