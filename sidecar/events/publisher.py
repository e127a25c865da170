"""The stream of KV events: its batches, their order, replay and snapshots.

Owns the sequence numbers, the batches kept for replay, the translation of changes of the directory
into events, and snapshots of what is cached. Does not own sockets (`sockets.py`), nor the blocks of
engines' own caches (`engine_feed.py`).

Invariants: numbers grow by one from batch to batch, and from one epoch of the sidecar to the next,
whose first batch clears everything; a batch is published after its changes, and the events of one
block have the order of its changes; applying an event twice is harmless; the history is bounded in
batches and in bytes; nothing waits for a subscriber.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import zmq
from msgspec.structs import replace

from sidecar.config.sections import EventsSettings
from sidecar.core.directory import ZERO_KEY, Chunk, Directory, FlagChange, SegmentState
from sidecar.core.directory import Realm as Held
from sidecar.core.stored_table import Keys, key_list
from sidecar.events.engine_feed import HASHES_PER_EVENT_MAX, EngineFeed, parts
from sidecar.events.records import (
    LOCAL,
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    REMOTE,
    SNAPSHOT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    EventBatch,
    encode,
    name_of,
)
from sidecar.events.sockets import EventSockets
from sidecar.logs import fields
from sidecar.protocol import Attach
from sidecar.sessions.namespaces import RealmLayout, Realms
from tiers.kv.layout import ROW_ENCODING, Bytes

EVENTS_PER_BATCH_MAX: Final = 512
SIZE_UNKNOWN: Final = 0
"""vLLM's value where its offloading does not know a chunk's tokens."""

_logger = logging.getLogger("kvlake.events")
_TIERS: Final = ((MEDIUM_CPU, LOCAL), (MEDIUM_STORAGE, REMOTE))


class History:
    """The newest batches, encoded, for replay."""

    def __init__(self, first_number: int, settings: EventsSettings) -> None:
        self.next_number = first_number
        self.size_bytes = 0
        self._settings = settings
        self._kept: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, payload: bytes) -> int:
        """Keep a batch; returns its number."""
        self._kept.append(payload)
        self.size_bytes += len(payload)
        batches_max, bytes_max = self._settings.buffer_batches, self._settings.buffer_max
        # Never the newest: without an answer a subscriber concludes that it missed nothing.
        while len(self._kept) > 1 and (
            len(self._kept) > batches_max or self.size_bytes > bytes_max
        ):
            self.size_bytes -= len(self._kept.popleft())
        self.next_number += 1
        return self.next_number - 1

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """The kept batches from this number on, with their numbers."""
        first = self.next_number - len(self._kept)
        # A subscriber may ask for any number of 64 bits, and `islice` takes 63.
        skipped = min(max(0, number - first), len(self._kept))
        return list(itertools.islice(enumerate(self._kept, first), skipped, None))


class EventStream:
    """Publishes what the tiers gain and lose.

    Args:
        memory: the host pool.
        first_number: above all numbers of earlier epochs.
    """

    def __init__(
        self,
        sockets: EventSockets,
        realms: Realms,
        directory: Directory,
        memory: Bytes,
        settings: EventsSettings,
        first_number: int,
    ) -> None:
        self.sockets = sockets
        self.history = History(first_number, settings)
        self.events_told = 0
        self._realms = realms
        self._directory = directory
        self._memory = memory
        self.engines: dict[int, EngineFeed] = {}
        self.publish([AllBlocksCleared()])

    def publish(self, events: Iterable[CacheEvent], data_parallel_rank: int | None = None) -> None:
        """Publish events in batches of a bounded size, one after the other."""
        for part in parts(events, EVENTS_PER_BATCH_MAX):
            payload = _encode(part, data_parallel_rank)
            self.sockets.publish(self.history.add(payload), payload)
            self.events_told += len(part)

    def changed(self, changes: Iterable[FlagChange]) -> None:
        """Publish what became available in the tiers, and what was removed."""
        self.publish(self._events(changes))

    def listed(self, realm: Held, keys: Keys) -> None:
        """Publish chunks (keys of shape [n, 32]) that the catalog lists."""
        if realm.readable:
            names = map(name_of, key_list(keys))
            self.publish(self._listed(realm, part) for part in parts(names, HASHES_PER_EVENT_MAX))

    def forgotten(self, realm: RealmLayout, names: list[bytes]) -> None:
        """Publish the removal of stored chunks of a realm that was evicted."""
        self.publish(_removed(realm, 1, part) for part in parts(names, HASHES_PER_EVENT_MAX))

    def follow(self, session_id: int, attach: Attach) -> None:
        """Publish the events of an engine's own stream too, if it can be connected to."""
        try:
            self.engines[session_id] = EngineFeed(attach, self.publish)
        except zmq.ZMQError as error:
            about = fields(engine=attach.engine_id, endpoint=attach.events_endpoint, error=error)
            _logger.warning("an engine's events are not followed", extra=about)

    def leave(self, session_id: int) -> None:
        """Publish the removal of an engine's blocks."""
        feed = self.engines.pop(session_id, None)
        if feed is not None:
            feed.close()

    def end(self) -> None:
        """Publish the last batch: nothing can be loaded any more."""
        for session_id in list(self.engines):
            self.leave(session_id)
        self.publish([AllBlocksCleared()])

    def requested(self, what: bytes) -> Iterator[tuple[int, bytes]]:
        """The batches from the number in a request on, or `SNAPSHOT`, with their numbers."""
        if what != SNAPSHOT:
            return iter(self.history.since(int.from_bytes(what, "big")))
        number = self.history.next_number - 1
        return ((number, payload) for payload in self.snapshot())

    def snapshot(self) -> Iterator[bytes]:
        """Payloads of batches with everything that is cached, for a new subscriber.

        The cache may change during the iteration. Each payload is true when it is yielded. A
        subscriber that applies them all, and then every batch published since the iteration began,
        has the state after those.
        """
        yield _encode([AllBlocksCleared()])
        for feed in list(self.engines.values()):
            for part in parts(feed.blocks.snapshot(), EVENTS_PER_BATCH_MAX):
                yield _encode(part, feed.blocks.data_parallel_rank)
        for realm in list(self._directory.realms.values()):
            # After the bare names, so that the event with all details of a chunk comes last.
            for events in itertools.chain(self._named(realm), self._hosted(realm)):
                yield _encode(events)

    def _named(self, realm: Held) -> Iterator[list[CacheEvent]]:
        if realm.readable:
            for names in parts(realm.stored_names(), HASHES_PER_EVENT_MAX):
                if not self._knows(realm):
                    return
                yield [self._listed(realm, names)]

    def _hosted(self, realm: Held) -> Iterator[list[CacheEvent]]:
        for keys in parts(list(realm.chunks), EVENTS_PER_BATCH_MAX // 2):
            if not self._knows(realm):
                return
            events: list[CacheEvent] = []
            for key in keys:
                chunk = realm.chunks.get(key)
                if chunk is not None and chunk.loadable:
                    tiers = (0, 1) if realm.in_store(key) else (0,)
                    events += [self._stored(realm, chunk, tier) for tier in tiers]
            if events:
                yield events

    def _knows(self, realm: Held) -> bool:
        """Whether a realm still exists."""
        return self._directory.realms.get(realm.realm_id) is realm

    # --- changes into events -------------------------------------------------------------------

    def _events(self, changes: Iterable[FlagChange]) -> Iterator[CacheEvent]:
        # Consecutive removals, and consecutive bare names, share an event: after a start those are
        # millions.
        for (realm, tier, now, plain), run in itertools.groupby(
            _flags(changes), lambda one: one[0]
        ):
            if not plain:
                for _, change in run:
                    assert change.chunk is not None, "it has tokens"
                    yield self._stored(realm, change.chunk, tier)
                continue
            for names in parts((name_of(change.key) for _, change in run), HASHES_PER_EVENT_MAX):
                if now:
                    yield self._listed(realm, names)
                else:
                    yield _removed(self._realms[realm.realm_id], tier, names)

    def _stored(self, realm: Held, chunk: Chunk, tier: int) -> CacheEvent:
        event = self._listed(realm, [name_of(chunk.key)], tier)
        parent = None if chunk.parent == ZERO_KEY else name_of(chunk.parent)
        if not _knows_tokens(realm):
            return replace(event, parent_block_hash=parent)
        token_ids = self._token_ids(realm, chunk)
        size = _tokens(chunk)
        return replace(event, parent_block_hash=parent, token_ids=token_ids, block_size=size)

    def _listed(self, realm: Held, names: list[bytes], tier: int = 1) -> BlockStored:
        """Chunks of which only the names are known: neither their tokens nor parents."""
        medium, locality = _TIERS[tier]
        layout = self._realms[realm.realm_id]
        chunk_tokens = layout.block_tokens * layout.blocks_per_chunk
        return BlockStored(
            block_hashes=list(names),
            parent_block_hash=None,
            token_ids=[],
            block_size=chunk_tokens if _knows_tokens(realm) else SIZE_UNKNOWN,
            lora_id=None,
            medium=medium,
            lora_name=None,
            locality=locality,
            ownership=layout.owner,
            group_idx=layout.group,
        )

    def _token_ids(self, realm: Held, chunk: Chunk) -> list[int]:
        segment = chunk.segments[0]
        templates = self._realms[realm.realm_id].ranks[0].templates
        image = self._memory[segment.slot : segment.slot + templates.slot_bytes]
        return templates[segment.num_blocks].token_ids(image)


def _encode(events: list[CacheEvent], data_parallel_rank: int | None = None) -> bytes:
    return encode(EventBatch(time.time(), events, data_parallel_rank))


def _flags(
    changes: Iterable[FlagChange],
) -> Iterator[tuple[tuple[Held, int, bool, bool], FlagChange]]:
    """Each flag that changed: realm, tier, its value, and whether only the name is known of it."""
    for change in changes:
        for tier in (0, 1):
            now = change.now[tier]
            if change.was[tier] != now:
                plain = not now or change.chunk is None or not _tokens(change.chunk)
                yield (change.realm, tier, now, plain), change


def _removed(realm: RealmLayout, tier: int, names: list[bytes]) -> BlockRemoved:
    medium, locality = _TIERS[tier]
    return BlockRemoved(
        block_hashes=list(names),
        medium=medium,
        locality=locality,
        ownership=realm.owner,
        group_idx=realm.group,
    )


def _tokens(chunk: Chunk) -> int:
    """Tokens of a chunk whose first slot is in host memory, else 0."""
    layout = chunk.realm.layouts[0]
    segment = chunk.segments[0]
    if layout is None or segment.state is not SegmentState.HOST:
        return 0
    return segment.num_blocks * layout.block_tokens


def _knows_tokens(realm: Held) -> bool:
    layout = realm.layouts[0]
    return layout is None or layout.encoding != ROW_ENCODING
