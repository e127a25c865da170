"""What a request said of the chunks that it stores: until when they are kept, and where.

Owns the rule, its place in the tag of a slot (which comes back with the slot after a restart), and
the order in which chunks are to be forgotten. Does not own how one is removed (`host_tier.py`), nor
what is written (`writes.py`).

A time is on the engine's clock, which counts from the start of the machine: a pool is not taken
over after the machine was started anew, so what a tag says is still right where it is read.

Invariants: pure; what is in the order for nothing any more (its chunk went, or was stored again) is
at most as much as what is in it for something, and a constant.
"""

from __future__ import annotations

import heapq
import itertools
import math
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from sidecar.core.commands import RestoredSlot
from sidecar.protocol import TENANT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.core.directory import Chunk

_TAG: Final = struct.Struct(f"<{TENANT_BYTES}sQ")
_STAYS: Final = 1
_MS_SHIFT: Final = 1
_MS_MAX: Final = (1 << 63) - 1
_NO_TENANT: Final = bytes(TENANT_BYTES)
_IDLE_MAX: Final = 1024


class Retention(NamedTuple):
    """Until when chunks are kept (`math.inf`: until they are evicted), and whether on this node."""

    expires_at: float = math.inf
    stays: bool = False


FOR_EVER: Final = Retention()


def slot_tag(tenant: bytes, retention: Retention) -> bytes:
    """The tag of a slot: whose it is, and how long it may be found. Zeros: nobody's, for ever."""
    ms = 0
    if retention.expires_at < math.inf:
        # Rounded down, and never to none at all.
        ms = min(max(int(retention.expires_at * 1000), 1), _MS_MAX)
    return _TAG.pack(tenant or _NO_TENANT, ms << _MS_SHIFT | retention.stays * _STAYS)


def read_tag(tag: bytes) -> tuple[bytes, Retention]:
    """Tenant and retention of a slot with this tag."""
    tenant, word = _TAG.unpack(tag)
    ms = word >> _MS_SHIFT
    retention = Retention(ms / 1000 if ms else math.inf, stays=bool(word & _STAYS))
    return (b"" if tenant == _NO_TENANT else tenant), retention


class Expiries:
    """What is to be forgotten, soonest first: chunks, and slots that nobody has claimed."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Chunk | RestoredSlot]] = []
        self._numbers = itertools.count()
        self._sweep_at = _IDLE_MAX

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, expires_at: float, what: Chunk | RestoredSlot) -> None:
        """Note one; what was noted of it before may stay noted."""
        heapq.heappush(self._heap, (expires_at, next(self._numbers), what))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if _counts(entry[0], entry[2])]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _IDLE_MAX

    def due(self, now: float) -> Iterator[Chunk | RestoredSlot]:
        """Take out what was noted for now or earlier."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]


def _counts(expires_at: float, what: Chunk | RestoredSlot) -> bool:
    if isinstance(what, RestoredSlot):
        return True
    return not what.detached and not what.vacant and what.expires_at == expires_at
