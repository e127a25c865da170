"""When a lease ends, and that it takes its pins with it."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sidecar.core.commands import SessionClosed
from sidecar.core.directory import Chunk, Directory, Realm
from sidecar.core.fair_share import FairShares, ShareLimits
from sidecar.core.pins import EARLY_ENGINES_MAX, EARLY_JOBS_PER_ENGINE_MAX, Leases, Pins
from sidecar.protocol import Role
from tests.sidecar.engine_names import key
from tests.sidecar.strict_pool import StrictLRU
from tests.sidecar.worlds import no_writes
from tiers.policy.key import CacheKey

ENGINE = (0, "engine")


def job(job_id: int) -> tuple[int, str, int]:
    return (*ENGINE, job_id)


def leases_in(directory: Directory) -> Leases:
    shares = FairShares(ShareLimits())
    pins = Pins(directory, shares.pinned)
    return Leases(pins, shares, ttl_seconds_max=10.0)


def held(leases: Leases, session_id: int) -> int:
    return sum(lease.session_id == session_id for lease in leases)


def realm_in(directory: Directory) -> Realm:
    realm = directory.open_realm(0, 2)
    realm.slot_bytes = [1, 1]
    return realm


@pytest.fixture
def directory() -> Directory:
    return Directory(readable=True)


@pytest.fixture
def realm(directory: Directory) -> Realm:
    return realm_in(directory)


@pytest.fixture
def leases(directory: Directory) -> Leases:
    return leases_in(directory)


@pytest.fixture
def chunks(directory: Directory, realm: Realm) -> list[Chunk]:
    return [directory.open_chunk(realm, bytes([number]) * 32) for number in range(3)]


def test_lease_ends_with_its_last_rank(leases: Leases, chunks: list[Chunk], realm: Realm) -> None:
    leases.take(1, job(5), chunks[:2], 2, 0.0)
    assert [chunk.pins for chunk in chunks] == [1, 1, 0]
    leases.rank_finished(job(5), 0, 2)
    leases.rank_finished(job(5), 0, 2)
    leases.rank_finished((0, "other", 5), 1, 2)
    assert len(leases) == 1
    leases.rank_finished(job(5), 1, 2)
    assert len(leases) == 0
    # Without a slot and without a pin there is no reason to keep a chunk.
    assert list(realm.chunks.values()) == chunks[2:]


@pytest.mark.parametrize("early", [(0,), (0, 1)])
def test_ranks_that_finished_before_the_lease_count(
    leases: Leases, chunks: list[Chunk], early: tuple[int, ...]
) -> None:
    for rank in early:
        leases.rank_finished(job(5), rank, 2)
    leases.take(1, job(5), chunks, 2, 0.0)
    if len(early) == 1:
        assert held(leases, 1) == 1
        leases.rank_finished(job(5), 1, 2)
    assert held(leases, 1) == 0
    assert not any(chunk.pins for chunk in chunks)


def test_early_ranks_are_bounded_and_end_with_their_engine(
    leases: Leases, chunks: list[Chunk]
) -> None:
    for job_id in range(EARLY_JOBS_PER_ENGINE_MAX + 1):
        leases.rank_finished(job(job_id), 0, 1)
    leases.take(1, job(0), chunks, 1, 0.0)
    assert held(leases, 1) == 1
    leases.close_session(1, ENGINE)
    leases.take(2, job(7), chunks, 1, 0.0)
    assert held(leases, 2) == 1


@pytest.mark.promise("share-of-finished")
def test_an_engine_that_floods_pushes_out_its_own_early_ranks_only(
    leases: Leases, chunks: list[Chunk]
) -> None:
    leases.rank_finished((0, "quiet", 1), 0, 1)
    for job_id in range(10_000):
        leases.rank_finished((0, "flood", job_id), 0, 1)
    leases.take(1, (0, "quiet", 1), chunks, 1, 0.0)
    assert held(leases, 1) == 0, "it had finished already"
    for number in range(EARLY_ENGINES_MAX + 1):
        leases.rank_finished((0, f"engine {number}", 1), 0, 1)
    leases.take(1, (0, "flood", 9_999), chunks, 1, 0.0)
    assert held(leases, 1) == 1, "forgotten: there are only so many engines"


def test_same_id_again_replaces(leases: Leases, chunks: list[Chunk]) -> None:
    leases.take(1, job(5), chunks[:2], 2, 0.0)
    leases.take(1, job(5), chunks[1:], 2, 5.0)
    assert [chunk.pins for chunk in chunks] == [0, 1, 1]
    assert held(leases, 1) == 1
    assert leases.expire(10.0) == 0
    assert leases.expire(15.0) == 1


@pytest.mark.promise("leases-expire")
def test_leases_expire_in_order(leases: Leases, chunks: list[Chunk]) -> None:
    for second in range(3):
        leases.take(1, job(second), chunks, 2, float(second))
    assert leases.expire(9.9) == 0
    assert leases.expire(11.0) == 2
    assert [lease.lease_id for lease in leases] == [2]


def test_release_and_close_touch_only_their_session(leases: Leases, chunks: list[Chunk]) -> None:
    for session_id in (1, 2):
        leases.take(session_id, job(5), chunks, 2, 0.0)
    leases.release(1, 4)
    leases.release(1, 5)
    leases.release(1, 5)
    assert (held(leases, 1), held(leases, 2)) == (0, 1)
    leases.close_session(2, ENGINE)
    assert len(leases) == 0


EVENTS = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 2), st.integers(0, 2)),
    st.tuples(st.just("finish"), st.integers(0, 1), st.integers(0, 2)),
    st.tuples(st.just("release"), st.integers(1, 2), st.integers(0, 2)),
    st.tuples(st.just("close"), st.integers(1, 2), st.just(0)),
    st.tuples(st.just("wait"), st.integers(0, 8), st.just(0)),
)


@given(st.lists(EVENTS, max_size=40))
def test_pins_are_those_of_the_leases(steps: list[tuple[str, int, int]]) -> None:
    directory = Directory(readable=True)
    realm = realm_in(directory)
    leases = leases_in(directory)
    now = 0.0
    for kind, who, job_id in steps:
        match kind:
            case "take":
                keys = [bytes([number]) * 32 for number in range(job_id + 1)]
                chunks = [directory.open_chunk(realm, key) for key in keys]
                leases.take(who, job(job_id), chunks, 2, now)
            case "finish":
                leases.rank_finished(job(job_id), who, 2)
            case "release":
                leases.release(who, job_id)
            case "close":
                leases.close_session(who, ENGINE)
            case _:
                now += who
                leases.expire(now)
        assert all(lease.deadline > now for lease in leases)
        assert sum(held(leases, session_id) for session_id in (1, 2)) == len(leases)
        listed = [chunk for lease in leases for chunk in lease.chunks]
        for chunk in realm.chunks.values():
            assert chunk.pins == listed.count(chunk) > 0


@pytest.mark.promise("old-jobs-leases")
def test_jobs_of_an_earlier_life_do_not_end_the_leases_of_the_next() -> None:
    """A copy may end after its engine's scheduler is gone; the next one counts from 1 again."""
    world = no_writes()
    life = [world.open(role) for role in (Role.WORKER, Role.SCHEDULER)]
    world.stored(life[0], 8, [1])
    world.load(life[0], 9, [1])
    (scatter,) = world.scatters.values()
    world.send(SessionClosed(life[1]))
    world.copied(scatter.copy_id)
    world.send(SessionClosed(life[0]))
    next_life = [world.open(role) for role in (Role.WORKER, Role.SCHEDULER)]
    world.lease(next_life[1], 9, [1])
    assert len(world.engine.leases) == 1


