"""The orders of eviction: which chunk goes next, of all tenants and of each with a limit.

Only this module of the core calls a policy (`tiers/policy/`). Does not own what may be evicted
(`host_tier.py`): a chunk in an order may be busy, or pinned for a moment.

Invariants: the order of all tenants is the policy of the configuration, and that of one tenant an
LRU. What a policy hears of uses comes from requests alone, once for each. A chunk that was refused
goes first until a request uses it. If the store is to have it, it is in no order until it is
written, as long as such chunks have room: one part in `UNWRITTEN_PART` of the memory, and of their
tenant's limit.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from sidecar.core.directory import ZERO_KEY, Chunk, Directory, Realm
from sidecar.core.restored import SlotAllocator
from sidecar.core.tenants import Tenants
from sidecar.protocol import Use
from tiers.policy import Policy
from tiers.policy.curve import HitCurve
from tiers.policy.key import CacheKey, Left

CHUNKS_EXPECTED: Final = 10_000
"""That fit into host memory, until it is known."""
MEMORY_FACTORS: Final = (0.5, 1.0, 2.0, 4.0)
"""Sizes of host memory whose hits are estimated, as multiples of what there is."""
UNWRITTEN_PART: Final = 8
"""The memory divided by this is what refused chunks may take until the store has them."""
UNWRITTEN_SECONDS_MAX: Final = 60.0
"""After that a refused chunk which lacks segments of other ranks makes room for the next."""
COMING_MAX: Final = 8_192
"""Chunks that are not here, and whose requests are remembered, up to twice as many."""


class EvictionOrders:
    """Chunks in the orders of eviction. One that a session keeps is in none."""

    def __init__(
        self,
        directory: Directory,
        policy: Policy,
        tenants: Tenants,
        curve_keys_max: int,
        unwritten_in: SlotAllocator | None,
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._tenants = tenants
        self.curve = HitCurve(CHUNKS_EXPECTED, curve_keys_max) if curve_keys_max else None
        """Which part of the uses an LRU in memory of another size would serve."""
        self._requests = 0
        self._coming: dict[CacheKey, int] = {}
        """Chunks that were not here, with the number of their last request."""
        self._came: dict[CacheKey, int] = {}
        """Earlier ones."""
        # To find the first of a dict takes time with the number of those that were removed.
        self.unwritten = OrderedDict[Chunk, int]()
        """Refused chunks that are kept for the store, with their bytes."""
        self._unwritten_bytes = 0
        self._unwritten_of = Counter[bytes]()
        """Their bytes, by tenant."""
        self._unwritten_in = unwritten_in

    def use(self, realms: Sequence[Realm], message: Use) -> list[Chunk]:
        """Note the prompt of a request; returns those of its chunks that the directory knows."""
        names: list[CacheKey] = []
        earlier: list[int] = []
        known: list[Chunk] = []
        of_tenants: dict[Policy, list[CacheKey]] = {}
        self._requests += 1
        groups = message.groups or itertools.repeat(0)
        for key, group in zip(message.keys, groups, strict=False):
            realm = realms[group]
            names.append((realm.realm_id, key))
            chunk = realm.chunks.get(key)
            if chunk is None:
                earlier.append(0)
                self._coming[names[-1]] = self._requests
                continue
            earlier.append(chunk.uses)
            chunk.request, chunk.refused = self._requests, False
            known.append(chunk)
            own = self._tenants.order(chunk.tenant)
            if own is not None:
                of_tenants.setdefault(own, []).append(names[-1])
        for own, own_names in of_tenants.items():
            own.use(own_names, 0)
        self._policy.use(names, message.num_tokens)
        self._forget_requests()
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

    def enter(self, chunk: Chunk, *, new: bool = False) -> None:
        """Add a chunk that came (`new`), or that no session keeps any more."""
        name = _name_of(chunk)
        came, coming = self._came.pop(name, 0), self._coming.pop(name, 0)
        chunk.request = max(chunk.request, came, coming)
        chunk.request = self._request_of(chunk)
        if chunk.refused and new and self._keep(chunk):
            return
        for order in self._orders_of(chunk):
            order.add(name, _parent_of(chunk), chunk.uses, first=chunk.refused)

    def leave(self, chunk: Chunk, why: Left) -> None:
        """Remove a chunk."""
        for order in self._orders_of(chunk):
            order.remove(_name_of(chunk), why)
        if why is not Left.PINNED:
            self._forget_unwritten(chunk)

    def _keep(self, chunk: Chunk) -> bool:
        """Keep a chunk that goes first out of the orders until it is written, if there is room.

        Before that its other ranks' segments have to come. One that lacks some for long is let go.
        """
        if self._unwritten_in is None:
            return False
        while (oldest := next(iter(self.unwritten), None)) is not None and not oldest.loadable:
            if chunk.used_at - oldest.used_at < UNWRITTEN_SECONDS_MAX:
                break
            self.written(oldest)
        num_bytes = chunk.realm.chunk_bytes
        all_bytes, own_bytes = self._unwritten_bytes, self._unwritten_of[chunk.tenant]
        own_max = self._tenants.quota(chunk.tenant).host_bytes_max
        if (all_bytes + num_bytes) * UNWRITTEN_PART > self._unwritten_in.size_bytes or (
            own_max is not None and (own_bytes + num_bytes) * UNWRITTEN_PART > own_max
        ):
            return False
        self.unwritten[chunk] = num_bytes
        self._count_unwritten(chunk.tenant, num_bytes)
        return True

    def _count_unwritten(self, tenant: bytes, num_bytes: int) -> None:
        self._unwritten_bytes += num_bytes
        self._unwritten_of[tenant] += num_bytes
        if not self._unwritten_of[tenant]:
            del self._unwritten_of[tenant]

    def written(self, chunk: Chunk) -> None:
        """The store has a chunk, or will not get it: if it was kept, it goes first now."""
        if self._forget_unwritten(chunk):
            self.enter(chunk)

    def _forget_unwritten(self, chunk: Chunk) -> bool:
        num_bytes = self.unwritten.pop(chunk, None)
        if num_bytes is None:
            return False
        self._count_unwritten(chunk.tenant, -num_bytes)
        return True

    def replay_use(self, chunk: Chunk) -> None:
        """Note a use of an earlier run."""
        for order in self._orders_of(chunk):
            order.use([_name_of(chunk)], 0)

    def admits(self, chunk: Chunk, order: Policy | None = None) -> bool:
        """Whether a chunk is worth more than the first that would have to go, of `order` if given.

        An LRU refuses it if its own request, or a later one, has that first chunk in its prompt.
        Else a prompt longer than the memory would lose its head to its end, and could not be used.
        """
        if not chunk.empty or chunk.pins > 1 or chunk.request_pins:
            # Another rank's part was admitted, or a request or a session wants it.
            return True
        policy = self._policy if order is None else order
        if policy.admits(_name_of(chunk), _parent_of(chunk)) and not (
            policy.by_last_use and self._is_older(chunk, next(self.victims(order), None))
        ):
            return True
        chunk.refused = True
        return False

    def _is_older(self, chunk: Chunk, victim: Chunk | None) -> bool:
        """Whether what would go for a chunk is of the same request, or of a later one.

        A chunk of unknown request counts as the newest one's.
        """
        known = self._request_of(chunk)
        request = known or self._requests
        if victim is None or not victim.request >= request > 0:
            return False
        if known:
            # For what follows it. If the windows of a prompt had a number, they would keep their
            # beginning from their end.
            self._coming.setdefault(_name_of(chunk), known)
            self._forget_requests()
        return True

    def _request_of(self, chunk: Chunk) -> int:
        """The number of the last request that had a chunk in its prompt; 0 if unknown.

        A chunk that none had is of an answer, or of windows before the end of a prompt. It has the
        number of the chunk before it.
        """
        name, above = _name_of(chunk), _parent_of(chunk)
        request = chunk.request or self._coming.get(name, 0) or self._came.get(name, 0)
        if request or above is None:
            return request
        before = chunk.realm.chunks.get(chunk.parent)
        request = 0 if before is None else before.request
        return request or self._coming.get(above, 0) or self._came.get(above, 0)

    def _forget_requests(self) -> None:
        if len(self._coming) > COMING_MAX:
            self._came, self._coming = self._coming, {}

    def victims(self, order: Policy | None = None) -> Iterator[Chunk]:
        """Chunks in the order of eviction, pinned ones too: of all tenants, or of `order`."""
        for realm_id, key in (self._policy if order is None else order).victims():
            yield self._directory.realms[realm_id].chunks[key]

    def _orders_of(self, chunk: Chunk) -> tuple[Policy, ...]:
        if chunk.request_pins or chunk in self.unwritten:
            return ()
        own = self._tenants.order(chunk.tenant)
        return (self._policy,) if own is None else (self._policy, own)


def _name_of(chunk: Chunk) -> CacheKey:
    return (chunk.realm.realm_id, chunk.key)


def _parent_of(chunk: Chunk) -> CacheKey | None:
    """The name of the chunk before it; None at the start of a prompt."""
    return None if chunk.parent == ZERO_KEY else (chunk.realm.realm_id, chunk.parent)
