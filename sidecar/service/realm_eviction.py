"""Realm eviction: which realms make room for a client's new ones, and removing them everywhere.

A realm that a session uses stays. The cheapest of the others goes first, and among equals the one
that was not used for longest: one that holds nothing; one whose chunks only the catalog knows,
where they are found again; one with chunks in host memory, which are evicted, the fewest bytes
first; one whose chunks wait to be written, likewise. So a client that attaches with one new
namespace after the other displaces one realm, and then only its own empty ones: to displace chunks
in host memory it has to fill as much itself. Hence no limit for each user.

Groups that share an index are evicted with their home. While an engine uses the home, unused realms
of other groups are evicted one by one, and their entries are taken out of the index.

Invariants: one client at a time makes room, and no client attaches meanwhile, so all events of a
realm precede those of a later one with its name. The loop runs other tasks every few milliseconds.
"""

import logging
from collections.abc import Sequence
from itertools import islice
from typing import Final

import anyio
import anyio.lowlevel
import msgspec

from sidecar.core.commands import ForgetRealms
from sidecar.core.directory import Realm as DirectoryRealm
from sidecar.errors import AttachRefused
from sidecar.logs import fields
from sidecar.protocol import Attach
from sidecar.service.dispatcher import Dispatcher
from sidecar.sessions.namespaces import RealmLayout
from tiers.catalog.namespace_info import NAMESPACE_DEPTH_MAX, deeper_than

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
                _require_json_object(part.namespace)
            while len(realms) + len(parts) - len(known) > realms.realms_max:
                unit = self._victim(known)
                if unit is None:
                    raise AttachRefused(
                        "realms",
                        f"limits.realms_max={realms.realms_max} namespaces and topologies are in "
                        "use by engines that are attached; stop some of them, or raise the limit",
                    )
                await self._evict(unit)

    def _victim(self, wanted: Sequence[RealmLayout]) -> Unit | None:
        """What to evict next; None if everything is in use."""
        engine = self._dispatcher.engine
        used = {realm for session in self._dispatcher.sessions.all() for realm in session.realms}
        used.update(wanted)
        units: list[Unit] = []
        for family in self._dispatcher.realms.families():
            if used.isdisjoint(family):
                units.append(family)
            else:
                # A family with a used realm has a used home.
                units += [(realm,) for realm in family if realm not in used]
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
        held = [(realm, known[realm.realm_id]) for realm in unit if realm.realm_id in known]
        gone = {realm.realm_id: dispatcher.engine.gone.of(realm.realm_id) for realm in unit}
        chunks = -1
        while any(realm.realm_id in known for realm in unit):
            before, chunks = chunks, sum(len(one.chunks) for _, one in held)
            if chunks == before:
                # A write of one of its chunks has started.
                return
            dispatcher.feed(ForgetRealms(_ids(unit)))
            if chunks:
                await anyio.lowlevel.checkpoint()
        dispatcher.realms.forget(unit)
        dispatcher.forget_slot_sizes()
        dispatcher.realms.forgotten += len(unit)
        for realm in unit:
            others = dispatcher.realms.all()
            last = all(one.namespace_digest != realm.namespace_digest for one in others)
            if dispatcher.store is not None:
                dispatcher.store.watch.forget(realm, last=last)
                dispatcher.store.catalogs.forget(realm, last=last)
            _logger.info(
                "realm forgotten: no engine uses it, and another one needs its place",
                extra=fields(
                    realm=realm.realm_id,
                    namespace=realm.namespace_digest.hex()[:16],
                    topology=realm.topology,
                ),
            )
        for realm, one in held:
            await self._publish_removal(realm, one)
            # The index may be shared with realms that stay.
            names = iter(gone[realm.realm_id])
            while not realm.indexed_in.forgotten and (part := list(islice(names, NAMES_AT_ONCE))):
                dispatcher.executor.indexes.withdraw(realm.indexed_in, part)
                await anyio.lowlevel.checkpoint()

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


def _require_json_object(namespace: bytes) -> None:
    """Raise `AttachRefused` unless the namespace is a JSON object that `/status` can show."""
    try:
        decoded = msgspec.json.decode(namespace, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AttachRefused("namespace", f"namespace is not JSON, or no object: {error}") from error
    # /status encodes it deeper in the stack, where the same nesting could exceed the limit.
    if deeper_than(decoded, NAMESPACE_DEPTH_MAX):
        raise AttachRefused(
            "namespace",
            f"namespace is nested more than {NAMESPACE_DEPTH_MAX} deep: make it flatter",
        )
