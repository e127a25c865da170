"""The stream of KV events: what it says, in which order, and what a late subscriber is told.

Owns the sequence numbers, the batches that are kept for replay, the translation of changes of the
directory into events, and the walk over what is cached now. Does not own sockets
(`sockets.py`), what an engine's own cache holds (`engine_mirror.py`), nor what changes.

Invariants:

* Numbers grow by one from batch to batch, and from one life of the sidecar to the next. The first
  batch of a life clears everything.
* A batch is told after the change that it tells of. Per block the order of events is that of the
  changes, so whoever applies them has the directory's state, and may apply any of them twice.
* What is kept is bounded in batches and in bytes. Nobody waits for a subscriber.
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
from sidecar.protocol import tiers_owner

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
"""As vLLM has it, where its offloading does not know a chunk's tokens."""

_logger = logging.getLogger("kvlake.events")
_TIERS: Final = ((MEDIUM_CPU, LOCAL), (MEDIUM_STORAGE, REMOTE))


class Told(NamedTuple):
    """One batch as it was told."""

    number: int
    payload: bytes


class Publisher(Protocol):
    """Where batches go. Never waits."""

    def publish(self, batch: Told) -> None:
        """Tell whoever listens."""
        ...


class History:
    """Batches that were told, the newest ones, for replay."""

    def __init__(self, first_number: int, *, batches_max: int, bytes_max: int) -> None:
        self.next_number = first_number
        self.size_bytes = 0
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._kept: deque[Told] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, payload: bytes) -> Told:
        """Give a batch its number and keep it, for a while."""
        told = Told(self.next_number, payload)
        self.next_number += 1
        self._kept.append(told)
        self.size_bytes += len(payload)
        while len(self._kept) > self._batches_max or self.size_bytes > self._bytes_max:
            self.size_bytes -= len(self._kept.popleft().payload)
        return told

    def since(self, number: int) -> list[Told]:
        """What is kept from this number on."""
        if not self._kept or number >= self.next_number:
            return []
        skipped = max(0, number - self._kept[0].number)
        return [self._kept[place] for place in range(skipped, len(self._kept))]


