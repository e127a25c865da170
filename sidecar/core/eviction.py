"""The orders of eviction: which chunk goes next, of all tenants and of each with a limit.

Only this module of the core calls a policy (`tiers/policy/`). Does not own what may be evicted
(`host_tier.py`): a chunk in an order may be busy, or pinned for a moment.

Invariant: the order of all tenants is the policy of the configuration, and that of one tenant an
LRU. What a policy hears of uses comes from requests alone, once for each.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from sidecar.core.directory import ZERO_KEY, Chunk, Directory, Realm
from sidecar.core.tenants import Tenants
from sidecar.protocol import Use
from tiers.policy import Policy
from tiers.policy.curve import HitCurve
from tiers.policy.key import CacheKey, Left

CHUNKS_EXPECTED: Final = 10_000
"""That fit into host memory, until it is known."""
MEMORY_FACTORS: Final = (0.5, 1.0, 2.0, 4.0)
"""Sizes of host memory whose hits are estimated, as multiples of what there is."""


class EvictionOrders:
    """Chunks in the orders of eviction. One that a session keeps is in none."""

    def __init__(
        self, directory: Directory, policy: Policy, tenants: Tenants, curve_keys_max: int
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._tenants = tenants
        self.curve = HitCurve(CHUNKS_EXPECTED, curve_keys_max) if curve_keys_max else None
        """Which part of the uses an LRU in memory of another size would serve."""

    def use(self, realms: Sequence[Realm], message: Use) -> list[Chunk]:
        """Note the prompt of a request; returns those of its chunks that the directory knows."""
        names: list[CacheKey] = []
        earlier: list[int] = []
        known: list[Chunk] = []
        of_tenants: dict[Policy, list[CacheKey]] = {}
        groups = message.groups or itertools.repeat(0)
        for key, group in zip(message.keys, groups, strict=False):
            realm = realms[group]
            names.append((realm.realm_id, key))
            chunk = realm.chunks.get(key)
            if chunk is None:
                earlier.append(0)
                continue
            earlier.append(chunk.uses)
            known.append(chunk)
            own = self._tenants.order(chunk.tenant)
            if own is not None:
                of_tenants.setdefault(own, []).append(names[-1])
        for own, own_names in of_tenants.items():
            own.use(own_names, 0)
        self._policy.use(names, message.num_tokens)
        if self.curve is not None:
            self.curve.use(message.keys, earlier)
        return known

    def expected_hit_ratios(self, capacity: float) -> dict[float, float]:
        """Which part of the uses an LRU would serve, by multiple of a memory of `capacity` chunks.

        Empty until there were as many uses: a memory that was not filled says nothing. Empty too if
        no keys are kept for it.
        """
        if self.curve is None or not 0 < capacity <= self.curve.uses:
            return {}
        self.curve.resize(int(capacity))
        ratios = self.curve.ratios([capacity * factor for factor in MEMORY_FACTORS])
        return {} if ratios is None else dict(zip(MEMORY_FACTORS, ratios, strict=True))

    def enter(self, chunk: Chunk) -> None:
        """Add a chunk that came, or that no session keeps any more."""
        for order in self._orders_of(chunk):
            order.add(_name_of(chunk), _parent_of(chunk), chunk.uses)

    def leave(self, chunk: Chunk, why: Left) -> None:
        """Remove a chunk."""
        for order in self._orders_of(chunk):
            order.remove(_name_of(chunk), why)

    def replay_use(self, chunk: Chunk) -> None:
        """Note a use of an earlier run."""
        for order in self._orders_of(chunk):
            order.use([_name_of(chunk)], 0)

    def admits(self, chunk: Chunk) -> bool:
        """Whether a new chunk is worth more than the first that would have to go."""
        return self._policy.admits(_name_of(chunk), _parent_of(chunk))

    def victims(self, order: Policy | None = None) -> Iterator[Chunk]:
        """Chunks in the order of eviction, pinned ones too: of all tenants, or of `order`."""
        for realm_id, key in (self._policy if order is None else order).victims():
            yield self._directory.realms[realm_id].chunks[key]

    def _orders_of(self, chunk: Chunk) -> tuple[Policy, ...]:
        if chunk.request_pins:
            return ()
        own = self._tenants.order(chunk.tenant)
        return (self._policy,) if own is None else (self._policy, own)


def _name_of(chunk: Chunk) -> CacheKey:
    return (chunk.realm.realm_id, chunk.key)


def _parent_of(chunk: Chunk) -> CacheKey | None:
    """The name of the chunk before it; None at the start of a prompt."""
    return None if chunk.parent == ZERO_KEY else (chunk.realm.realm_id, chunk.parent)
