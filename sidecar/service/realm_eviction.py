"""Realm eviction: which realms make room for a client's new ones, and removing them everywhere.

Owns the choice, its order, and notifying all parts that know a realm. Does not own the limit
(`limits.realms_max`, enforced by `sessions/namespaces.py`), nor the eviction of chunks
(`core/engine.py`).

A realm that a session uses stays. Of the others the cheapest goes first, and among equals the one
that was not used for longest:

1. one that holds nothing;
2. one whose chunks only the catalog knows: they are found there again when an engine comes;
3. one with chunks in host memory, the fewest bytes first: they are evicted. Losing chunks of an
   engine that left is better than refusing one that came, and the smallest of many idle realms
   has at most its share of host memory;
4. one whose chunks wait to be written to the store, likewise.

So a client that attaches with one new namespace after the other displaces one realm, and then only
its own empty ones. To displace a realm with chunks in host memory it has to fill as much host
memory itself, which evicts them anyway; one in use it cannot displace. That is why there is no
limit for each user: `limits.sessions_max` bounds how many realms a user's engines can hold.

Groups that share an index are evicted with their home. While an engine uses the home, unused realms
of other groups are evicted one by one, and their entries are taken out of the index.

Invariants: one client at a time makes room, and no client attaches meanwhile, so all events of a
realm precede those of a later one with its name. The event loop runs other tasks every few
milliseconds.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel

from sidecar.core.commands import ForgetRealms
from sidecar.logs import fields
from sidecar.sessions.namespaces import RealmLayout, full, require_json_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.core.directory import Realm as DirectoryRealm
    from sidecar.protocol import Attach
    from sidecar.service.dispatcher import Dispatcher

NAMES_AT_ONCE: Final = 1024
"""Taking as many out of an index, with their events, takes one or two milliseconds."""

_logger = logging.getLogger("kvlake.realms")

Unit = tuple[RealmLayout, ...]
"""Realms that are evicted together."""


class RealmEviction:
    """Makes room for realms."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._lock = anyio.Lock()

    async def make_room(self, parts: Sequence[Attach]) -> None:
        """Make room for the realms of a client with these groups.

        The room is guaranteed until the caller awaits something. Raises `AttachRefused`.
        """
        realms = self._dispatcher.realms
        async with self._lock:
            known = [realm for realm in realms.find(parts) if realm is not None]
            for part in parts:
                require_json_object(part.namespace)
            while len(realms) + len(parts) - len(known) > realms.realms_max:
                unit = self._victim(known)
                if unit is None:
                    raise full(realms.realms_max)
                await self._evict(unit)

    def _victim(self, wanted: Sequence[RealmLayout]) -> Unit | None:
        """What to evict next; None if everything is in use."""
        engine = self._dispatcher.engine
        used = {realm for session in self._dispatcher.sessions.all() for realm in session.realms}
        units = _units(self._dispatcher.realms.families(), used.union(wanted))
        units.sort(
            key=lambda unit: (
                engine.forgetting_cost(_ids(unit)),
                max(one.last_used for one in unit),
            )
        )
        return next((unit for unit in units if not engine.in_use(_ids(unit))), None)

    async def _evict(self, unit: Unit) -> None:
        """Evict these realms, unless something of them is needed meanwhile."""
        dispatcher, known = self._dispatcher, self._dispatcher.engine.directory.realms
        held = [(realm, known.get(realm.realm_id)) for realm in unit]
        chunks = -1
        while any(realm.realm_id in known for realm in unit):
            before, chunks = chunks, sum(len(one.chunks) for _, one in held if one is not None)
            if chunks == before:
                # A write of one of its chunks has started.
                return
            dispatcher.feed(ForgetRealms(_ids(unit)))
            if chunks:
                await anyio.lowlevel.checkpoint()
        dispatcher.realms.forget(unit)
        dispatcher.forget_layouts()
        dispatcher.realms.forgotten += len(unit)
        for realm in unit:
            self._remove_from_store(realm)
            _logger.info(
                "realm forgotten: no engine uses it, and another one needs its place",
                extra=fields(
                    realm=realm.realm_id,
                    namespace=realm.namespace_digest.hex()[:16],
                    topology=realm.topology,
                ),
            )
        for realm, one in held:
            if one is not None:
                await self._publish_removal(realm, one)

    def _remove_from_store(self, realm: RealmLayout) -> None:
        dispatcher = self._dispatcher
        others = dispatcher.realms.all()
        last = all(one.namespace_digest != realm.namespace_digest for one in others)
        if dispatcher.watch is not None:
            dispatcher.watch.forget(realm, last=last)
        if dispatcher.catalogs is not None:
            dispatcher.catalogs.forget(realm, last=last)

    async def _publish_removal(self, realm: RealmLayout, held: DirectoryRealm) -> None:
        """Remove the realm's stored chunks from its home's index and from subscribers' view."""
        dispatcher = self._dispatcher
        stored = held.stored_names()
        while names := list(islice(stored, NAMES_AT_ONCE)):
            if not realm.indexed_in.forgotten:
                dispatcher.executor.indexes.withdraw(realm.indexed_in, names)
            if dispatcher.events is not None:
                dispatcher.events.forgotten(realm, names)
            await anyio.lowlevel.checkpoint()


def _ids(unit: Unit) -> tuple[int, ...]:
    return tuple(realm.realm_id for realm in unit)


def _units(families: Sequence[Unit], used: set[RealmLayout]) -> list[Unit]:
    """What may be evicted without evicting a used realm."""
    units: list[Unit] = []
    for family in families:
        if used.isdisjoint(family):
            units.append(family)
        else:
            # A family with a used realm has a used home.
            units += [(realm,) for realm in family if realm not in used]
    return units
