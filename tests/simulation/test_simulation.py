"""Random lives of a node keep every rule, reach every situation, and repeat exactly.

What is simulated, and how to replay a seed: docs/evidence/testing.md.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from sidecar.core.directory import TRANSITIONS
from tests.simulation import life
from tests.simulation.life import simulate
from tests.simulation.search import SEARCH_SECONDS_MAX, Summary, search

SEEDS = 100
SEEDS_NIGHTLY = 500
DIRECTED = (
    ("another cluster writes", "object damaged", "store damages", "store fails", "store slow"),
    ("abort", "client stops reading", "engine dies", "one client dies first", "reset"),
)
"""Faults that come more often in some further lives: what they lead to is rare in the others."""
DIRECTED_SEEDS = 10

SITUATIONS = [
    *(f"{state.name} + {cause.name}" for state, cause in TRANSITIONS),
    *(f"gather {outcome}" for outcome in ("ok", "revoked", "expired")),
    *(f"scatter {outcome}" for outcome in ("ok", "revoked", "corrupt", "failed", "expired")),
    *(f"write {outcome}" for outcome in ("ok", "unavailable", "corrupt", "expired")),
    *(f"read {outcome}" for outcome in ("ok", "unavailable", "corrupt", "missing", "expired")),
    *(
        # FAILED takes damage between two ranks' parts of one store: not in every 500 lives.
        f"job {outcome}"
        for outcome in ("OK", "MISSING", "CORRUPT", "FULL", "REVOKED", "PARTIAL", "EXPIRED")
    ),
    *(
        f"lookup {outcome}"
        for outcome in (
            "OK", "MISSING", "CORRUPT", "FULL", "FAILED", "EXPIRED",
        )
    ),
    *(
        f"counter {name}"
        for name in (
            "chunks_evicted", "chunks_expired", "chunks_pinned", "pins_refused",
            "chunks_loaded", "chunks_read", "chunks_stored", "chunks_written",
            "leases_expired", "leases_refused", "lookups_expired", "lookups_refused",
            "quarantined_host", "quarantined_store", "reads_dropped_full",
            "chunks_restored", "slots_restored", "slots_unclaimed_dropped",
            "stores_dropped_draining",
            "stores_dropped_full", "stores_dropped_quota", "stores_duplicate", "stores_refused",
            "writes_dropped",
        )
    ),
    *(
        f"fault: {name}"
        for name in (
            "sidecar killed", "sidecar terminated", "sidecar stopped", "engine dies",
            "sidecar stopped for long",
            "one client dies first", "session cut", "engine stalls", "client stops reading",
            "abort",
            "reset", "requests at once", "flood of lookups", "leases without a load",
            "message of another life", "clock jumps", "memory damaged",
            "memory damaged, then loaded", "one rank is late", "loads without a lookup",
            "store goes down", "store full", "store slow", "store fails", "store damages",
            "another cluster writes", "object vanishes", "object damaged",
            "objects under wrong names", "models take turns",
        )
    ),
    "abort", "abort while loading", "attach not answered in time", "attach refused: engine",
    "attach refused: realms", "chunks of a realm given up", "realm forgotten",
    "client does not read", "damage of a chunk that is not complete", "damage outlives a sidecar",
    "damage under a write",
    "drain with work left", "end of file at a client", "copy expired: was not reached",
    "index moved", "killed in the middle of a copy", "load failed", "load ok", "message Error",
    "message Events", "preemption", "request finished", "request waits for the store", "reset",
    *(f"several groups: in one {what}" for what in ("LoadJob", "StoreJob", "Lookup", "Pin")),
    "several groups: a window moved on",
    "stopped in the middle of a copy", "store: answer to read lost", "store: answer to write lost",
    "store: full", "store: object missing", "store: object quarantined", "store: read damaged",
    "waits for blocks of stores", "wire: answer lost with its session",
    "wire: message lost with the sidecar", "wire: send refused",
]  # fmt: skip
"""A simulation that never gets into a situation proves nothing about it."""
RARE = {
    "READING + DETACHED", "STORING + DETACHED", "abort while loading", "attach refused: engine",
    "client does not read",
    "copy expired: was not reached", "counter reads_dropped_full", "damage outlives a sidecar",
    "lookup CORRUPT", "read missing", "scatter expired", "scatter failed",
    "store: answer to read lost", "store: object missing", "store: read damaged",
    "wire: message lost with the sidecar",
}  # fmt: skip
"""Those that fewer than four of the lives of `make test` reached when this was written.

