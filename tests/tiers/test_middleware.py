"""Wrappers: each keeps the contract, and does its one thing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import pytest

from tests.tiers.scripted import Scripted, later, memory, no_sleep
from tests.tiers.tier_suite import NAME, TierSuite, image_of, sized, slot
from tiers.errors import ChunkMissing, TierFull, TierUnavailable
from tiers.store.client import Found
from tiers.store.middleware import (
    Billed,
    ConcurrencyLimited,
    Deadline,
    Metered,
    RateLimited,
    Retrying,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from tiers.store.client import Bytes, Seen


class TestEverythingStacked(TierSuite):
    @pytest.fixture
    async def tier(self) -> AsyncGenerator[Metered]:
        limited = ConcurrencyLimited(memory(), writes_max=2, reads_max=2)
        tier = Metered(Retrying(Deadline(limited, seconds_max=60.0)), billed=Billed(limited))
        yield tier
        await tier.close()


class TestRetrying:
    async def test_a_retry_revokes_what_seen_reported(self) -> None:
        """The second try may tell nothing, and then nobody has seen what lies in the slot."""

        class Telling(Scripted):
            async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
                if not self.calls and seen is not None:
                    seen(7, 0, 7)
                return await super().read(name, into, seen=seen)

        told: list[tuple[int, int, int]] = []

        def seen(size_bytes: int, first: int, last: int) -> None:
            told.append((size_bytes, first, last))

        tier = Retrying(Telling([later()]), attempts_max=4, sleep=no_sleep)
        assert await tier.read(NAME, slot(), seen=seen) == 7
        assert told == [(7, 0, 7), (0, 0, 0)]

    @pytest.mark.parametrize("failures", [0, 1, 3])
    async def test_retryable_errors_are_retried(self, failures: int) -> None:
        inner = Scripted([later()] * failures)
        tier = Retrying(inner, attempts_max=4, sleep=no_sleep)
        assert await tier.read(NAME, slot()) == 7
        assert inner.calls == ["read"] * (failures + 1)
        assert sum(tier.retried.values()) == failures

    async def test_attempts_have_a_limit(self) -> None:
        inner = Scripted([later()] * 10)
        with pytest.raises(TierUnavailable, match="busy"):
            await Retrying(inner, attempts_max=4, sleep=no_sleep).write(NAME, image_of(10))
        assert inner.calls == ["write"] * 4

    @pytest.mark.parametrize(
        "error",
        [
            TierUnavailable("no bucket", retryable=False),
            TierFull("full"),
            ChunkMissing("gone"),
            ValueError("name"),
        ],
    )
    async def test_other_errors_are_not_retried(self, error: Exception) -> None:
        inner = Scripted([error])
        with pytest.raises(type(error)):
            await Retrying(inner, sleep=no_sleep).read(NAME, slot())
        assert inner.calls == ["read"]

    async def test_probe_and_close_are_not_retried(self) -> None:
        inner = Scripted([later(), later()])
        tier = Retrying(inner, sleep=no_sleep)
        with pytest.raises(TierUnavailable):
            await tier.probe()
        with pytest.raises(TierUnavailable):
            await tier.close()
        assert inner.calls == ["probe", "close"]

    async def test_pauses_grow_and_have_a_limit_and_a_seed(self) -> None:
        class Highest(random.Random):
            def uniform(self, a: float, b: float) -> float:
                return b

        async def pauses(rng: random.Random) -> list[float]:
            slept: list[float] = []

            async def sleep(seconds: float) -> None:
                slept.append(seconds)

            tier = Retrying(
                Scripted([later()] * 5),
                attempts_max=6,
                pause_seconds=0.1,
                pause_seconds_max=1.0,
                rng=rng,
                sleep=sleep,
            )
            await tier.write(NAME, image_of(10))
            return slept

        assert await pauses(Highest()) == [0.1, 0.2, 0.4, 0.8, 1.0]
        seeded = await pauses(random.Random(1))
        assert seeded == await pauses(random.Random(1))
        ceilings = (0.1, 0.2, 0.4, 0.8, 1.0)
        assert all(0 <= pause <= most for pause, most in zip(seeded, ceilings, strict=True))

    async def test_many_attempts_do_not_overflow(self) -> None:
        tier = Retrying(Scripted([later()] * 2000), attempts_max=2001, sleep=no_sleep)
        await tier.write(NAME, image_of(10))


class TestDeadline:
    async def test_a_call_that_takes_too_long_is_ended(self) -> None:
        inner = Scripted()
        inner.gate = anyio.Event()
        tier = Deadline(inner, seconds_max=0.01)
        with pytest.raises(TierUnavailable, match=r"read scripted://here/v1.* 0\.01 s") as info:
            await tier.read(NAME, slot())
        assert info.value.retryable
        assert inner.running == 0
        with pytest.raises(TierUnavailable, match="close scripted://here: "):
            await tier.close()

    async def test_each_part_of_a_deletion_has_its_own_deadline(self) -> None:
        parts: list[Sequence[str]] = []

        class Slow(Scripted):
            async def delete(self, names: Sequence[str]) -> None:
                await anyio.sleep(0.02 * len(names))
                parts.append(names)

        tier = Deadline(Slow(), seconds_max=60, deleted_together_max=2)
        await tier.delete(["a", "b", "c"])
        assert parts == [["a", "b"], ["c"]]

    async def test_a_call_in_time_is_unchanged(self) -> None:
        tier = Deadline(Scripted([None, later(), TimeoutError("its own")]), seconds_max=60)
        assert await tier.list("") == [Found("a", 1, 0.0)]
        with pytest.raises(TierUnavailable, match="busy"):
            await tier.list("")
        with pytest.raises(TimeoutError, match="its own"):
            await tier.list("")

    async def test_an_outer_cancel_is_not_a_deadline(self) -> None:
        inner = Scripted()
        inner.gate = anyio.Event()
        with anyio.move_on_after(0.01) as scope:
            await Deadline(inner, seconds_max=60).read(NAME, slot())
        assert scope.cancelled_caught

    async def test_each_attempt_has_its_own_deadline(self) -> None:
        inner = Scripted()
        inner.gate = anyio.Event()
        tier = Retrying(Deadline(inner, seconds_max=0.01), attempts_max=3, sleep=no_sleep)
        with pytest.raises(TierUnavailable):
            await tier.read(NAME, slot())
        assert inner.calls == ["read"] * 3
        assert inner.running_max == 1


class TestConcurrencyLimited:
    async def test_reads_and_writes_have_separate_limits(self) -> None:
        inner = Scripted()
        inner.gate = anyio.Event()
        tier = ConcurrencyLimited(inner, writes_max=2, reads_max=3)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(tier.write, NAME, image_of(10))
                tasks.start_soon(tier.quarantine, NAME)
            await anyio.wait_all_tasks_blocked()
            assert inner.running == 2
            for _ in range(5):
                tasks.start_soon(tier.read, NAME, slot())
                tasks.start_soon(tier.list, "")
            await anyio.wait_all_tasks_blocked()
            assert inner.running == 5
            tasks.start_soon(tier.probe)
            await anyio.wait_all_tasks_blocked()
            assert inner.running == 6
            inner.gate.set()
        assert len(inner.calls) == 21
        assert inner.running_max == 6

    async def test_a_failed_or_cancelled_call_frees_its_place(self) -> None:
        inner = Scripted([later()])
        tier = ConcurrencyLimited(inner, writes_max=1, reads_max=1)
        with pytest.raises(TierUnavailable):
            await tier.read(NAME, slot())
        inner.gate = anyio.Event()
        with anyio.move_on_after(0.01):
            await tier.read(NAME, slot())
        inner.gate.set()
        assert await tier.read(NAME, slot()) == 7


class TestMetered:
    async def test_it_counts_calls_bytes_seconds_and_failures(self) -> None:
        ticks = iter(range(100))
        inner = Scripted([None, None, later(), ChunkMissing("gone"), ChunkMissing("gone")])
        tier = Metered(inner, billed=Billed(inner), clock=lambda: float(next(ticks)))
        await tier.write(NAME, image_of(1000))
        await tier.read(NAME, slot())
        for verb in (tier.write(NAME, image_of(10)), tier.read(NAME, slot())):
            with pytest.raises((TierUnavailable, ChunkMissing)):
                await verb
        with pytest.raises(ChunkMissing):
            await tier.read(NAME, slot())
        counts = tier.counts
        assert (counts["write"].calls, counts["write"].succeeded) == (2, 1)
        assert counts["write"].num_bytes == 1000
        assert counts["write"].seconds == 2.0
        assert counts["write"].failures == {"other": 1}
        assert (counts["read"].calls, counts["read"].num_bytes) == (3, 7)
        assert counts["read"].failures == {"missing": 2}
        assert counts["list"].calls == 0
        assert all(count.inflight == 0 for count in counts.values())

    async def test_it_counts_calls_in_flight_and_cancelled_ones(self) -> None:
        inner = Scripted()
        inner.gate = anyio.Event()
        tier = Metered(inner, billed=Billed(inner))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tier.list, "")
            await anyio.wait_all_tasks_blocked()
            assert tier.counts["list"].inflight == 1
            tasks.cancel_scope.cancel()
        assert tier.counts["list"].inflight == 0
        assert tier.counts["list"].failures == {"cancelled": 1}


async def test_retries_are_counted_by_cause() -> None:
    busy = TierUnavailable("busy", retryable=True, cause="busy")
    retrying = Retrying(Scripted([busy, busy, later()]), attempts_max=4, sleep=no_sleep)
    tier = Metered(retrying, retried=retrying.retried, billed=Billed(retrying))
    await tier.read(NAME, slot())
    assert tier.retried == {"busy": 2, "other": 1}
    assert tier.counts["read"].failures == {}
    assert Metered(memory(), billed=Billed(memory())).retried == {}


class TestRateLimited:
    async def test_it_keeps_the_contract_of_a_wrapper(self) -> None:
        tier = RateLimited(memory(), requests_per_second_max=10_000)
        await tier.write(NAME, image_of(10))
        assert sized(await tier.list("")) == [(NAME, 10)]
        assert await tier.read(NAME, slot()) == 10
        await tier.delete([NAME])
        assert await tier.list("") == []
        await tier.close()

    async def test_requests_begin_evenly_and_in_order(self) -> None:
        begun: list[tuple[float, str]] = []
        now = 100.0

        class Noting(Scripted):
            async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
                begun.append((now, name))
                return 1

        async def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        tier = RateLimited(Noting(), requests_per_second_max=4, clock=lambda: now, sleep=sleep)
        for name in "abc":
            await tier.read(name, slot())
        now += 10.0
        for name in "def":
            await tier.read(name, slot())
        assert begun == [
            (100.0, "a"), (100.25, "b"), (100.5, "c"), (110.5, "d"), (110.75, "e"), (111.0, "f"),
        ]  # fmt: skip

    async def test_a_deletion_is_a_request_for_each_name(self) -> None:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        tier = RateLimited(Scripted(), requests_per_second_max=10, clock=lambda: 0.0, sleep=sleep)
        await tier.delete(["a", "b", "c"])
        await tier.list("")
        assert slept == pytest.approx([0.1, 0.2, 0.3])
        await tier.close()
        assert len(slept) == 3

    async def test_a_deletion_of_many_names_in_a_request_is_one(self) -> None:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        tier = RateLimited(
            Scripted(),
            requests_per_second_max=10,
            names_per_removal=2,
            clock=lambda: 0.0,
            sleep=sleep,
        )
        await tier.delete(["a", "b"])
        assert slept == []
        await tier.delete(["a", "b", "c"])
        assert slept == pytest.approx([0.1, 0.2])

    async def test_a_deletion_lets_other_calls_in_between(self) -> None:
        now = 0.0
        begun: list[float] = []
        tier: RateLimited

        class Noting(Scripted):
            async def _step(self, verb: str) -> None:
                if verb == "list":
                    begun.append(now)
                await super()._step(verb)

        async def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds
            if not begun:
                begun.append(-1.0)
                await tier.list("")

        tier = RateLimited(Noting(), requests_per_second_max=1, clock=lambda: now, sleep=sleep)
        await tier.delete([f"n{number}" for number in range(50)])
        assert begun[1] <= 3.0

    async def test_concurrent_deletions_alternate(self) -> None:
        inner = Scripted()
        tier = RateLimited(inner, requests_per_second_max=1000)
        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(tier.list, "")
        assert anyio.current_time() - start >= 0.019
        assert len(inner.calls) == 20
