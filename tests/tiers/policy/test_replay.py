"""Recorded requests through each policy: hits against an independent reference, and each other."""

from __future__ import annotations

import pytest

from tests.tiers.policy import caches
from tiers.policy.density import DensityPolicy
from tiers.policy.fifo import FifoPolicy
from tiers.policy.lru import LruPolicy

MILLION_TOKENS = 1_000_000 // caches.BLOCK_TOKENS


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
@pytest.mark.parametrize("capacity", [MILLION_TOKENS // 2, MILLION_TOKENS])
def test_lru_and_fifo_have_the_hits_of_the_references(name: str, capacity: int) -> None:
    requests = caches.recorded(name)[:2000]
    lru = caches.hit_ratio(LruPolicy(), capacity, requests)
    fifo = caches.hit_ratio(FifoPolicy(), capacity, requests)
    assert lru == caches.lru_hit_ratio(capacity, requests)
    assert fifo == caches.fifo_hit_ratio(capacity, requests)
    assert lru != fifo


def test_density_has_more_hits_of_conversations_than_lru() -> None:
    requests = caches.recorded("conversation")
    density = caches.hit_ratio(DensityPolicy(), MILLION_TOKENS, requests)
    assert density > caches.lru_hit_ratio(MILLION_TOKENS, requests) + 0.05
