"""Writes the shared indexes as the engine commands, and grows them.

Owns turning commands into entries, and when an index is replaced by a larger one: a few slots at a
time, so that the event loop is held for milliseconds. Does not own the tables
(`tiers/kv/index.py`), or who reads them.

Invariants: until the larger index takes its place, readers have the smaller one, which is true but
for entries that found no room in it; one growth of a realm runs at a time, and ends at its next
step if the realm is forgotten. Where a larger index cannot be made (no memory, no thread,
or more entries than one may have) the smaller one stays, and the next entry after a pause tries
again.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from sidecar.core.commands import IndexOffer, IndexSet
from sidecar.core.retention import Gone
from sidecar.logs import fields
from sidecar.sessions.namespaces import RealmLayout
from tiers.errors import LayoutError
from tiers.kv.index import (
    FLAG_HOST,
    FLAG_STORE,
    GONE_EVICTED,
    GONE_EXPIRED,
    GONE_QUOTA,
    KEY_BYTES,
    IndexGrowth,
    IndexWriter,
    tag_of,
    tags_in,
    tags_of,
)
from tiers.threads import starting_threads

INDEX_RETRY_SECONDS: Final = 10.0
MANY: Final = 16
"""Entries from which on it takes less time to set them with numpy."""
GONE: Final = {
    None: 0,
    Gone.EVICTED: GONE_EVICTED,
    Gone.EXPIRED: GONE_EXPIRED,
    Gone.QUOTA: GONE_QUOTA,
}
"""Flags of a chunk that is in no tier any more."""

_logger = logging.getLogger("kvlake.index")


class IndexUpdater:
    """Writes the indexes of all realms. `moved` is called when a realm has another index.

    `start` runs `grow` for a realm whose index is full.
    """

    def __init__(
        self, moved: Callable[[RealmLayout], None], start: Callable[[RealmLayout], None]
    ) -> None:
        self._moved = moved
        self._start = start
        # realm_id -> set when the growth that runs has ended.
        self._growing: dict[int, anyio.Event] = {}
        self.growing_bytes = 0
        """Bytes of larger indexes that are being filled."""

    def set(self, realm: RealmLayout, commands: Iterable[IndexSet]) -> None:
        """Set the flags of some chunks, in order."""
        # Mostly all of them come, or all go.
        for flags, run in itertools.groupby(commands, _flags_of):
            keys = [command.key for command in run]
            if len(keys) < MANY:
                for key in keys:
                    realm.index.set(tag_of(key, realm.index_salt), flags)
            else:
                realm.index.set_many(tags_of(keys, realm.index_salt), flags)
        self._grow_if_full(realm)

    def offer(self, realm: RealmLayout, command: IndexOffer) -> None:
        """Set many chunks as held by the store."""
        realm.index.set_many(tags_in(command.keys, realm.index_salt), FLAG_STORE)
        self._grow_if_full(realm)

    def withdraw(self, realm: RealmLayout, names: Sequence[bytes]) -> None:
        """Clear the flags of many chunks, named by the first halves of their keys."""
        # No tag depends on the other halves.
        keys = [name.ljust(KEY_BYTES) for name in names]
        realm.index.set_many(tags_of(keys, realm.index_salt), 0)

    async def settled(self, realm: RealmLayout) -> None:
        """Wait until the growth that runs has ended."""
        event = self._growing.get(realm.realm_id)
        if event is not None:
            await event.wait()

    async def grow(self, realm: RealmLayout) -> None:
        """Replace an index by larger ones until its entries have room, a few slots at a time."""
        try:
            while realm.index.needs_growth and not realm.forgotten:
                entries = 2 * realm.index.capacity_entries
                with starting_threads():
                    larger = await anyio.to_thread.run_sync(IndexWriter, entries)
                await self._replace(realm, larger)
        except (OSError, LayoutError) as error:
            _logger.error(  # noqa: TRY400 (for an operator)
                "an index cannot grow: entries that find no room in it are not offered",
                extra=fields(entries=len(realm.index), error=error),
            )
            self._growing[realm.realm_id].set()
            await anyio.sleep(INDEX_RETRY_SECONDS)
        self._growing.pop(realm.realm_id).set()

    def _grow_if_full(self, realm: RealmLayout) -> None:
        if realm.index.needs_growth and realm.realm_id not in self._growing:
            self._growing[realm.realm_id] = anyio.Event()
            self._start(realm)

    async def _replace(self, realm: RealmLayout, larger: IndexWriter) -> None:
        """Fill `larger` and let it take the index's place, unless the realm is forgotten before."""
        smaller, unused = realm.index, larger
        self.growing_bytes += larger.size_bytes
        try:
            growth = IndexGrowth(smaller, larger)
            while not realm.forgotten:
                if growth.step():
                    realm.index, unused = growth.finish(), smaller
                    self._moved(realm)
                    break
                await anyio.lowlevel.checkpoint()
        finally:
            self.growing_bytes -= larger.size_bytes
            # Readers of the old mapping miss until they take the new one.
            unused.close()


def _flags_of(command: IndexSet) -> int:
    return FLAG_HOST * command.in_host | FLAG_STORE * command.in_store | GONE[command.gone]
