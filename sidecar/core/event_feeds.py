"""What schedulers are told of the tiers: first all that their realms hold, then what changes.

Owns which of them asked to be told, how far each has been, how far it has listened, and what waits
to be told. Does not own what changes (`directory.py`) nor how messages leave (`parts.py`). Pure.

Invariants:

* Whoever applies all messages of one session in order knows what its realms hold, but for what they
  lack: chunks of which only a listing told, beyond `LISTED_MAX` of them.
* Nothing is sent before the client listens, and no more than `UNREAD_MAX` messages that it has not
  taken. What changes meanwhile waits once for each chunk, at most `WAITING_MAX` of them; of more,
  nothing waits, and it is told everything again, from a message that says so (`anew`).
* One call makes messages for what just changed, or one of at most `SLICE_CHUNKS` chunks.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, TypeVar

from sidecar.core.commands import Command, Reply
from sidecar.core.listed_rows import key_list
from sidecar.protocol import EVENT_NAME_BYTES, Events, RemovedEvent, StoredEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sidecar.core.directory import Chunk, FlagChange, Realm
    from sidecar.core.listed_rows import Keys

EVENTS_PER_MESSAGE_MAX: Final = 8192
UNREAD_MAX: Final = 64
WAITING_MAX: Final = 65_536
LISTED_MAX: Final = 32_768
SLICE_CHUNKS: Final = 1024
EMPTY_SLICES_MAX: Final = 64
"""Passed over in one call; a client that gets a message without events asks for the next."""

T = TypeVar("T")

_TIERS: Final = ("host", "store")
_Said = tuple[list[StoredEvent], list[RemovedEvent]]


class EventFeeds:
    """To all schedulers that asked for it, by their sessions."""

    def __init__(self, epoch: int, emit: Callable[[Command], None]) -> None:
        self._epoch = epoch
        self._emit = emit
        self._by_session: dict[int, EventFeed] = {}

    def open(self, session_id: int, realms: Sequence[Realm]) -> None:
        """A scheduler wants to be told of its realms, one for each group."""
        self._by_session[session_id] = EventFeed(self._epoch, realms)

    def close_session(self, session_id: int) -> None:
        """A session is over."""
        self._by_session.pop(session_id, None)

    def listens(self, session_id: int, taken: int) -> None:
        """A session has taken so many messages."""
        telling = self._by_session.get(session_id)
        if telling is not None:
            self._say(session_id, telling.listens(taken))

    def changed(self, changes: list[FlagChange]) -> None:
        """Take what changed."""
        for session_id, telling in self._by_session.items():
            self._say(session_id, telling.changed(changes))

    def listed(self, realm: Realm, keys: Keys) -> None:
        """Take chunks that a listing told of."""
        for session_id, telling in self._by_session.items():
            self._say(session_id, telling.listed(realm, keys))

    def _say(self, session_id: int, messages: list[Events]) -> None:
        for message in messages:
            self._emit(Reply(session_id, message))


class EventFeed:
    """Of the sidecar's life `epoch`, to a scheduler with these realms, one for each group."""

    def __init__(self, epoch: int, realms: Sequence[Realm]) -> None:
        self._epoch = epoch
        self._realms = {realm.realm_id: (number, realm) for number, realm in enumerate(realms)}
        self._sent = 0
        self._taken = 0
        self._listens = False
        self._anew = True
        """Everything is told from the start, as soon as it listens."""
        self._walk: Iterator[_Said] | None = None
        self._waiting: dict[tuple[int, bytes], None] = {}
        self._listed_left = LISTED_MAX

    def listens(self, taken: int) -> list[Events]:
        """The client has taken so many messages; what to send now."""
        self._listens = True
        self._taken = max(self._taken, min(taken, self._sent))
        return self._next()

    def changed(self, changes: list[FlagChange]) -> list[Events]:
        """Take what changed; what to send of it at once."""
        mine = [change for change in changes if change.realm.realm_id in self._realms]
        if not mine or self._anew:
            return []
        if self._waiting or self._sent - self._taken >= UNREAD_MAX:
            self._wait((change.realm.realm_id, change.key) for change in mine)
            return []
        said: _Said = ([], [])
        for change in mine:
            for tier, (was, now) in enumerate(zip(change.was, change.now, strict=True)):
                if was != now:
                    self._say(said, change.realm, change.key, change.chunk, tier, there=now)
        stored, removed = said
        messages = [self._message(part, []) for part in _parts(stored)]
        return messages + [self._message([], part) for part in _parts(removed)]

    def listed(self, realm: Realm, keys: Keys) -> list[Events]:
        """Take chunks (keys of shape [n, 32]) that a listing told of; what to send at once."""
        if realm.realm_id not in self._realms or self._anew or not realm.readable:
            return []
        self._wait((realm.realm_id, key) for key in key_list(keys[: self._listed_left]))
        return self._next() if self._sent == self._taken else []

    def _wait(self, places: Iterable[tuple[int, bytes]]) -> None:
        self._waiting.update(dict.fromkeys(places))
        if len(self._waiting) > WAITING_MAX:
            self._waiting.clear()
            self._walk = None
            self._anew = True

    def _next(self) -> list[Events]:
        """One more message, where there is something to tell and the client listens."""
        if not self._listens or self._sent - self._taken >= UNREAD_MAX:
            return []
        anew = self._anew
        if anew:
            self._anew = False
            self._listed_left = LISTED_MAX
            self._walk = self._slices()
        if self._walk is not None:
            for slice_number, (stored, removed) in enumerate(self._walk):
                if stored or anew or slice_number == EMPTY_SLICES_MAX:
                    return [self._message(stored, removed, anew=anew)]
            self._walk = None
        if self._waiting:
            return [self._message(*self._now(self._some_waiting()), anew=anew)]
        return [self._message([], [], anew=True)] if anew else []

    def _message(
        self, stored: list[StoredEvent], removed: list[RemovedEvent], *, anew: bool = False
    ) -> Events:
        self._sent += 1
        return Events(self._epoch, stored, removed, anew)

    def _some_waiting(self) -> list[tuple[int, bytes]]:
        places = list(itertools.islice(self._waiting, SLICE_CHUNKS))
        for place in places:
            del self._waiting[place]
        return places

    # --- what holds now ------------------------------------------------------------------------

    def _slices(self) -> Iterator[_Said]:
        """Everything, slice by slice; each says what holds when it is made."""
        for number, realm in list(self._realms.values()):
            if realm.readable:
                for names in _batches(realm.stored.names()):
                    if self._listed_left <= 0:
                        break
                    said: _Said = ([], [])
                    for name, _ in names:
                        # Its mask was read with those of others, which may be slices ago.
                        if realm.obtainable(name) == realm.full_mask:
                            self._say_listed(said, number, realm, name)
                    yield said
            # Behind the names alone, so that what is known of a chunk in both tiers counts.
            for keys in _batches(iter(list(realm.chunks))):
                yield self._now([(realm.realm_id, key) for key in keys], gone=False)

    def _now(self, places: Iterable[tuple[int, bytes]], *, gone: bool = True) -> _Said:
        """What holds of these chunks now; with `gone`, also what does not."""
        said: _Said = ([], [])
        for realm_id, key in places:
            _, realm = self._realms[realm_id]
            chunk = realm.chunks.get(key)
            for tier, there in enumerate(realm.flags(key)):
                if there or gone:
                    self._say(said, realm, key, chunk, tier, there=there)
        return said

    def _say(
        self, said: _Said, realm: Realm, key: bytes, chunk: Chunk | None, tier: int, *, there: bool
    ) -> None:
        stored, removed = said
        number, _ = self._realms[realm.realm_id]
        tokens = 0 if chunk is None else _tokens(chunk)
        if not there:
            removed.append(RemovedEvent(key, _TIERS[tier], number))
        elif chunk is not None and tokens:
            stored.append(StoredEvent(key, chunk.parent, tokens, _TIERS[tier], number))
        elif tier == 1:
            self._say_listed(said, number, realm, key)

    def _say_listed(self, said: _Said, number: int, realm: Realm, key: bytes) -> None:
        """A listing tells neither parent nor length: it is named, with the most that it can be."""
        layout = realm.layouts[0]
        if layout is not None and self._listed_left > 0:
            self._listed_left -= 1
            tokens = layout.blocks_per_chunk * layout.block_tokens
            said[0].append(StoredEvent(key[:EVENT_NAME_BYTES], b"", tokens, _TIERS[1], number))


def _tokens(chunk: Chunk) -> int:
    """Tokens of a chunk, 0 while its length is unknown."""
    layout = chunk.realm.layouts[0]
    return 0 if layout is None else chunk.segments[0].num_blocks * layout.block_tokens


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(itertools.islice(items, SLICE_CHUNKS)):
        yield batch


def _parts(items: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(items), EVENTS_PER_MESSAGE_MAX):
        yield items[start : start + EVENTS_PER_MESSAGE_MAX]
