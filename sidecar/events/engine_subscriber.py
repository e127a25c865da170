"""Subscribing to one engine's own event stream: its PUB socket, and its replay socket for gaps.

Owns both sockets, the order of batches and the filling of gaps. Does not own the content of batches
(`engine_mirror.py`), nor publishing them (`publisher.py`).

Invariants:

* A replay of everything the engine still has is requested at once, and again, with growing pauses,
  where it does not answer in time: so the blocks of an idle engine are known.
* Batches are applied in the order of their numbers, each once. Where one is missing and is not
  replayed within `REPLAY_SECONDS_MAX`, all of the engine's blocks are dropped: a subscriber may
  know too few blocks, never one that is long gone.
* Batches that wait for a replay are bounded. Nothing here blocks, and no error ends the sidecar.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import zmq

from sidecar.events.curve_socket import ZmqReader
from sidecar.events.engine_mirror import EngineBlocks
from sidecar.events.records import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    CacheEvent,
    decode,
    number_frame,
    number_of,
)
from sidecar.logs import fields
from sidecar.protocol import Attach

BATCHES_WAITING_MAX: Final = 10_000
BATCH_BYTES_MAX: Final = 64 << 20
WAITING_BYTES_MAX: Final = 64 << 20
"""Batches received during a replay. Beyond this, the replay is abandoned."""
REPLAY_SECONDS_MAX: Final = 5.0
PAUSE_SECONDS: Final = 5.0
"""Pause before an engine that did not answer is asked again. Doubles, up to the next constant."""
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
        self.blocks = EngineBlocks(attach.engine_id)
        self.gaps = 0
        """Times that batches were missing and were not replayed."""
        self._publish = publish
        self._last = -1
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._replaying: asyncio.TimerHandle | None = None
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
        if sequence == END_OF_REPLAY:
            self._pause_seconds = PAUSE_SECONDS
            self._end_replay()
        elif self._replaying is not None:
            self._apply(number_of(sequence), payload)

    def _receive(self, sequence: bytes, payload: bytes) -> None:
        number = number_of(sequence)
        waits = self._replaying is not None
        if not waits and not (number > self._last + 1 and self._try_request()):
            self._apply(number, payload)
            return
        self._waiting.append((number, payload))
        self._waiting_bytes += len(payload)
        if len(self._waiting) > BATCHES_WAITING_MAX or self._waiting_bytes > WAITING_BYTES_MAX:
            self._abandon_replay()

    def _try_request(self) -> bool:
        """Request what is missing; False where that fails."""
        try:
            self._request()
        except zmq.ZMQError as error:
            about = fields(owner=self.blocks.owner, error=error)
            _logger.warning("missing batches of an engine cannot be requested", extra=about)
        return self._replaying is not None

    def _request(self) -> None:
        """Request all batches after the last one, if the engine has a replay socket."""
        if not self._replay_endpoint:
            return
        if self._dealer is None:
            self._dealer = self._connect(zmq.DEALER, self._replay_endpoint, self._replied)
        self._dealer.send_multipart((b"", number_frame(self._last + 1)), zmq.NOBLOCK)
        self._replaying = self._loop.call_later(REPLAY_SECONDS_MAX, self._abandon_replay)
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._readers[self._dealer].check()

    def _abandon_replay(self) -> None:
        """Abandon a replay, with its socket: late answers would be taken for those of the next."""
        if self._dealer is not None:
            self._disconnect(self._dealer)
            self._dealer = None
        idle = not self._waiting
        self._end_replay()
        if idle and self._replaying is None:
            # Without new batches no gap would be noticed.
            self._again = self._loop.call_later(self._pause_seconds, self._try_request)
            self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)

    def _end_replay(self) -> None:
        """End a replay: apply the batches received meanwhile."""
        if self._replaying is None:
            return
        self._replaying.cancel()
        self._replaying = None
        self._waiting_bytes = 0
        while self._waiting:
            self._apply(*self._waiting.popleft())

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
