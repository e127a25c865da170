"""Leases: one holder, taken over after its time, and never by comparing clocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers.catalog.bucket import Bucket, Killed, View
from tests.tiers.tier_suite import image_of
from tiers.catalog.lease import LEASE_SECONDS_MAX, LEASES_KEPT, CatalogLease
from tiers.catalog.names import LEASE_FOLDER, NUMBER_MAX, lease_name
from tiers.errors import TierUnavailable

if TYPE_CHECKING:
    from tiers.store.client import Bytes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lease(bucket: Bucket, clock: Clock, name: str = "one", steps: int = 1 << 30) -> CatalogLease:
    return CatalogLease(View(bucket, steps=steps), name, seconds=60.0, clock=clock)


async def test_one_holds_it_until_it_is_given_back() -> None:
    bucket, clock = Bucket(), Clock()
    one, two = lease(bucket, clock, "one"), lease(bucket, clock, "two")
    assert await one.acquire()
    assert one.held
    assert one.store_seconds == bucket.now
    assert not await two.acquire()
    assert two.other.holder == "one"
    await one.release()
    assert await two.acquire()
    assert [one.held, two.held] == [False, True]
    assert not await one.acquire()


@pytest.mark.promise("hostile-bucket")
@pytest.mark.parametrize("body", [b"", b"{", b'{"holder":"","seconds":1,"x":' + b"[" * 3000])
async def test_a_lease_that_cannot_be_read_expires_after_the_longest_time(body: bytes) -> None:
    """A nested one ended every sidecar of the bucket."""
    bucket, clock = Bucket(), Clock()
    bucket.objects[lease_name(7)] = body, bucket.now
    one = lease(bucket, clock)
    assert not await one.acquire()
    clock.now += LEASE_SECONDS_MAX
    assert await one.acquire()


async def test_a_holder_that_died_is_waited_for() -> None:
    bucket, clock = Bucket(), Clock()
    one, two = lease(bucket, clock), lease(bucket, clock, "two")
    assert await one.acquire()
    assert not await two.acquire()
    clock.now += 59
    assert not await two.acquire()
    clock.now += 2
    assert await two.acquire()
    # It was only slow, and finds out.
    assert not await one.renew()
    assert [one.held, two.held] == [False, True]


async def test_a_slow_holder_keeps_what_nobody_took() -> None:
    """One request of a large namespace may last longer than the lease."""
    bucket, clock = Bucket(), Clock()
    one, two = lease(bucket, clock), lease(bucket, clock, "two")
    assert await one.acquire()
    assert not await two.acquire()
    clock.now += 100
    held_before = one.held
    assert await one.renew()
    assert [held_before, one.held] == [False, True]
    assert not await two.acquire()


async def test_renewing_keeps_it() -> None:
    bucket, clock = Bucket(), Clock()
    one, two = lease(bucket, clock), lease(bucket, clock, "two")
    assert await one.acquire()
    for _ in range(10):
        clock.now += 30
        assert await one.renew()
        assert not await two.acquire()
    assert len(bucket.names(LEASE_FOLDER)) <= LEASES_KEPT


async def test_the_clock_of_the_holder_and_of_the_store_do_not_matter() -> None:
    bucket, clock, other = Bucket(), Clock(), Clock()
    other.now = 1e9
    bucket.now = 5.0
    one, two = lease(bucket, clock), lease(bucket, other, "two")
    assert await one.acquire()
    assert not await two.acquire()
    bucket.now = 1e12
    other.now += 30
    assert not await two.acquire()


async def test_a_damaged_lease_is_over_after_the_longest_time() -> None:
    bucket, clock = Bucket(), Clock()
    await View(bucket).write(lease_name(7), image_of(50))
    await View(bucket).write(f"{LEASE_FOLDER}/notes.txt", image_of(50))
    one = lease(bucket, clock)
    assert not await one.acquire()
    clock.now += 601
    assert await one.acquire()


@given(
    steps=st.lists(st.integers(0, 12), min_size=2, max_size=4),
    turns=st.lists(st.integers(0, 3), max_size=12),
)
@settings(deadline=None, max_examples=60)
def test_two_never_hold_it_at_once(steps: list[int], turns: list[int]) -> None:
    """Several try side by side, some are killed on the way; at most one holds it."""
    bucket, clock = Bucket(), Clock()
    contenders = [
        lease(bucket, clock, str(number), alive) for number, alive in enumerate(steps)
    ] + [lease(bucket, clock, "survivor")]

    async def one(contender: CatalogLease) -> None:
        try:
            await contender.acquire()
        except Killed:
            contender.generation = -1

    async def run() -> None:
        for turn in [*turns, 0]:
            async with anyio.create_task_group() as tasks:
                for contender in contenders:
                    if not contender.held:
                        tasks.start_soon(one, contender)
            assert sum(contender.held for contender in contenders) <= 1
            clock.now += 10.0 * turn

    anyio.run(run)


async def test_tries_at_once_have_one_winner() -> None:
    bucket, clock = Bucket(), Clock()
    contenders = [lease(bucket, clock, str(number)) for number in range(8)]
    won: list[bool] = []

    async def one(contender: CatalogLease) -> None:
        won.append(await contender.acquire())

    async with anyio.create_task_group() as tasks:
        for contender in contenders:
            tasks.start_soon(one, contender)
    assert won.count(True) == 1
    with pytest.raises(Killed):
        await lease(bucket, clock, steps=0).acquire()


async def test_a_try_of_its_own_that_seemed_to_fail_is_not_waited_for() -> None:
    """The object was made and the answer was lost: nobody else has it, and nobody is asked."""
    bucket, clock = Bucket(), Clock()
    tier = View(bucket, steps=1, after=True)
    one, two = CatalogLease(tier, "one", seconds=60.0, clock=clock), lease(bucket, clock, "two")
    with pytest.raises(Killed):
        await one.acquire()
    assert bucket.names(LEASE_FOLDER) == [lease_name(0)]
    assert [one.held, await two.acquire()] == [False, False]
    tier.steps = 1 << 30
    assert await one.acquire()
    assert [one.held, await two.acquire()] == [True, False]


async def test_an_answer_that_was_lost_below_is_no_others_lease() -> None:
    class Repeats(View):
        """Sends each write again, as a client does that got no answer."""

        async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
            await super().write(name, image, create=create)
            if name == lease_name(0):
                await super().write(name, image, create=create)

    bucket, clock = Bucket(), Clock()
    one = CatalogLease(Repeats(bucket), "one", seconds=60.0, clock=clock)
    assert await one.acquire()
    assert await one.renew(now=True)
    assert not await lease(bucket, clock, "two").acquire()


async def test_the_last_number_of_all_is_an_error_that_says_what_to_delete() -> None:
    bucket, clock = Bucket(), Clock()
    await View(bucket).write(lease_name(NUMBER_MAX), image_of(50))
    one = lease(bucket, clock)
    assert not await one.acquire()
    clock.now += 601
    with pytest.raises(
        TierUnavailable, match=f"{NUMBER_MAX} has the highest possible number.*delete it"
    ):
        await one.acquire()
    await View(bucket).delete([lease_name(NUMBER_MAX)])
    assert await one.acquire()