Any change of the code gives other lives, which may then lack them: the nightly lives reach them.
"""


@pytest.mark.parametrize("seed", range(8))
def test_a_life_keeps_every_rule(seed: int) -> None:
    result = simulate(seed)
    assert result.violation is None, f"python -m tests.simulation --seed {seed} --trace"
    assert result.steps > 100


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_life_whose_writes_are_not_verified_keeps_every_rule(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is damaged reaches the bucket, and no engine."""
    monkeypatch.setattr(life, "VERIFY_WRITES", 0.0)
    often = ("memory damaged before it is written", "store slow")
    result = life.simulate(seed, often=often)
    assert result.violation is None, result.violation
    assert result.seen["counter writes_unverified"] > 0


def test_the_same_seed_is_the_same_life() -> None:
    first, again = simulate(3, trace=True), simulate(3, trace=True)
    assert first.lines == again.lines
    assert first.seen == again.seen


LIVES = (
    "from tests.simulation.life import simulate; "
    "print([simulate(seed).trace_hash for seed in (2, 15)])"
)
FAST_CLOCK = "import time; real = time.monotonic; time.monotonic = lambda: 1000 * real(); "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hash_seed", "script"),
    [("0", LIVES), ("12345", FAST_CLOCK + LIVES)],
    ids=["one hash seed", "another, and a fast clock"],
)
def test_a_life_does_not_depend_on_its_process(hash_seed: str, script: str) -> None:
    """Neither on how Python hashes strings, nor on real time, nor on what else ran there."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    )
    assert told.stdout.strip() == str([simulate(seed).trace_hash for seed in (2, 15)])


def test_a_life_can_be_followed_for_some_steps() -> None:
    part, whole = simulate(4, steps_max=300, trace=True), simulate(4, trace=True)
    assert part.steps == 300
    assert part.lines == whole.lines[: len(part.lines)]


@pytest.fixture(
    scope="module", params=[SEEDS, pytest.param(SEEDS_NIGHTLY, marks=pytest.mark.nightly)]
)
def seeds(request: pytest.FixtureRequest) -> int:
    """How many lives are lived."""
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def many_lives(seeds: int) -> dict[tuple[str, ...], Summary]:
    """On all cores, up to the first failure; by the faults that came often."""
    lives: dict[tuple[str, ...], Summary] = {(): search(range(seeds))}
    for often in DIRECTED:
        lives[often] = search(range(DIRECTED_SEEDS), often=often)
    return lives


@pytest.mark.promise("simulation")
@pytest.mark.slow
@pytest.mark.timeout(SEARCH_SECONDS_MAX)
def test_many_lives_keep_every_rule(seeds: int, many_lives: dict[tuple[str, ...], Summary]) -> None:
    for often, lives in many_lives.items():
        directed = "".join(f" --often '{fault}'" for fault in often)
        failed = lives.failed
        assert failed is None, (
            f"{failed.violation}; python -m tests.simulation --seed {failed.seed}{directed} --trace"
        )
        assert lives.seeds == (DIRECTED_SEEDS if often else seeds)


@pytest.mark.promise("simulation")
@pytest.mark.slow
@pytest.mark.timeout(SEARCH_SECONDS_MAX)
def test_many_lives_reach_every_situation(
    seeds: int, many_lives: dict[tuple[str, ...], Summary]
) -> None:
    expected = [one for one in SITUATIONS if seeds == SEEDS_NIGHTLY or one not in RARE]
    seen = {situation for lives in many_lives.values() for situation in +lives.seen}
    assert [situation for situation in expected if situation not in seen] == []


def test_rare_situations_are_situations() -> None:
    assert set(SITUATIONS) >= RARE
