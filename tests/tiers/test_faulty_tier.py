"""The tier that fails (`tests/faulty_tier.py`): what a seed brings about, and what retries hide."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.faulty_tier import FaultRates, Faulty
from tests.tiers.scripted import Scripted, memory, no_sleep
from tests.tiers.tier_suite import NAME, TierSuite, image_of, sized, slot
from tiers.errors import ChunkMissing, TierUnavailable
from tiers.store.middleware import Retrying
from tiers.store.object_tier import Abilities

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence


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