def test_leased_chunks_are_stepped_over_once_for_all_slots_of_a_store() -> None:
    """A search for each slot began again at the cold end, and copied the policy's order."""

    class Counting(StrictLRU):
        steps = 0

        def victims(self) -> Iterator[CacheKey]:
            for found in super().victims():
                self.steps += 1
                yield found

    policy = Counting()
    world = no_writes(slabs=40, policy=policy)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, range(1, 41))
    world.lease(scheduler, 1, range(1, 31))
    policy.steps = 0
    world.store(worker, 2, range(50, 60))
    assert world.engine.counters.chunks_evicted == 10
    # The world itself has walked over all 40, to check the order.
    # Two searches: for the coldest, and for the coldest of the size.
    assert policy.steps < 40 + 4 * 30


def test_more_than_a_thousand_chunks_of_requests_that_wait_hide_no_victim() -> None:
    """Requests that came back after a long time: what they lease is the coldest of all."""
    world = no_writes(slabs=1, slab_slots=1600)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    prompts = [range(first, first + 400) for first in range(400, 2000, 400)]
    for prompt in prompts:
        world.stored(worker, prompt.start, prompt)
    for prompt in prompts[:3]:
        world.lease(scheduler, prompt.start, prompt)
    realm = world.engine.directory.realms[0]
    assert sum(chunk.pins > 0 for chunk in realm.chunks.values()) == 1200
    world.stored(worker, 1, [5])
    assert (0, key(5)) in world.in_host()
