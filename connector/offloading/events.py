"""What vLLM's publisher is told of chunks that vLLM calls by names of its own.

Owns which chunks of vLLM's names were told of and still hold, and the chunks that hold and have no
name yet: those of other engines, and of an earlier life of this one, until a request here asks for
them. Does not own the names (`keys.py`) nor what the tiers hold (`connector/events.py`).

Invariants:

* A chunk is told as removed exactly if it was told as stored, and under the same name.
* One that holds is told of as soon as its name is known, once.
* What is remembered is part of what `TierEvents` does, which is bounded.
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
    """The tiers' chunks in vLLM's words.

    Args:
        owner: whose chunks they are.
        name_of: what vLLM calls a chunk, by the start of its key; None where that is not known.
    """

    def __init__(self, owner: str, name_of: Callable[[bytes], OffloadKey | None]) -> None:
        self._owner = owner
        self._name_of = name_of
        self._told: dict[tuple[bytes, str], OffloadKey] = {}
        """By the start of their keys and by tier."""
        self.unnamed: dict[bytes, set[str]] = {}
        """The tiers that hold them, by the start of their keys."""
        self._said: list[OffloadingEvent] = []

    def named(self, key: bytes, name: OffloadKey) -> None:
        """VLLM calls the chunk of `key` so: if it holds, that can be told now."""
        start = key[:EVENT_NAME_BYTES]
        for tier in sorted(self.unnamed.pop(start, ())):
            self._stored(start, tier, name)

    def forget(self) -> None:
        """This engine will find nothing of before: all of it is told as removed."""
        for (_, tier), name in self._told.items():
            self._say(name, tier, removed=True)
        self._told.clear()
        self.unnamed.clear()

    def take(self, events: Iterable[TierEvent]) -> list[OffloadingEvent]:
        """What to tell: these events, after what was named since the last call."""
        for event in events:
            start, tier = event.key[:EVENT_NAME_BYTES], event.tier
            if isinstance(event, StoredEvent):
                self._came(start, tier)
            else:
                self._went(start, tier)
        said, self._said = self._said, []
        return said

    def _came(self, start: bytes, tier: str) -> None:
        if (start, tier) in self._told:
            # The tiers know more of it now, which nobody here asks for.
            return
        name = self._name_of(start)
        if name is None:
            self.unnamed.setdefault(start, set()).add(tier)
        else:
            self._stored(start, tier, name)

    def _went(self, start: bytes, tier: str) -> None:
        name = self._told.pop((start, tier), None)
        if name is not None:
            self._say(name, tier, removed=True)
        tiers = self.unnamed.get(start)
        if tiers is not None:
            tiers.discard(tier)
            if not tiers:
                del self.unnamed[start]

    def _stored(self, start: bytes, tier: str, name: OffloadKey) -> None:
        self._told[start, tier] = name
        self._say(name, tier, removed=False)

    def _say(self, name: OffloadKey, tier: str, *, removed: bool) -> None:
        host = tier == "host"
        self._said.append(
            OffloadingEvent(
                keys=[name],
                medium=Medium.CPU if host else Medium.STORAGE,
                removed=removed,
                locality=Locality.LOCAL if host else Locality.REMOTE,
                ownership=self._owner,
                # So vLLM keeps what it knows of the chunk's blocks until then.
                removal_expected=not removed,
            )
        )
