"""Who goes to keep a namespace and its tenants within their bounds, and for what."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import places
from tests.tiers.catalog.kit import key
from tiers.catalog.merge import merged
from tiers.catalog.retention import (
    Ages,
    RetentionDecision,
    RetentionLimits,
    RetentionRules,
    TenantLimits,
)
from tiers.catalog.retention import (
    RetentionReason as Reason,
)
from tiers.catalog.rows import Row, Rows, rows_of
from tiers.catalog.usage import UNKNOWN_TENANT, cells_by_tenant, word_of

MINUTE = 60_000_000
NOW = 1_700_000_000.0
MICROS = int(NOW * 1e6)
A, B = b"tenant-a", b"tenant-b"


def chunk(number: int, minute: int, size_bytes: int = 10, tenant: bytes = b"") -> Row:
    return Row(key(number), "0-8.0-4", MICROS - minute * MINUTE, size_bytes, 1, tenant=tenant)


def number_of(row: Row) -> int:
    return int.from_bytes(row.key, "big")


def parts_of(rows: Rows, parts: int) -> list[Rows]:
    """Slices by key, all of a chunk in one."""
    slices = np.array([number_of(rows.row(at)) % parts for at in range(len(rows))])
    return [rows.take(slices == part) for part in range(parts)]


def fallen(rows: list[Row], bounds: RetentionRules, parts: int = 1) -> dict[int, Reason]:
    """Numbers of the keys that go, and what each falls to."""
    whole = merged(rows_of(rows))
    slices = parts_of(whole, parts)
    ages = Ages(bounds, NOW)
    for part in slices:
        ages.add(part)
    verdict = RetentionDecision(ages)
    found: dict[int, Reason] = {}
    for part in slices:
        for at, why in enumerate(verdict.reasons(part).tolist()):
            number = number_of(part.row(at))
            assert found.setdefault(number, Reason(why)) is Reason(why), "a chunk goes in parts"
    return {number: why for number, why in found.items() if why is not Reason.KEPT}


def gone(rows: list[Row], bounds: RetentionRules) -> set[int]:
    return set(fallen(rows, bounds))


TWO_TENANTS = [
    *[chunk(number, number, tenant=A) for number in range(1, 5)],
    *[chunk(number, number + 100, tenant=B) for number in range(11, 15)],
    *[chunk(number, number + 200) for number in range(21, 25)],
]


def found(number: int, minute: int, segment: str = "0-8.0-4") -> Row:
    """As a listing finds an object."""
    row = chunk(number, minute)
    return row._replace(segment=segment, num_blocks=0)


def test_what_a_listing_found_stays_no_longer_than_any_tenant_lets_its_own() -> None:
    """It may be of each of them. It counts for none, so that none is at its limit for it."""
    rows = [found(1, 59), found(2, 61), chunk(3, 61), chunk(4, 300, 10)]
    for named in ({A: RetentionLimits(3600)}, {A: RetentionLimits(3600), B: RetentionLimits(7200)}):
        rules = RetentionRules(tenant=RetentionLimits(14_400, objects_max=1), named=named)
        reason = Reason.TENANT_TTL
        assert fallen(rows, rules) == {2: reason, 4: reason}
    assert not fallen(rows, RetentionRules(tenant=RetentionLimits(objects_max=2)))
    limited = RetentionRules(tenant=RetentionLimits(size_bytes_max=10))
    assert fallen(rows, limited) == {4: Reason.TENANT_SIZE}
    assert list(fallen(rows[:3], RetentionRules(size_bytes_max=20)).values()) == [Reason.SIZE]


@pytest.mark.parametrize("tenant", [b"", A])
def test_other_segments_tell_the_tenant_of_what_a_listing_found(tenant: bytes) -> None:
    rows = [chunk(1, 61, tenant=tenant), found(1, 61, "8-8.0-4")]
    assert not fallen(rows, RetentionRules(named={B: RetentionLimits(3600)}))
    assert gone(rows, RetentionRules(named={tenant: RetentionLimits(3600)})) == {1}
    assert cells_by_tenant(rows_of(rows)).tenants.tolist() == sorted(
        [word_of(tenant), word_of(UNKNOWN_TENANT)]
    )


def test_no_bound_takes_nothing() -> None:
    assert gone([chunk(1, 10_000)], RetentionRules()) == set()
    assert gone([], RetentionRules(ttl_seconds=1, size_bytes_max=1, objects_max=1)) == set()


def test_ttl_of_a_namespace_takes_what_is_too_old_and_what_comes_from_the_future() -> None:
    rows = [chunk(1, 59), chunk(2, 61), chunk(3, -100), chunk(4, -2000)]
    expected = {2: Reason.TTL, 4: Reason.CLOCK}
    assert fallen(rows, RetentionRules(ttl_seconds=3600)) == expected


def test_ttl_of_a_tenant_takes_its_own() -> None:
    named = {A: RetentionLimits(ttl_seconds=150.0), b"": RetentionLimits()}
    bounds = RetentionRules(tenant=RetentionLimits(ttl_seconds=112.5 * 60), named=named)
    # A's third minute is over, B has the default, and those without a salt have no limit.
    expected = dict.fromkeys((3, 4, 13, 14), Reason.TENANT_TTL)
    assert fallen(TWO_TENANTS, bounds) == expected
    assert fallen([chunk(1, -2000, tenant=A), chunk(2, -2000)], bounds) == {1: Reason.CLOCK}


def test_the_lesser_of_two_ttls_holds() -> None:
    rows = [chunk(1, 5, tenant=A), chunk(2, 30, tenant=A), chunk(3, 90, tenant=A)]
    bounds = RetentionRules(ttl_seconds=3600, named={A: RetentionLimits(ttl_seconds=600)})
    assert fallen(rows, bounds) == {2: Reason.TENANT_TTL, 3: Reason.TTL}
    bounds = RetentionRules(ttl_seconds=3600, named={A: RetentionLimits(ttl_seconds=86_400)})
    assert fallen(rows, bounds) == {3: Reason.TTL}


def test_bytes_of_a_namespace_take_the_oldest_until_the_rest_fits() -> None:
    rows = [chunk(number, minute=number) for number in range(1, 8)]
    assert fallen(rows, RetentionRules(size_bytes_max=30)) == dict.fromkeys(
        (4, 5, 6, 7), Reason.SIZE
    )


def test_objects_of_a_namespace_take_the_oldest_until_the_rest_fits() -> None:
    rows = [chunk(number, minute=number) for number in range(1, 8)]
    assert fallen(rows, RetentionRules(objects_max=3)) == dict.fromkeys(
        (4, 5, 6, 7), Reason.OBJECTS
    )


def test_bytes_of_a_tenant_cost_only_itself() -> None:
    named = {A: RetentionLimits(size_bytes_max=20), b"": RetentionLimits(size_bytes_max=30)}
    assert fallen(TWO_TENANTS, RetentionRules(named=named)) == dict.fromkeys(
        (3, 4, 24), Reason.TENANT_SIZE
    )


def test_objects_of_a_tenant_cost_only_itself() -> None:
    bounds = RetentionRules(
        tenant=RetentionLimits(objects_max=3), named={A: RetentionLimits(objects_max=1)}
    )
    expected = dict.fromkeys((2, 3, 4, 14, 24), Reason.TENANT_OBJECTS)
    assert fallen(TWO_TENANTS, bounds) == expected


def test_what_goes_for_one_bound_makes_room_under_the_others() -> None:
    rows = [chunk(number, minute=number, tenant=A if number < 4 else B) for number in range(1, 9)]
    # Three of A's go although they are the newest, and so none of B's must.
    bounds = RetentionRules(size_bytes_max=60, named={A: RetentionLimits(objects_max=1)})
    assert fallen(rows, bounds) == dict.fromkeys((2, 3), Reason.TENANT_OBJECTS)
    bounds = RetentionRules(ttl_seconds=7.5 * 60, size_bytes_max=60)
    assert fallen(rows, bounds) == {8: Reason.TTL, 7: Reason.SIZE}


def test_of_one_minute_no_more_than_needed_goes() -> None:
    rows = [chunk(number, minute=5) for number in range(1, 8)]
    assert len(gone(rows, RetentionRules(size_bytes_max=65))) == 1
    assert len(gone(rows, RetentionRules(objects_max=5))) == 2


def test_a_chunk_goes_whole_and_is_as_old_as_its_newest_segment() -> None:
    old, new = MICROS - 100 * MINUTE, MICROS - MINUTE
    rows = [
        Row(key(1), "0-8.0-4", old, 10, 1, tenant=A),
        Row(key(1), "0-8.4-8", new, 10, 1),
        Row(key(2), "0-8.0-4", old, 10, 1),
        Row(key(2), "0-8.4-8", old, 10, 1),
    ]
    assert gone(rows, RetentionRules(ttl_seconds=3600)) == {2}
    # The rows of a chunk are one tenant's, although the store's own row does not say whose.
    assert gone(rows, RetentionRules(named={A: RetentionLimits(size_bytes_max=15)})) == {1}
    assert gone(rows, RetentionRules(size_bytes_max=20)) == {2}


class Made(NamedTuple):
    """A chunk as the model has it."""

    number: int
    minute: int
    size_bytes: int
    segments: int
    tenant: bytes


def by_rule(chunks: list[Made], bounds: RetentionRules) -> dict[int, Reason]:
    """Who goes, chunk by chunk."""
    found: dict[int, Reason] = {}

    def old(one: Made, ttl_seconds: float | None) -> bool:
        return ttl_seconds is not None and one.minute * 60 > ttl_seconds

    limits = TenantLimits(bounds)
    for one in chunks:
        if old(one, bounds.ttl_seconds):
            found[one.number] = Reason.TTL
        elif old(one, limits.of(word_of(one.tenant)).ttl_seconds):
            found[one.number] = Reason.TENANT_TTL

    def trim(scope: list[Made], most: RetentionLimits, kinds: tuple[Reason, Reason]) -> None:
        left = sorted((one for one in scope if one.number not in found), key=lambda one: one.minute)
        amounts = ([one.size_bytes for one in left], [one.segments for one in left])
        limit = (most.size_bytes_max, most.objects_max)
        for kind, cap, amount in zip(kinds, limit, amounts, strict=True):
            kept = len(left)
            while cap is not None and sum(amount[:kept]) > cap:
                kept -= 1
            for one in left[kept:]:
                found.setdefault(one.number, kind)

    for tenant in (b"", A, B):
        own = [one for one in chunks if one.tenant == tenant]
        trim(own, limits.of(word_of(tenant)), (Reason.TENANT_SIZE, Reason.TENANT_OBJECTS))
    trim(chunks, bounds, (Reason.SIZE, Reason.OBJECTS))
    return found


limits = st.builds(
    RetentionLimits,
    ttl_seconds=st.none() | st.integers(1, 20).map(lambda minutes: minutes * 60.0 + 30.0),
    size_bytes_max=st.none() | st.integers(1, 40),
    objects_max=st.none() | st.integers(1, 20),
)
some_bounds = st.builds(
    lambda own, tenant, named: RetentionRules(
        own.ttl_seconds, own.size_bytes_max, own.objects_max, tenant, named
    ),
    limits,
    limits,
    st.dictionaries(st.sampled_from([b"", A, B]), limits, max_size=3),
)
some_chunks = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 2), st.sampled_from([b"", A, B])), max_size=20
).flatmap(
    lambda made: st.permutations(range(len(made))).map(
        lambda minutes: [
            Made(number, minute, size * segments, segments, tenant)
            for number, (minute, (size, segments, tenant)) in enumerate(
                zip(minutes, made, strict=True)
            )
        ]
    )
)


def rows_of_made(chunks: list[Made]) -> list[Row]:
    return [
        Row(
            key(one.number),
            f"0-8.{part}-4",
            MICROS - one.minute * MINUTE,
            one.size_bytes // one.segments,
            1,
            tenant=one.tenant,
        )
        for one in chunks
        for part in range(one.segments)
    ]


@given(chunks=some_chunks, bounds=some_bounds, parts=st.integers(1, 3))
def test_the_verdict_is_that_of_a_loop_over_chunks(
    chunks: list[Made], bounds: RetentionRules, parts: int
) -> None:
    assert fallen(rows_of_made(chunks), bounds, parts) == by_rule(chunks, bounds)


@pytest.mark.parametrize("cells_max", [2, 8, 1000])
def test_very_many_ages_are_told_apart_less_finely_and_bounds_hold(
    cells_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "CELLS_MAX", cells_max)
    places.patch(monkeypatch, "JOIN_CELLS_MIN", 4)
    rows = [chunk(number, number % 97, tenant=A if number % 2 else B) for number in range(200)]
    bounds = RetentionRules(
        named={A: RetentionLimits(size_bytes_max=355), B: RetentionLimits(objects_max=40)}
    )
    went = gone_by_tenant(rows, bounds)
    assert went == {A: 65, B: 60}
    assert len(gone(rows, RetentionRules(objects_max=150))) == 50


def gone_by_tenant(rows: list[Row], bounds: RetentionRules) -> dict[bytes, int]:
    went = fallen(rows, bounds, parts=7)
    owners = {number_of(row): row.tenant for row in rows}
    return {tenant: sum(owners[one] == tenant for one in went) for tenant in (A, B)}
