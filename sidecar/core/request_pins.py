"""Chunks that requests asked to have kept in host memory for a while.

Owns who keeps what until when. A scheduler names keys at the end of a request; each is one entry,
and naming it again only moves its end. A key of which nothing is there yet is kept too: its store
may still be on the way, for workers speak over other sockets. Does not own pins (`fair_share.py`),
nor the orders of eviction, out of which kept chunks are taken (`host_tier.py`).

What is kept is pinned, so it counts in the session's share of what may be pinned, and has in
addition a share of its own, so that loads can always pin too; of a tenant with a limit in host
memory at most half of that is kept, or it could store nothing more.

Invariants: an entry lives until its time, its session's end or a release, and not longer; its chunk
has one pin for it, and counts it in `kept`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

from sidecar.core.fair_share import kept_cost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.core.directory import Chunk, Realm
    from sidecar.core.fair_share import Pins
    from sidecar.core.parts import CoreParts
    from sidecar.protocol import Pin

TENANT_DIVISOR: Final = 2


class _Kept:
    """One session's wish to keep one chunk."""

    __slots__ = ("chunk", "cost", "deadline", "session_id", "size_bytes")

    def __init__(
        self, session_id: int, chunk: Chunk, deadline: float, size_bytes: int, cost: int
    ) -> None:
        self.session_id = session_id
        self.chunk = chunk
        self.deadline = deadline
        self.size_bytes = size_bytes
        self.cost = cost


class RequestPins:
    """All of them."""

    def __init__(
        self,
        parts: CoreParts,
        pins: Pins,
    ) -> None:
        self._directory = parts.directory
        self._host = parts.host
        self._pins = pins
        self._bounds = parts.bounds
        self._tenants = parts.tenants
        self._counters = parts.counters
        self._by_session: dict[int, dict[Chunk, _Kept]] = {}
        self._of_tenant: Counter[bytes] = Counter()
        # One entry for each that is kept. It may last longer by now than it says there.
        self._heap: list[tuple[float, int, _Kept]] = []
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[_Kept]:
        for own in self._by_session.values():
            yield from own.values()

    def ask(self, session_id: int, realms: list[Realm], message: Pin, now: float) -> None:
        """Keep the keys, as many as may be from the first on; count the others as refused."""
        deadline = now + message.duration_ms / 1000
        groups = message.groups or itertools.repeat(0)
        for number, (key, group) in enumerate(zip(message.keys, groups, strict=False)):
            realm = realms[group]
            own = self._by_session.get(session_id, {})
            chunk = realm.chunks.get(key)
            known = None if chunk is None else own.get(chunk)
            if known is not None:
                known.deadline = max(known.deadline, deadline)
            elif not self._take(session_id, realm, key, message.tenant, deadline):
                self._counters.pins_refused += len(message.keys) - number
                return

    def _take(
        self, session_id: int, realm: Realm, key: bytes, tenant: bytes, deadline: float
    ) -> bool:
        if any(layout is None for layout in realm.layouts):
            # Nothing can be stored yet, and how large it would be is not known.
            return False
        chunk = self._directory.open_chunk(realm, key, tenant)
        size_bytes, cost = self._host.chunk_bytes(chunk), kept_cost(realm)
        if not self._fits(session_id, chunk, size_bytes, cost):
            self._directory.settle(chunk)
            return False
        self._pins.pin(session_id, (chunk,))
        self._host.keep(chunk)
        kept = _Kept(session_id, chunk, deadline, size_bytes, cost)
        self._by_session.setdefault(session_id, {})[chunk] = kept
        self._of_tenant[chunk.tenant] += size_bytes
        heapq.heappush(self._heap, (deadline, next(self._numbers), kept))
        self._counters.chunks_pinned += 1
        return True

    def _fits(self, session_id: int, chunk: Chunk, size_bytes: int, cost: int) -> bool:
        limit = self._tenants.quota(chunk.tenant).host_bytes_max
        if (
            limit is not None
            and self._of_tenant[chunk.tenant] + size_bytes > limit // TENANT_DIVISOR
        ):
            self._bounds.refuse("pin", "tenant")
            return False
        if not self._pins.fitting(session_id, (chunk,)):
            self._bounds.refuse("pin", "pinned")
            return False
        wanted = (
            ("memory", self._bounds.memory, cost),
            ("kept", self._bounds.kept, size_bytes),
        )
        return self._bounds.admit("pin", session_id, wanted)

    def expire(self, now: float) -> None:
        """Let go of what was kept long enough."""
        while self._heap and self._heap[0][0] <= now:
            _, _, kept = heapq.heappop(self._heap)
            if kept.deadline > now:
                heapq.heappush(self._heap, (kept.deadline, next(self._numbers), kept))
            else:
                self._end(kept)

    def close_session(self, session_id: int) -> None:
        """Let go of all that a session keeps."""
        for kept in list(self._by_session.get(session_id, {}).values()):
            self._end(kept)
        self._heap = [entry for entry in self._heap if entry[2].session_id != session_id]
        heapq.heapify(self._heap)

    def drain(self) -> None:
        """Let go of everything: the sidecar ends, and what is left is written or kept anyway."""
        for session_id in list(self._by_session):
            self.close_session(session_id)

    def _end(self, kept: _Kept) -> None:
        session_id, chunk = kept.session_id, kept.chunk
        own = self._by_session[session_id]
        del own[chunk]
        if not own:
            del self._by_session[session_id]
        self._of_tenant[chunk.tenant] -= kept.size_bytes
        if not self._of_tenant[chunk.tenant]:
            del self._of_tenant[chunk.tenant]
        self._bounds.memory.give(session_id, kept.cost)
        self._bounds.kept.give(session_id, kept.size_bytes)
        self._host.let_go(chunk)
        self._pins.unpin(session_id, (chunk,))
