"""Wrappers: each keeps the contract, and does its one thing."""

from __future__ import annotations

import random
import secrets
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from tests.faulty_tier import FaultRates, Faulty
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
from tiers.store.object_tier import Abilities, UrlObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from tiers.store.client import Bytes, Listing, Seen


def memory() -> UrlObjects:
    return UrlObjects(f"memory://{secrets.token_hex(6)}")


async def no_sleep(seconds: float) -> None:
    await anyio.lowlevel.checkpoint()


class Scripted:
    """Raises what its script says, one entry for each call; None succeeds, as does its end."""

    def __init__(self, script: Sequence[Exception | None] = ()) -> None:
        self._script = list(script)
        self.calls: list[str] = []
        self.running = 0
        self.running_max = 0
        self.gate = anyio.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return "scripted://here"

    async def _step(self, verb: str) -> None:
        self.calls.append(verb)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await self.gate.wait()
            await anyio.lowlevel.checkpoint()
        finally:
            self.running -= 1
        error = self._script.pop(0) if self._script else None
        if error is not None:
            raise error

    async def probe(self) -> Abilities:
        await self._step("probe")
        return Abilities(creates=True)

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        await self._step("write")

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        await self._step("read")
        return 7

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        await self._step("list")
        return [Found("a", 1, 0.0)]

    async def delete(self, names: Sequence[str]) -> None:
        await self._step("delete")

    async def quarantine(self, name: str) -> None:
        await self._step("quarantine")

    async def close(self) -> None:
        await self._step("close")


def later() -> TierUnavailable:
    return TierUnavailable("busy", retryable=True)


class TestEverythingStacked(TierSuite):
    @pytest.fixture
    async def tier(self) -> AsyncGenerator[Metered]:
        limited = ConcurrencyLimited(memory(), writes_max=2, reads_max=2)
        tier = Metered(Retrying(Deadline(limited, seconds_max=60.0)), billed=Billed(limited))
        yield tier
        await tier.close()


class TestStackedOverFaults(TierSuite):
    """Faults that a retry can mend are invisible above it."""

    tells = False

    @pytest.fixture
    async def tier(self) -> AsyncGenerator[Retrying]:
        # The probe is not retried, so it is spared: half of all other calls fail.
        class ProbeSpared(Faulty):
            async def probe(self) -> Abilities:
                return await self._inner.probe()

        rates = FaultRates(unavailable=0.3, answer_lost=0.3, stall=0.5)
        faulty = ProbeSpared(memory(), seed=5, rates=rates, sleep=no_sleep)
        tier = Retrying(faulty, attempts_max=50, sleep=no_sleep)
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


class TestFaulty:
    async def run_through(self, seed: int, order: Sequence[int]) -> dict[int, list[str]]:
        """What happened to each of several names, called in `order`."""
        rates = FaultRates(
            unavailable=0.2, answer_lost=0.2, missing=0.2, corrupt=0.2, truncated=0.2
        )
        inner = memory()
        for name in set(order):
            await inner.write(f"n/{name}", image_of(1000))
        tier = Faulty(inner, seed=seed, rates=rates)
        story: dict[int, list[str]] = {}
        for name in order:
            into = slot()
            try:
                size_bytes = await tier.read(f"n/{name}", into)
            except (TierUnavailable, ChunkMissing) as error:
                what = str(error)
            else:
                changed = np.flatnonzero(into[:1000] != image_of(1000))
                what = f"{size_bytes} {changed.tolist()}"
            story.setdefault(name, []).append(what.rpartition("/")[2])
        return story

    async def test_a_seed_replays_in_any_order(self) -> None:
        order = [name for name in range(8) for _ in range(6)]
        story = await self.run_through(3, order)
        assert story == await self.run_through(3, order)
        shuffled = order.copy()
        random.Random(0).shuffle(shuffled)
        assert story == await self.run_through(3, shuffled)
        assert story != await self.run_through(4, order)

    @pytest.mark.parametrize("fault", ["unavailable", "answer_lost", "missing"])
    async def test_faults_that_raise(self, fault: str) -> None:
        inner = memory()
        await inner.write(NAME, image_of(1000))
        tier = Faulty(inner, seed=1, rates=FaultRates(**{fault: 1.0}))
        with pytest.raises((TierUnavailable, ChunkMissing), match="seed 1"):
            await tier.read(NAME, slot())
        assert tier.injected == {fault: 1}

    async def test_a_call_whose_answer_is_lost_was_carried_out(self) -> None:
        inner = memory()
        tier = Faulty(inner, seed=1, rates=FaultRates(answer_lost=1.0))
        with pytest.raises(TierUnavailable, match="carried out"):
            await tier.write(NAME, image_of(10))
        assert sized(await inner.list("")) == [(NAME, 10)]
        tier = Faulty(inner, seed=1, rates=FaultRates(unavailable=1.0))
        with pytest.raises(TierUnavailable, match="did nothing"):
            await tier.quarantine(NAME)
        assert sized(await inner.list("")) == [(NAME, 10)]

    async def test_damage_is_one_bit_or_a_shorter_image(self) -> None:
        inner, into = memory(), slot()
        await inner.write(NAME, image_of(1000))
        corrupt = Faulty(inner, seed=1, rates=FaultRates(corrupt=1.0))
        assert await corrupt.read(NAME, into) == 1000
        difference = into[:1000] ^ image_of(1000)
        assert int(np.unpackbits(difference).sum()) == 1
        assert np.array_equal(into[1000:], slot()[1000:])
        truncated = Faulty(inner, seed=1, rates=FaultRates(truncated=1.0))
        assert await truncated.read(NAME, into) < 1000

    async def test_a_stall_lasts_as_long_as_set(self) -> None:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        rates = FaultRates(stall=1.0, stall_seconds=9.0)
        await Faulty(Scripted(), seed=1, rates=rates, sleep=sleep).list("")
        assert slept == [9.0]

    async def test_without_rates_nothing_happens_and_close_is_spared(self) -> None:
        tier = Faulty(Scripted(), seed=1, rates=FaultRates())
        assert await tier.read(NAME, slot()) == 7
        assert tier.injected == {}
        await Faulty(Scripted(), seed=1, rates=FaultRates(unavailable=1.0)).close()

    def test_rates_are_checked(self) -> None:
        with pytest.raises(ValueError, match="corrupt=2"):
            FaultRates(corrupt=2.0)


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
