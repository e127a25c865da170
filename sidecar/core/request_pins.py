"""Chunks that requests keep in host memory for a while.

Owns which session keeps which chunk until when. A scheduler names keys at the end of a request;
naming a key again moves its deadline. A key without any data is kept too: its store may still be on
its way over the socket of a worker. Does not own pins (`pins.py`) or the orders of eviction
(`host_tier.py`).

What is kept is pinned, so it counts against the session's share of pinned memory, and against a
share of its own, so that loads can always pin too. A tenant with a limit in host memory may keep at
most half of it, or it could store nothing more.

Invariants: an entry exists until its deadline, the end of its session, or a release; its chunk has
one pin for it, and counts it in `request_pins`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidecar.core.fair_share import request_pin_cost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.core.directory import Chunk, Realm
    from sidecar.core.outbox import CoreParts
    from sidecar.core.pins import Pins
    from sidecar.protocol import Pin

TENANT_DIVISOR: Final = 2


@dataclass(slots=True, eq=False)
class _RequestPin:
    session_id: int
    chunk: Chunk
    deadline: float
    size_bytes: int
    cost: int


class RequestPins:
    """All pins of requests."""

    def __init__(self, parts: CoreParts, pins: Pins) -> None:
        self._directory = parts.directory
        self._host = parts.host
        self._pins = pins
        self._shares = parts.shares
        self._tenants = parts.tenants
        self._counters = parts.counters
        self._by_session: dict[int, dict[Chunk, _RequestPin]] = {}
        self._tenant_bytes: Counter[bytes] = Counter()
        # One entry for each pin. Its deadline may have been moved since.
        self._heap: list[tuple[float, int, _RequestPin]] = []
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[_RequestPin]:
        for own in self._by_session.values():
            yield from own.values()

    def pin(self, session_id: int, realms: list[Realm], message: Pin, now: float) -> None:
        """Keep as many of the keys as fit, from the first on; count the others as refused."""
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
        if None in realm.layouts:
            # Nothing can be stored yet, and its size is unknown.
            return False
        chunk = self._directory.open_chunk(realm, key, tenant)
        pin = _RequestPin(session_id, chunk, deadline, realm.chunk_bytes, request_pin_cost(realm))
        if not self._admit(pin):
            self._directory.drop_if_unused(chunk)
            return False
        self._pins.pin(session_id, (chunk,))
        self._host.request_pin(chunk)
        self._by_session.setdefault(session_id, {})[chunk] = pin
        self._tenant_bytes[chunk.tenant] += pin.size_bytes
        heapq.heappush(self._heap, (deadline, next(self._numbers), pin))
        self._counters.chunks_pinned += 1
        return True

    def _admit(self, pin: _RequestPin) -> bool:
        shares, tenant = self._shares, pin.chunk.tenant
        limit = self._tenants.quota(tenant).host_bytes_max
        tenant_bytes = self._tenant_bytes[tenant] + pin.size_bytes
        if limit is not None and tenant_bytes > limit // TENANT_DIVISOR:
            shares.refuse("pin", "tenant")
            return False
        if not self._pins.fitting(pin.session_id, (pin.chunk,)):
            shares.refuse("pin", "pinned")
            return False
        return shares.admit(
            "pin", pin.session_id, (shares.memory, pin.cost), (shares.request_pins, pin.size_bytes)
        )

    def expire(self, now: float) -> None:
        """End the pins past their deadline."""
        while self._heap and self._heap[0][0] <= now:
            _, _, pin = heapq.heappop(self._heap)
            if pin.deadline > now:
                heapq.heappush(self._heap, (pin.deadline, next(self._numbers), pin))
            else:
                self._end(pin)

    def close_session(self, session_id: int) -> None:
        """End all pins of a session."""
        for pin in list(self._by_session.get(session_id, {}).values()):
            self._end(pin)
        self._heap = [entry for entry in self._heap if entry[2].session_id != session_id]
        heapq.heapify(self._heap)

    def drain(self) -> None:
        """End all pins: the sidecar stops."""
        for session_id in list(self._by_session):
            self.close_session(session_id)

    def _end(self, pin: _RequestPin) -> None:
        session_id, chunk = pin.session_id, pin.chunk
        own = self._by_session[session_id]
        del own[chunk]
        if not own:
            del self._by_session[session_id]
        self._tenant_bytes[chunk.tenant] -= pin.size_bytes
        if not self._tenant_bytes[chunk.tenant]:
            del self._tenant_bytes[chunk.tenant]
        self._shares.memory.give(session_id, pin.cost)
        self._shares.request_pins.give(session_id, pin.size_bytes)
        self._host.request_unpin(chunk)
        self._pins.unpin(session_id, (chunk,))