class EventStream:
    """Tells a publisher what the tiers gain and lose.

    Args:
        realms: what a realm is called, and what its slots hold.
        directory: what is cached now.
        memory: the host pool.
        first_number: of this life; higher than any of an earlier one.
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
        self._owners: dict[int, str] = {}
        self.engines: dict[int, EngineFeed] = {}
        """The engines whose own streams are followed, by session."""
        self.tell([AllBlocksCleared()])

    def tell(self, events: Iterable[CacheEvent], data_parallel_rank: int | None = None) -> None:
        """Tell events, in batches of a bounded size; no more than one of them is made ahead."""
        for part in _parts(events, EVENTS_PER_BATCH_MAX):
            batch = EventBatch(self._clock(), part, data_parallel_rank)
            self._publisher.publish(self.history.add(encode(batch)))
            self.events_told += len(part)

    def changed(self, changes: Iterable[FlagChange]) -> None:
        """Tell what became available in, and what went from, the tiers."""
        self.tell(self._events(changes))

    def listed(self, realm: Held, keys: Keys) -> None:
        """Tell of chunks (keys of shape [n, 32]) that the catalog told of."""
        if realm.readable:
            names = map(name_of, key_list(keys))
            self.tell(self._listed(realm, part) for part in _parts(names, HASHES_PER_EVENT_MAX))

    def forgotten(self, realm: RealmLayout, names: list[bytes]) -> None:
        """Tell of chunks that were in the store for a realm of which nothing is known any more."""
        self._owners.pop(realm.realm_id, None)
        medium, locality = _TIERS[1]
        owner = tiers_owner(realm.namespace_digest, realm.topology)
        self.tell(
            BlockRemoved(
                block_hashes=[*part],
                medium=medium,
                locality=locality,
                ownership=owner,
                group_idx=realm.group,
            )
            for part in _parts(names, HASHES_PER_EVENT_MAX)
        )

    def follow(self, session_id: int, engine_id: str, endpoint: str, replay_endpoint: str) -> None:
        """Join an engine's own stream with this one; where it cannot be, it is told once."""
        blocks = EngineBlocks(engine_id)
        try:
            feed = EngineFeed(endpoint, replay_endpoint, blocks, self.tell)
        except zmq.ZMQError as error:
            _logger.warning(
                "an engine's events are not followed",
                extra=fields(engine=engine_id, endpoint=endpoint, error=error),
            )
            return
        self.engines[session_id] = feed

    def leave(self, session_id: int) -> None:
        """An engine is gone, and so are its blocks."""
        feed = self.engines.pop(session_id, None)
        if feed is not None:
            feed.close()

    def end(self) -> None:
        """The last batch: what was told of is not there to be loaded any more."""
        for session_id in list(self.engines):
            self.leave(session_id)
        self.tell([AllBlocksCleared()])

    def snapshot(self) -> Iterator[bytes]:
        """Payloads of batches that say what is cached, for a subscriber that knows nothing.

        It is walked while the cache changes: each payload is true when it is made, and whoever
        applies them, and then every batch told since the walk began, has the state after those.
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
            # Behind the names alone, so that what is known of a chunk in both tiers is said last.
            for keys in _parts(list(realm.chunks), EVENTS_PER_BATCH_MAX):
                if not self._knows(realm):
                    break
                yield from self._payload(self._hosted(realm, keys))

    def _knows(self, realm: Held) -> bool:
        """Whether a realm was not forgotten while the cache was walked."""
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
        # What went, and what a listing named, is said in one event for as long as nothing else
        # comes between: after a start those are millions.
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
        realm, tier, now = kind
        if now:
            return self._listed(realm, names)
        medium, locality = _TIERS[tier]
        return BlockRemoved(
            block_hashes=list(names),
            medium=medium,
            locality=locality,
            ownership=self._owner(realm.realm_id),
            group_idx=self._realms[realm.realm_id].group,
        )

    def _stored(self, realm: Held, chunk: Chunk, tier: int) -> CacheEvent:
        medium, locality = _TIERS[tier]
        knows_tokens = _knows_tokens(realm)
        return BlockStored(
            block_hashes=[name_of(chunk.key)],
            parent_block_hash=None if chunk.parent == ZERO_KEY else name_of(chunk.parent),
            token_ids=self._token_ids(realm, chunk) if knows_tokens else [],
            block_size=_tokens(chunk) if knows_tokens else SIZE_UNKNOWN,
            lora_id=None,
            medium=medium,
            lora_name=None,
            locality=locality,
            ownership=self._owner(realm.realm_id),
            group_idx=self._realms[realm.realm_id].group,
        )

    def _listed(self, realm: Held, names: list[bytes]) -> CacheEvent:
        """Chunks that only the catalog told of, without their tokens and parents."""
        known = self._realms[realm.realm_id]
        most = known.block_tokens * known.blocks_per_chunk
        medium, locality = _TIERS[1]
        return BlockStored(
            block_hashes=list(names),
            parent_block_hash=None,
            token_ids=[],
            block_size=most if _knows_tokens(realm) else SIZE_UNKNOWN,
            lora_id=None,
            medium=medium,
            lora_name=None,
            locality=locality,
            ownership=self._owner(realm.realm_id),
            group_idx=known.group,
        )

    def _token_ids(self, realm: Held, chunk: Chunk) -> list[int]:
        segment = chunk.segments[0]
        templates = self._realms[realm.realm_id].ranks[0].templates
        image = self._memory[segment.slot : segment.slot + templates.slot_bytes]
        return templates[segment.num_blocks].token_ids(image)

    def _owner(self, realm_id: int) -> str:
        owner = self._owners.get(realm_id)
        if owner is None:
            realm = self._realms[realm_id]
            owner = tiers_owner(realm.namespace_digest, realm.topology)
            self._owners[realm_id] = owner
        return owner


def _tokens(chunk: Chunk) -> int:
    """Tokens of a chunk whose first slot is there to read them from, else 0."""
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
