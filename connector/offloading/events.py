"""KV events for vLLM's publisher, of chunks under the names that vLLM gives them.

Owns which chunks were published as stored, and which are held but have no name yet: those of other
engines, and of an earlier process of this one, until a request here looks them up. Does not own the
names (`keys.py`) nor what the tiers hold (`connector/events.py`).

Invariants:

* A chunk is published as removed exactly if it was published as stored, under the same name.
* A chunk that is held is published once, as soon as its name is known.
* What is kept is a part of what `TierEvents` keeps, which is bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent

from sidecar.protocol import EVENT_NAME_BYTES, StoredEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.v1.kv_offload.base import OffloadKey

    from connector.events import TierEvent


class NamedEvents:
    """The tiers' chunks as vLLM's events; `owner` is the owner in them.

    `name_of` gives vLLM's name of a chunk by the start of its key; None if it is not known.
    """

    def __init__(self, owner: str, name_of: Callable[[bytes], OffloadKey | None]) -> None:
        self._owner = owner
        self._name_of = name_of
        self._published: dict[tuple[bytes, str], OffloadKey] = {}
        """By the start of their keys and by tier."""
        self.unnamed: dict[bytes, set[str]] = {}
        """The tiers that hold them, by the start of their keys."""
        self._events: list[OffloadingEvent] = []

    def named(self, key: bytes, name: OffloadKey) -> None:
        """Take in vLLM's name of a chunk. If the chunk is held, publish it now."""
        start = key[:EVENT_NAME_BYTES]
        for tier in sorted(self.unnamed.pop(start, ())):
            self._publish_stored(start, tier, name)

    def forget(self) -> None:
        """Publish everything as removed: this engine finds nothing from before."""
        for (_, tier), name in self._published.items():
            self._publish(name, tier, removed=True)
        self._published.clear()
        self.unnamed.clear()

    def take(self, events: Iterable[TierEvent]) -> list[OffloadingEvent]:
        """What to publish: what was named since the last call, then these events."""
        for event in events:
            start, tier = event.key[:EVENT_NAME_BYTES], event.tier
            published = self._published.get((start, tier))
            if not isinstance(event, StoredEvent):
                if published is not None:
                    del self._published[start, tier]
                    self._publish(published, tier, removed=True)
                elif start in self.unnamed:
                    self.unnamed[start].discard(tier)
                    if not self.unnamed[start]:
                        del self.unnamed[start]
            # Else the tiers know more of it now, which is not published here.
            elif published is None:
                name = self._name_of(start)
                if name is None:
                    self.unnamed.setdefault(start, set()).add(tier)
                else:
                    self._publish_stored(start, tier, name)
        taken, self._events = self._events, []
        return taken

    def _publish_stored(self, start: bytes, tier: str, name: OffloadKey) -> None:
        self._published[start, tier] = name
        self._publish(name, tier, removed=False)

    def _publish(self, name: OffloadKey, tier: str, *, removed: bool) -> None:
        host = tier == "host"
        self._events.append(
            OffloadingEvent(
                keys=[name],
                medium=Medium.CPU if host else Medium.STORAGE,
                removed=removed,
                locality=Locality.LOCAL if host else Locality.REMOTE,
                ownership=self._owner,
                # vLLM then keeps what it knows of the chunk's blocks until it is removed.
                removal_expected=not removed,
            )
        )
