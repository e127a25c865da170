"""Requests and bytes by operation."""

from __future__ import annotations

import secrets

import pytest

from tests.faulty_tier import FaultRates, Faulty
from tests.tiers.tier_suite import TierSuite, image_of, slot
from tiers.errors import TierUnavailable
from tiers.store.middleware import Billed, Retrying
from tiers.store.object_tier import ObjectTier, UrlObjects


def memory() -> Billed:
    return Billed(UrlObjects(f"memory://{secrets.token_hex(6)}"))


class TestBilledTier(TierSuite):
    @pytest.fixture
    def tier(self) -> ObjectTier:
        return memory()


async def test_requests_are_counted_as_a_store_bills_them() -> None:
    tier = memory()
    names = [f"v1/{number:04d}" for number in range(1001)]
    for name in names:
        await tier.write(name, image_of(10))
    assert await tier.read(names[0], slot()) == 10
    assert len(await tier.list("v1")) == 1001
    await tier.list("nowhere")
    await tier.quarantine(names[0])
    await tier.delete(names)
    await tier.delete([])
    assert dict(tier.requests) == {"put": 1002, "get": 1, "list": 3, "delete": 3}
    assert dict(tier.num_bytes) == {"put": 10_010, "get": 10}


async def test_every_attempt_counts() -> None:
    billed = Billed(Faulty(memory(), seed=1, rates=FaultRates(unavailable=1.0)))
    with pytest.raises(TierUnavailable):
        await Retrying(billed, attempts_max=3, pause_seconds=0.0).write("v1/a", image_of(5))
    assert billed.requests["put"] == 3
