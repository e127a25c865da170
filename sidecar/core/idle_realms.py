"""Realms that no session uses: what forgetting one would lose, and giving it up.

Owns the price of a realm, whether something in it still runs, and taking it out of every part of
the engine. Does not own which one is forgotten, nor when (`service/realm_eviction.py`). Pure.

Invariants: a realm goes only when it has no chunk; one with a session, a pin, a copy, read or write
that runs, or slots that are being adopted, is passed over. One call evicts at most `CHUNKS_AT_ONCE`
chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from sidecar.core.directory import Directory, Realm
    from sidecar.core.host_tier import HostTier
    from sidecar.core.leases import Leases
    from sidecar.core.store_view import StoreView
    from sidecar.core.writes import Writes

CHUNKS_AT_ONCE: Final = 64
"""To evict one and to tell of it takes some 20 microseconds of the event loop."""


class Loss(NamedTuple):
    """What forgetting realms costs; the smaller one is forgotten first."""

    unwritten: bool
    """A chunk waits to be written to the store: nobody else would have it."""
    host_bytes: int
    """Of the slots of its chunks, at most."""
    listed: bool
    """The catalog named chunks: it is read again when an engine comes back."""


class IdleRealms:
    """Judges and gives up realms without sessions."""

    def __init__(
        self,
        directory: Directory,
        host: HostTier,
        store: StoreView,
        writes: Writes,
        leases: Leases,
    ) -> None:
        self._directory = directory
        self._host = host
        self._store = store
        self._writes = writes
        self._leases = leases

    def loss(self, realm_ids: Collection[int]) -> Loss:
        """What forgetting these realms costs. Takes no longer for more chunks."""
        realms = self._known(realm_ids)
        return Loss(
            self._writes.waits(realm_ids),
            sum(len(realm.chunks) * self._host.full_bytes(realm) for realm in realms),
            any(len(realm.stored) for realm in realms),
        )

    def busy(self, realm_ids: Collection[int]) -> bool:
        """Whether something runs or is pinned there. Linear in the chunks of these realms."""
        return any(
            self._host.holds(realm)
            or any(chunk.pins or chunk.busy for chunk in realm.chunks.values())
            for realm in self._known(realm_ids)
        )

    def forget(self, realm_ids: Collection[int]) -> None:
        """Evict some of their chunks; once none is left and nothing runs, forget them all."""
        realms = self._known(realm_ids)
        left = CHUNKS_AT_ONCE
        for realm in realms:
            left -= self._host.give_up(realm, left)
        if left < CHUNKS_AT_ONCE or any(
            realm.chunks or self._host.holds(realm) for realm in realms
        ):
            return
        for realm in realms:
            self._directory.forget_realm(realm)
            self._store.forget_realm(realm.realm_id)
            self._writes.forget_realm(realm.realm_id)
            self._leases.forget_realm(realm.realm_id)

    def _known(self, realm_ids: Collection[int]) -> list[Realm]:
        known = self._directory.realms
        return [known[realm_id] for realm_id in realm_ids if realm_id in known]
