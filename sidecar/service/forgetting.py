"""Forgetting: which realms give way to a client's new ones, and that nothing of them is left.

Owns the choice, its order, and telling everybody who knows a realm that it is gone. Does not own
the limit (`limits.realms_max`, kept by `sessions/namespaces.py`), nor what is evicted how
(`core/idle_realms.py`).

A realm that a session uses stays. Of the others the one goes whose loss is smallest, and among
equals the one that was not used for longest:

1. one that holds nothing;
2. one of which the catalog alone knows chunks: they are found there again when an engine comes;
3. one with chunks in host memory, the fewest bytes first: they are evicted. To lose chunks of an
   engine that left is better than to refuse one that came, and the smallest of many idle realms
   has no more than its share of host memory;
4. one of which chunks wait to be written to the store, likewise.

So a client that attaches with one new namespace after the other displaces one realm, and then its
own empty ones only. To displace a realm with chunks in host memory it has to fill as much host
memory itself, which evicts them anyway; one in use it cannot displace. That is why there is no
limit for each user: `limits.sessions_max` bounds how many realms a user's engines can hold.

Groups that share an index go with their home. Where an engine uses the home, those of its groups'
realms that nobody uses go one by one, and their entries are taken out of the index.

Invariants: one client at a time makes room, and nobody attaches meanwhile: what is told of a realm
after its end comes before the first word of another one with its name. The event loop has turns
in between, of a few milliseconds.
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
    from collections.abc import Iterator, Sequence

    from sidecar.core.directory import Realm as Held
    from sidecar.protocol import Attach
    from sidecar.service.dispatcher import Dispatcher

NAMES_AT_ONCE: Final = 1024
"""To take so many out of an index and to tell of them takes one or two milliseconds."""

_logger = logging.getLogger("kvlake.realms")

Unit = tuple[RealmLayout, ...]
"""Realms that are forgotten together."""


class Forgetting:
    """Makes room for realms."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._one = anyio.Lock()

    async def make_room(self, parts: Sequence[Attach]) -> None:
        """See to it that a client with these groups can have a realm for each.

        What it finds holds until the caller waits for something. Raises `AttachRefused`.
        """
        realms = self._dispatcher.realms
        async with self._one:
            known = [realm for realm in realms.find(parts) if realm is not None]
            for part in parts:
                require_json_object(part.namespace)
            while len(realms) + len(parts) - len(known) > realms.realms_max:
                unit = self._least(known)
                if unit is None:
                    raise full(realms.realms_max)
                await self._forget(unit)

    def _least(self, wanted: Sequence[RealmLayout]) -> Unit | None:
        """What is forgotten next; None if everything is in use."""
        engine = self._dispatcher.engine
        used = {realm for session in self._dispatcher.sessions.all() for realm in session.realms}
        units = _units(self._dispatcher.realms.families(), used.union(wanted))
        units.sort(key=lambda unit: (engine.loss(_ids(unit)), max(one.last_used for one in unit)))
        return next((unit for unit in units if not engine.needs(_ids(unit))), None)

    async def _forget(self, unit: Unit) -> None:
        """Forget these realms, unless something of them is needed after all."""
        dispatcher, known = self._dispatcher, self._dispatcher.engine.directory.realms
        held = [(realm, known.get(realm.realm_id)) for realm in unit]
        chunks = -1
        while any(realm.realm_id in known for realm in unit):
            before, chunks = chunks, sum(len(one.chunks) for _, one in held if one is not None)
            if chunks == before:
                # A write of one of its chunks began.
                return
            dispatcher.feed(ForgetRealms(_ids(unit)))
            if chunks:
                await anyio.lowlevel.checkpoint()
        dispatcher.realms.forget(unit)
        dispatcher.forget_layouts()
        dispatcher.realms.forgotten += len(unit)
        for realm in unit:
            self._leave_store(realm)
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
                await self._tell(realm, one)

    def _leave_store(self, realm: RealmLayout) -> None:
        dispatcher = self._dispatcher
        others = dispatcher.realms.all()
        last = all(one.namespace_digest != realm.namespace_digest for one in others)
        if dispatcher.watch is not None:
            dispatcher.watch.forget(realm, last=last)
        if dispatcher.catalogs is not None:
            dispatcher.catalogs.forget(realm, last=last)

    async def _tell(self, realm: RealmLayout, held: Held) -> None:
        """Take what the store held of a realm out of its home's index, and tell subscribers."""
        dispatcher = self._dispatcher
        for names in _batches(held.stored_names()):
            if not realm.indexed_in.forgotten:
                dispatcher.executor.indexes.withdraw(realm.indexed_in, names)
            if dispatcher.events is not None:
                dispatcher.events.forgotten(realm, names)
            await anyio.lowlevel.checkpoint()


def _ids(unit: Unit) -> tuple[int, ...]:
    return tuple(realm.realm_id for realm in unit)


def _units(families: Sequence[Unit], used: set[RealmLayout]) -> list[Unit]:
    """What may be forgotten without anything that is used."""
    units: list[Unit] = []
    for family in families:
        if used.isdisjoint(family):
            units.append(family)
        else:
            # Its home is used, too.
            units += [(realm,) for realm in family if realm not in used]
    return units


def _batches(names: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(names, NAMES_AT_ONCE)):
        yield batch
