"""Following one engine's own event stream: its PUB socket, its replay socket for gaps, its blocks.

Owns both sockets, the order of batches, the filling of gaps, and a mirror of the engine's blocks.
The mirror turns the engine's events into ones that can stand beside those of other engines: they
name the owner, and "all blocks cleared" becomes the removal of each. Does not own publishing them
(`publisher.py`).

Invariants:

* A replay of everything the engine still has is requested at once, and of what is new again and
  again, with growing pauses: so the blocks of an idle engine are known, also those of batches that
  were lost before the subscription had effect.
* Batches are applied in the order of their numbers, each once. Where one is missing and is not
  replayed within `REPLAY_SECONDS_MAX`, all of the engine's blocks are dropped: a subscriber may
  know too few blocks, never one that is long gone.
* vLLM sends a whole replay in a row, and its socket drops what this process does not take in time.
  So after each replay that brought something and is not whole, the rest is requested.
* Batches that wait for a replay are bounded. Nothing here blocks, and no error ends the sidecar.
* At most `BLOCKS_MAX` blocks are kept, and dropping one yields its removal, so the mirror always
  equals what subscribers were sent.
* vLLM may compute a block more than once, keeps each copy, and publishes an event for each: a
  removal is yielded for the last copy only. If vLLM publishes hits with the same events, copies
  cannot be counted: then the first removal counts. The connector says when that begins; vLLM's own
  offloading does not tell its tiers.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec
import zmq

from sidecar.events.curve_socket import ZmqReader
from sidecar.events.records import (
    END_OF_REPLAY,
    LOCAL,
    MEDIUM_GPU,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    Hash,
    decode,
    number_frame,
    number_of,
)
from sidecar.logs import fields
from sidecar.protocol import HITS_OWNER, OFFLOADING, TIERS_OWNER, Attach

T = TypeVar("T")
BLOCKS_MAX: Final = 1 << 20
HASHES_PER_EVENT_MAX: Final = 4096
BATCHES_WAITING_MAX: Final = 10_000
BATCH_BYTES_MAX: Final = 64 << 20
WAITING_BYTES_MAX: Final = 64 << 20
"""Batches received during a replay. Beyond this, the replay is abandoned."""
REPLAY_QUEUED_MAX: Final = 1000
"""Batches of a replay that libzmq queues. vLLM sends all that it keeps in a row, and its socket
drops what does not fit."""
REPLAY_SECONDS_MAX: Final = 5.0
"""Until the first batch of a replay."""
REPLY_SECONDS_MAX: Final = 0.5
"""Between two batches of a replay: the engine sends them in a row."""
PAUSE_SECONDS: Final = 5.0
"""Pause before an engine is asked again. Doubles, up to the next constant."""
PAUSE_SECONDS_MAX: Final = 300.0

_logger = logging.getLogger("kvlake.events")


class EngineFeed:
    """A subscription that lasts as long as the engine's session. Make it on the loop.

    `publish` is called with events for subscribers, and the engine's data-parallel rank. Raises
    `zmq.ZMQError` where an endpoint is invalid.
    """

    def __init__(
        self, attach: Attach, publish: Callable[[list[CacheEvent], int | None], None]
    ) -> None:
        self.blocks = EngineBlocks(attach.engine_id, counts=attach.topology != OFFLOADING)
        self.gaps = 0
        """Times that batches were missing and were not replayed."""
        self._publish = publish
        self._last = -1
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._replaying: asyncio.TimerHandle | None = None
        self._replayed = False
        """Whether the current replay brought a new batch."""
        self._again: asyncio.TimerHandle | None = None
        self._pause_seconds = PAUSE_SECONDS
        self._loop = asyncio.get_running_loop()
        self._replay_endpoint = attach.events_replay
        """Empty where the engine replays nothing."""
        self._dealer: zmq.Socket[bytes] | None = None
        self._readers: dict[zmq.Socket[bytes], ZmqReader] = {}
        self._context = zmq.Context(io_threads=1)
        try:
            self._connect(zmq.SUB, attach.events_endpoint, self._receive)
            self._request()
        except BaseException:
            self._end()
            raise

    def _connect(
        self, kind: int, endpoint: str, received: Callable[[bytes, bytes], None]
    ) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        sock.setsockopt(zmq.IPV6, int("[" in endpoint))
        if kind == zmq.SUB:
            sock.setsockopt(zmq.SUBSCRIBE, b"")
        else:
            sock.setsockopt(zmq.RCVHWM, REPLAY_QUEUED_MAX)
        sock.connect(endpoint)

        def batch(frames: list[bytes]) -> None:
            if len(frames) >= 3 and len(frames[-2]) == SEQUENCE_BYTES:
                received(frames[-2], frames[-1])

        self._readers[sock] = ZmqReader(sock, batch, None)
        return sock

    def _disconnect(self, sock: zmq.Socket[bytes]) -> None:
        self._readers.pop(sock).close()
        sock.close(linger=0)

    def _replied(self, sequence: bytes, payload: bytes) -> None:
        if self._replaying is None:
            return
        if sequence == END_OF_REPLAY:
            waiting = self._waiting[0][0] if self._waiting else 0
            self._end_replay(whole=waiting <= self._last + 1)
            return
        number = number_of(sequence)
        if self._replayed and number > self._last + 1:
            self._abandon_replay()
            return
        # What is missing before the first new one, the engine no longer has.
        if number > self._last:
            self._replayed = True
            self._replaying.cancel()
            self._replaying = self._loop.call_later(REPLY_SECONDS_MAX, self._abandon_replay)
        self._apply(number, payload)

    def _receive(self, sequence: bytes, payload: bytes) -> None:
        number = number_of(sequence)
        if number <= self._last + 1 and not self._waiting:
            self._apply(number, payload)
            return
        if self._replaying is None:
            self._pause_seconds = PAUSE_SECONDS
            if not self._try_request():
                self._apply(number, payload)
                return
        self._waiting.append((number, payload))
        self._waiting_bytes += len(payload)
        if len(self._waiting) > BATCHES_WAITING_MAX or self._waiting_bytes > WAITING_BYTES_MAX:
            self._abandon_replay(whole=True)

    def _try_request(self) -> bool:
        """Request what is missing; False where that fails."""
        try:
            self._request()
        except zmq.ZMQError as error:
            about = fields(owner=self.blocks.owner, error=error)
            _logger.warning("missing batches of an engine cannot be requested", extra=about)
            self._ask_later()
        return self._replaying is not None

    def _request(self) -> None:
        """Request all batches after the last one, if the engine has a replay socket."""
        if not self._replay_endpoint:
            return
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._dealer is None:
            self._dealer = self._connect(zmq.DEALER, self._replay_endpoint, self._replied)
        self._dealer.send_multipart((b"", number_frame(self._last + 1)), zmq.NOBLOCK)
        self._replaying = self._loop.call_later(REPLAY_SECONDS_MAX, self._abandon_replay)
        self._replayed = False
        self._readers[self._dealer].check()

    def _abandon_replay(self, *, whole: bool = False) -> None:
        """Abandon a replay, with its socket: late answers would be taken for those of the next."""
        if self._dealer is not None:
            self._disconnect(self._dealer)
            self._dealer = None
        self._end_replay(whole=whole)

    def _ask_later(self) -> None:
        # Without new batches no gap would be noticed.
        if self._replaying is None and self._again is None:
            self._again = self._loop.call_later(self._pause_seconds, self._try_request)
            self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)

    def _end_replay(self, *, whole: bool) -> None:
        """End a replay: request its rest, or apply the batches received meanwhile."""
        if self._replaying is None:
            return
        self._replaying.cancel()
        self._replaying = None
        if not whole and self._replayed and self._try_request():
            return
        self._waiting_bytes = 0
        while self._waiting:
            self._apply(*self._waiting.popleft())
        self._ask_later()

    def _apply(self, number: int, payload: bytes) -> None:
        if number <= self._last:
            return
        missed = number > self._last + 1
        self._last = number
        if missed:
            self._lost("batches are missing, and were not replayed")
        try:
            batch = decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._lost(f"a batch cannot be read: {error}")
            return
        self.blocks.data_parallel_rank = batch.data_parallel_rank
        self._publish(self.blocks.apply(batch.events), batch.data_parallel_rank)

    def _lost(self, reason: str) -> None:
        self.gaps += 1
        about = fields(owner=self.blocks.owner, reason=reason)
        _logger.warning("an engine's blocks are dropped", extra=about)
        self._publish(self.blocks.clear(), self.blocks.data_parallel_rank)

    def close(self) -> None:
        """End the subscription, and drop the engine's blocks."""
        self._end()
        self._publish(self.blocks.clear(), self.blocks.data_parallel_rank)

    def _end(self) -> None:
        for timer in (self._replaying, self._again):
            if timer is not None:
                timer.cancel()
        for sock in list(self._readers):
            self._disconnect(sock)
        self._context.destroy(linger=0)


