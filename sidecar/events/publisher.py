"""The stream of KV events: its batches, their order, replay and snapshots.

Owns the sequence numbers, the batches kept for replay, the translation of changes of the directory
into events, and snapshots of what is cached. Does not own sockets (`sockets.py`), nor the blocks of
engines' own caches (`engine_mirror.py`).

Invariants:

* Numbers grow by one from batch to batch, and from one epoch of the sidecar to the next. The first
  batch of an epoch clears everything.
* A batch is published after its changes. The events of one block have the order of its changes, so
  a subscriber that applies them has the directory's state. Applying an event twice is harmless.
* The history is bounded in batches and in bytes. Nothing waits for a subscriber.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

import zmq

from sidecar.core.directory import ZERO_KEY, SegmentState
from sidecar.core.stored_table import key_list
from sidecar.events.engine_mirror import EngineBlocks
from sidecar.events.engine_subscriber import EngineFeed
from sidecar.events.records import (
    LOCAL,
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    REMOTE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode,
    name_of,
)
from sidecar.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

    from sidecar.core.directory import Chunk, Directory, FlagChange
    from sidecar.core.directory import Realm as Held
    from sidecar.core.stored_table import Keys
    from sidecar.events.records import CacheEvent
    from sidecar.sessions.namespaces import RealmLayout, Realms

T = TypeVar("T")

EVENTS_PER_BATCH_MAX: Final = 512
HASHES_PER_EVENT_MAX: Final = 4096
SIZE_UNKNOWN: Final = 0
"""vLLM's value where its offloading does not know a chunk's tokens."""

_logger = logging.getLogger("kvlake.events")
_TIERS: Final = ((MEDIUM_CPU, LOCAL), (MEDIUM_STORAGE, REMOTE))


class PublishedBatch(NamedTuple):
    """One batch, encoded."""

    number: int
    payload: bytes


class Publisher(Protocol):
    """Where batches are published. Never waits."""

    def publish(self, batch: PublishedBatch) -> None:
        """Send a batch to all subscribers."""
        ...


class History:
    """The newest batches, for replay."""

    def __init__(self, first_number: int, *, batches_max: int, bytes_max: int) -> None:
        self.next_number = first_number
        self.size_bytes = 0
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._kept: deque[PublishedBatch] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, payload: bytes) -> PublishedBatch:
        """Number a batch and keep it."""
        batch = PublishedBatch(self.next_number, payload)
        self.next_number += 1
        self._kept.append(batch)
        self.size_bytes += len(payload)
        while len(self._kept) > self._batches_max or self.size_bytes > self._bytes_max:
            self.size_bytes -= len(self._kept.popleft().payload)
        return batch

    def since(self, number: int) -> list[PublishedBatch]:
        """The kept batches from this number on."""
        if not self._kept or number >= self.next_number:
            return []
        skipped = max(0, number - self._kept[0].number)
        return [self._kept[place] for place in range(skipped, len(self._kept))]


class EventStream:
    """Publishes what the tiers gain and lose.

    Args:
        memory: the host pool.
        first_number: the first number of this epoch, above all numbers of earlier ones.
    """

    def __init__(
        self,
        publisher: Publisher,
        realms: Realms,
        directory: Directory,
        memory: npt.NDArray[np.uint8],
        *,
        first_number: int,
        batches_max: int,
        bytes_max: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.history = History(first_number, batches_max=batches_max, bytes_max=bytes_max)
        self.events_told = 0
        self._publisher = publisher
        self._realms = realms
        self._directory = directory
        self._memory = memory
        self._clock = clock
        self.engines: dict[int, EngineFeed] = {}
        """Subscriptions to engines' own streams, by session."""
        self.publish([AllBlocksCleared()])

    def publish(self, events: Iterable[CacheEvent], data_parallel_rank: int | None = None) -> None:
        """Publish events in batches of a bounded size, one after the other."""
        for part in _parts(events, EVENTS_PER_BATCH_MAX):
            batch = EventBatch(self._clock(), part, data_parallel_rank)
            self._publisher.publish(self.history.add(encode(batch)))
            self.events_told += len(part)

    def changed(self, changes: Iterable[FlagChange]) -> None:
        """Publish what became available in the tiers, and what was removed."""
        self.publish(self._events(changes))

    def listed(self, realm: Held, keys: Keys) -> None:
        """Publish chunks (keys of shape [n, 32]) that the catalog lists."""
        if realm.readable:
            names = map(name_of, key_list(keys))
            self.publish(self._listed(realm, part) for part in _parts(names, HASHES_PER_EVENT_MAX))

    def forgotten(self, realm: RealmLayout, names: list[bytes]) -> None:
        """Publish the removal of stored chunks of a realm that was evicted."""
        self.publish(_removed(realm, 1, part) for part in _parts(names, HASHES_PER_EVENT_MAX))

    def follow(self, session_id: int, engine_id: str, endpoint: str, replay_endpoint: str) -> None:
        """Publish the events of an engine's own stream too, if it can be connected to."""
        blocks = EngineBlocks(engine_id)
        try:
            feed = EngineFeed(endpoint, replay_endpoint, blocks, self.publish)
        except zmq.ZMQError as error:
            _logger.warning(
                "an engine's events are not followed",
                extra=fields(engine=engine_id, endpoint=endpoint, error=error),
            )
            return
        self.engines[session_id] = feed

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

    def snapshot(self) -> Iterator[bytes]:
        """Payloads of batches with everything that is cached, for a new subscriber.

        The cache may change during the iteration. Each payload is true when it is yielded. A
        subscriber that applies them all, and then every batch published since the iteration began,
        has the state after those.
        """
        yield encode(EventBatch(self._clock(), [AllBlocksCleared()]))
        for feed in list(self.engines.values()):
            yield from self._payload(feed.blocks.snapshot(), feed.blocks.data_parallel_rank)
        for realm in list(self._directory.realms.values()):
            if realm.readable:
                for names in _parts(realm.stored_names(), HASHES_PER_EVENT_MAX):
                    if not self._knows(realm):
                        break
                    yield from self._payload([self._listed(realm, names)])
            # After the bare names, so that the event with all details of a chunk comes last.
            for keys in _parts(list(realm.chunks), EVENTS_PER_BATCH_MAX):
                if not self._knows(realm):
                    break
                yield from self._payload(self._hosted(realm, keys))

    def _knows(self, realm: Held) -> bool:
        """Whether a realm still exists."""
        return self._directory.realms.get(realm.realm_id) is realm

    def _payload(
        self, events: Iterable[CacheEvent], data_parallel_rank: int | None = None
    ) -> Iterator[bytes]:
        for part in _parts(events, EVENTS_PER_BATCH_MAX):
            yield encode(EventBatch(self._clock(), part, data_parallel_rank))

    def _hosted(self, realm: Held, keys: list[bytes]) -> list[CacheEvent]:
        events: list[CacheEvent] = []
        for key in keys:
            chunk = realm.chunks.get(key)
            if chunk is not None and chunk.loadable:
                tiers = (0, 1) if realm.in_store(key) else (0,)
                events += [self._stored(realm, chunk, tier) for tier in tiers]
        return events

    # --- changes into events -------------------------------------------------------------------

    def _events(self, changes: Iterable[FlagChange]) -> Iterator[CacheEvent]:
        # Consecutive removals, and consecutive bare names, share an event: after a start those are
        # millions.
        run: list[bytes] = []
        kind: tuple[Held, int, bool] | None = None
        for change in changes:
            for tier in (0, 1):
                was, now = change.was[tier], change.now[tier]
                if was == now:
                    continue
                chunk = change.chunk
                plain = not now or chunk is None or not _tokens(chunk)
                this = (change.realm, tier, now)
                if run and kind is not None and (not plain or this != kind):
                    yield self._run(kind, run)
                    run = []
                if plain:
                    run.append(name_of(change.key))
                    kind = this
                    if len(run) == HASHES_PER_EVENT_MAX:
                        yield self._run(kind, run)
                        run = []
                elif chunk is not None:
                    yield self._stored(change.realm, chunk, tier)
        if run and kind is not None:
            yield self._run(kind, run)

    def _run(self, kind: tuple[Held, int, bool], names: list[bytes]) -> CacheEvent:
        realm, tier, stored = kind
        return (
            self._listed(realm, names)
            if stored
            else _removed(self._realms[realm.realm_id], tier, names)
        )

    def _stored(self, realm: Held, chunk: Chunk, tier: int) -> CacheEvent:
        knows_tokens = _knows_tokens(realm)
        return _stored_blocks(
            self._realms[realm.realm_id],
            tier,
            [name_of(chunk.key)],
            parent=None if chunk.parent == ZERO_KEY else name_of(chunk.parent),
            token_ids=self._token_ids(realm, chunk) if knows_tokens else [],
            block_size=_tokens(chunk) if knows_tokens else SIZE_UNKNOWN,
        )

    def _listed(self, realm: Held, names: list[bytes]) -> CacheEvent:
        """Chunks known from the catalog alone, without their tokens and parents."""
        known = self._realms[realm.realm_id]
        chunk_tokens = known.block_tokens * known.blocks_per_chunk
        size = chunk_tokens if _knows_tokens(realm) else SIZE_UNKNOWN
        return _stored_blocks(known, 1, names, parent=None, token_ids=[], block_size=size)

    def _token_ids(self, realm: Held, chunk: Chunk) -> list[int]:
        segment = chunk.segments[0]
        templates = self._realms[realm.realm_id].ranks[0].templates
        image = self._memory[segment.slot : segment.slot + templates.slot_bytes]
        return templates[segment.num_blocks].token_ids(image)


def _stored_blocks(
    realm: RealmLayout,
    tier: int,
    names: list[bytes],
    *,
    parent: bytes | None,
    token_ids: list[int],
    block_size: int,
) -> BlockStored:
    medium, locality = _TIERS[tier]
    return BlockStored(
        block_hashes=list(names),
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=block_size,
        lora_id=None,
        medium=medium,
        lora_name=None,
        locality=locality,
        ownership=realm.owner,
        group_idx=realm.group,
    )


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
    return layout is None or layout.knows_tokens


def _parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    part: list[T] = []
    for item in items:
        part.append(item)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part
