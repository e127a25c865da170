"""Event feeds: tell a scheduler what its realms hold, first everything, then what changes.

Owns, per scheduler, what was sent, what it acknowledged, and what is queued. Does not own what
changes (`directory.py`), or how messages are sent (`outbox.py`). Pure.

Invariants:

* A client that applies all messages of one session in order knows what its realms hold, except for
  chunks that only the catalog named, beyond `LISTED_MAX` of them.
* Nothing is sent before the first acknowledgement, and at most `UNREAD_MAX` messages that are not
  acknowledged. Changes meanwhile are queued, once per chunk. If more than `FEED_CHUNKS_QUEUED_MAX`
  are queued, the feed restarts: the next message has `anew` set, and everything is sent again.
* One call makes messages for what just changed, or one message of at most `SLICE_CHUNKS` chunks.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from sidecar.core.commands import Command, Reply
from sidecar.core.directory import Chunk, FlagChange, Realm
from sidecar.core.stored_table import Keys, key_list
from sidecar.protocol import EVENT_NAME_BYTES, Events, RemovedEvent, StoredEvent

EVENTS_PER_MESSAGE_MAX: Final = 8192
UNREAD_MAX: Final = 64
FEED_CHUNKS_QUEUED_MAX: Final = 65_536
LISTED_MAX: Final = 32_768
SLICE_CHUNKS: Final = 1024
EMPTY_SLICES_MAX: Final = 4
"""Slices without events that one call skips; then it sends an empty message."""

T = TypeVar("T")

_TIERS: Final = ("host", "store")
_EventLists = tuple[list[StoredEvent], list[RemovedEvent]]


class EventFeed:
    """The feed of one scheduler. It has one realm for each KV cache group."""

    def __init__(
        self, epoch: int, session_id: int, realms: Sequence[Realm], emit: Callable[[Command], None]
    ) -> None:
        self._epoch = epoch
        self._session_id = session_id
        self._realms = {realm.realm_id: (number, realm) for number, realm in enumerate(realms)}
        self._emit = emit
        self._sent = 0
        self._acknowledged = 0
        self._listens = False
        self._restarts = True
        """Whether the next message starts from the beginning."""
        self._walk: Iterator[_EventLists] | None = None
        self._queued: dict[tuple[int, bytes], None] = {}
        self._listed_left = LISTED_MAX

    def acknowledge(self, count: int) -> None:
        """The client has processed `count` messages since it attached, and waits for more."""
        self._listens = True
        self._acknowledged = max(self._acknowledged, min(count, self._sent))
        self._send_next()

    def changed(self, changes: list[FlagChange]) -> None:
        """Send or queue what changed."""
        mine = [change for change in changes if change.realm.realm_id in self._realms]
        if not mine or self._restarts:
            return
        if self._queued or self._sent - self._acknowledged >= UNREAD_MAX:
            self._enqueue((change.realm.realm_id, change.key) for change in mine)
            return
        events: _EventLists = ([], [])
        for change in mine:
            for tier, (was, now) in enumerate(zip(change.was, change.now, strict=True)):
                if was != now:
                    self._add(events, change.realm, change.key, change.chunk, tier, there=now)
        stored, removed = events
        for start in range(0, len(stored), EVENTS_PER_MESSAGE_MAX):
            self._send(stored[start : start + EVENTS_PER_MESSAGE_MAX], [])
        for start in range(0, len(removed), EVENTS_PER_MESSAGE_MAX):
            self._send([], removed[start : start + EVENTS_PER_MESSAGE_MAX])

    def listed(self, realm: Realm, keys: Keys) -> None:
        """Queue chunks that the catalog named."""
        if realm.realm_id not in self._realms or self._restarts or not realm.readable:
            return
        self._enqueue((realm.realm_id, key) for key in key_list(keys[: self._listed_left]))
        if self._sent == self._acknowledged:
            self._send_next()

    def _enqueue(self, names: Iterable[tuple[int, bytes]]) -> None:
        self._queued.update(dict.fromkeys(names))
        if len(self._queued) > FEED_CHUNKS_QUEUED_MAX:
            self._queued.clear()
            self._walk = None
            self._restarts = True

    def _send_next(self) -> None:
        """Send one more message, if there is something to send and the client listens."""
        if not self._listens or self._sent - self._acknowledged >= UNREAD_MAX:
            return
        restarts = self._restarts
        if restarts:
            self._restarts = False
            self._listed_left = LISTED_MAX
            self._walk = self._slices()
        if self._walk is not None:
            for slice_number, (stored, removed) in enumerate(self._walk):
                if stored or restarts or slice_number == EMPTY_SLICES_MAX:
                    self._send(stored, removed, anew=restarts)
                    return
            self._walk = None
        if self._queued:
            names = list(itertools.islice(self._queued, SLICE_CHUNKS))
            for name in names:
                del self._queued[name]
            self._send(*self._state_of(names), anew=restarts)
        elif restarts:
            self._send([], [], anew=True)

    def _send(
        self, stored: list[StoredEvent], removed: list[RemovedEvent], *, anew: bool = False
    ) -> None:
        self._sent += 1
        self._emit(Reply(self._session_id, Events(self._epoch, stored, removed, anew)))

    def _slices(self) -> Iterator[_EventLists]:
        """Everything in slices; each is the state at the moment when it is made."""
        for _, realm in list(self._realms.values()):
            if realm.readable:
                for names in _batches(realm.stored.names()):
                    if self._listed_left <= 0:
                        break
                    events: _EventLists = ([], [])
                    for name, _ in names:
                        # The mask that came with the name may be from some slices ago.
                        if realm.obtainable(name) == realm.full_mask:
                            self._add(events, realm, name, None, 1, there=True)
                    yield events
            # After the names, so that what is known of a chunk in both tiers counts.
            for keys in _batches(iter(list(realm.chunks))):
                yield self._state_of([(realm.realm_id, key) for key in keys], gone=False)

    def _state_of(self, names: Iterable[tuple[int, bytes]], *, gone: bool = True) -> _EventLists:
        """The state of these chunks; with `gone`, also in which tiers they are not."""
        events: _EventLists = ([], [])
        for realm_id, key in names:
            _, realm = self._realms[realm_id]
            chunk = realm.chunks.get(key)
            for tier, there in enumerate(realm.flags(key)):
                if there or gone:
                    self._add(events, realm, key, chunk, tier, there=there)
        return events

    def _add(
        self,
        events: _EventLists,
        realm: Realm,
        key: bytes,
        chunk: Chunk | None,
        tier: int,
        *,
        there: bool,
    ) -> None:
        stored, removed = events
        number, _ = self._realms[realm.realm_id]
        layout = realm.layouts[0]
        # 0 while its length is unknown.
        tokens = chunk.segments[0].num_blocks * layout.block_tokens if chunk and layout else 0
        if not there:
            removed.append(RemovedEvent(key, _TIERS[tier], number))
        elif chunk is not None and tokens:
            stored.append(StoredEvent(key, chunk.parent, tokens, _TIERS[tier], number))
        elif tier == 1 and layout is not None and self._listed_left > 0:
            # Only the catalog named it, without parent and length: as long as possible.
            self._listed_left -= 1
            tokens = layout.blocks_per_chunk * layout.block_tokens
            stored.append(StoredEvent(key[:EVENT_NAME_BYTES], b"", tokens, _TIERS[tier], number))


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(itertools.islice(items, SLICE_CHUNKS)):
        yield batch