# --- the mirror ----------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Identifies a block: engines with several KV cache groups use one hash in each."""

    medium: str
    group_idx: int | None
    ownership: str
    name: Hash


class _Held(NamedTuple):
    """A block, by its last event and its position there."""

    event: BlockStored
    position: int
    copies: int


class EngineBlocks:
    """One engine's blocks, by their events."""

    def __init__(self, engine_id: str, *, counts: bool = True) -> None:
        self.owner = f"engine/{engine_id}"
        self.data_parallel_rank: int | None = None
        self._held: dict[_Place, _Held] = {}
        self._counts = counts
        """Whether copies are counted: each event of a stored block is one."""

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Apply events of the engine; returns the events for subscribers."""
        changes: list[CacheEvent] = []
        batch = list(events)
        hits = (isinstance(one, BlockRemoved) and one.ownership == HITS_OWNER for one in batch)
        if self._counts and any(hits):
            self._counts = False
            self._held = {place: held._replace(copies=1) for place, held in self._held.items()}
        for event in batch:
            match event:
                case AllBlocksCleared():
                    changes += self.clear()
                case BlockStored() | BlockRemoved():
                    if not (event.ownership or "").startswith(TIERS_OWNER):
                        changes += self._apply(event)
        while len(self._held) > BLOCKS_MAX:
            oldest = list(itertools.islice(self._held, len(self._held) - BLOCKS_MAX))
            changes += self._drop(oldest)
        return changes

    def _apply(self, event: BlockStored | BlockRemoved) -> list[CacheEvent]:
        named = msgspec.structs.replace(
            event,
            medium=event.medium or MEDIUM_GPU,
            locality=event.locality or LOCAL,
            # A tier of vLLM's offloading has the same name in each engine.
            ownership=f"{self.owner}/{event.ownership}" if event.ownership else self.owner,
        )
        gone: list[Hash] = []
        for position, name in enumerate(event.block_hashes):
            place = _Place(named.medium or "", named.group_idx, named.ownership or "", name)
            held = self._held.get(place)
            copies = held.copies if held is not None and self._counts else 0
            if isinstance(named, BlockStored):
                # Removed first, so that the newest is last.
                self._held.pop(place, None)
                self._held[place] = _Held(named, position, copies + 1)
            elif held is not None and copies > 1:
                self._held[place] = held._replace(copies=copies - 1)
            else:
                self._held.pop(place, None)
                gone.append(name)
        if isinstance(named, BlockStored):
            return [named]
        return [msgspec.structs.replace(named, block_hashes=gone)] if gone else []

    def clear(self) -> list[CacheEvent]:
        """Drop all blocks; returns the events for subscribers."""
        return self._drop(list(self._held))

    def _drop(self, places: list[_Place]) -> list[CacheEvent]:
        events: list[CacheEvent] = []
        runs = itertools.groupby(places, lambda one: (*one[:3], self._held[one].event.locality))
        for (medium, group_idx, owner, locality), run in runs:
            events += [
                BlockRemoved(names, medium, group_idx, locality, owner)
                for names in parts((place.name for place in run), HASHES_PER_EVENT_MAX)
            ]
        for place in places:
            del self._held[place]
        return events

    def snapshot(self) -> Iterator[CacheEvent]:
        """An event for each block, oldest first."""
        for held in list(self._held.values()):
            yield event_of_block(held.event, held.position)


def parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Consecutive lists of at most `size` items."""
    iterator = iter(items)
    while part := list(itertools.islice(iterator, size)):
        yield part


def event_of_block(event: BlockStored, position: int) -> BlockStored:
    """The event of one of its blocks."""
    size = event.block_size
    hashes, tokens, parent = event.block_hashes, event.token_ids, event.parent_block_hash
    if len(tokens) == len(hashes) * size:
        tokens = tokens[position * size : (position + 1) * size]
        parent = hashes[position - 1] if position else parent
    else:
        # For sliding windows and states vLLM stores some blocks of a range, but sends the tokens of
        # all: which of them are this block's is unknown.
        tokens, parent = [], None
    extra, ahead = event.extra_keys, event.lookahead_token_ids
    return msgspec.structs.replace(
        event,
        block_hashes=[hashes[position]],
        parent_block_hash=parent,
        token_ids=tokens,
        extra_keys=None if extra is None else extra[position : position + 1],
        lookahead_token_ids=None if ahead is None else ahead[position : position + 1],
    )
