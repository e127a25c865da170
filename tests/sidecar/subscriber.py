"""What a router would write to follow the stream of KV events, with vLLM's own definitions.

A set of blocks for each medium, owner and KV cache group; a gap is asked for, and what is not kept
any more is taken from a snapshot.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import msgspec
import zmq

from sidecar.events.records import END_OF_REPLAY, SNAPSHOT, number_frame, number_of

with warnings.catch_warnings():
    # Its own imports warn, and the house turns warnings into errors.
    warnings.simplefilter("ignore")
    from vllm.distributed import kv_events

__all__ = ["Subscriber", "kv_events"]

WAIT_SECONDS_MAX = 90.0


class Place(NamedTuple):
    """Where a block is. Engines call the blocks of all their groups by the same hashes."""

    medium: str
    owner: str | None
    group: int | None


class Subscriber:
    """A cache of what is cached, kept by events alone."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.blocks: dict[Place, dict[Any, Any]] = {}
        """The blocks of each place, each with the event that told of it."""
        self.ranks: dict[str | None, int | None] = {}
        """Each owner's data-parallel rank, as the last batch that told of it says."""
        self.last = -1
        self.snapshots = 0
        self.replays = 0
        self._decoder = msgspec.msgpack.Decoder(kv_events.KVEventBatch)
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint

    def close(self) -> None:
        self._context.destroy(linger=0)

    def names(self, medium: str) -> set[Any]:
        """What is in a medium, by any holder."""
        return {name for _, name in self.grouped(medium)}

    def grouped(self, medium: str, owner: str | None = None) -> set[tuple[int | None, Any]]:
        """What is in a medium, of one owner or all, by KV cache group and name."""
        return {
            (place.group, name)
            for place, held in self.blocks.items()
            if place.medium == medium and owner in (None, place.owner)
            for name in held
        }

    def until(self, true: Callable[[], bool]) -> None:
        """Take what comes until something holds. Where nothing comes, ask whether it was missed."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not true():
            assert time.monotonic() < deadline, self.blocks
            self.take(100)
            self.recover()

    def until_equal(self, expected: Mapping[str, Set[Any]]) -> None:
        """Take what comes until each medium holds just this."""
        self.until(lambda: all(self.names(where) == held for where, held in expected.items()))

    def take(self, milliseconds: int = 0) -> None:
        """Take what has come, or wait for the first batch."""
        while self._sub.poll(milliseconds):
            _, number, payload = self._sub.recv_multipart()
            self._follow(number_of(number), payload)
            milliseconds = 0

    def _follow(self, number: int, payload: bytes) -> None:
        if self.last >= 0 and number <= self.last:
            return
        if number != self.last + 1:
            self.recover()
            if number <= self.last:
                return
        self._apply(number, payload)

    def recover(self) -> None:
        """Ask for what is missing; if that is not kept any more, for all that is cached."""
        answers = list(self.ask(number_frame(self.last + 1)))
        if not answers:
            return
        if answers[0][0] == self.last + 1 or self._cleared(answers[0][1]):
            self.replays += 1
        else:
            answers = list(self.ask(SNAPSHOT))
            self.snapshots += 1
        for number, payload in answers:
            self._apply(number, payload)

    def _cleared(self, payload: bytes) -> bool:
        events = self._decoder.decode(payload).events
        return isinstance(events[0], kv_events.AllBlocksCleared)

    def see(self) -> None:
        """Take a snapshot of what is cached now, and nothing of what was before."""
        for number, payload in self.ask(SNAPSHOT):
            self._apply(number, payload)

    def ask(self, what: bytes) -> Iterator[tuple[int, bytes]]:
        # Not REQ, which takes one answer.
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", what))
            while True:
                assert socket.poll(int(WAIT_SECONDS_MAX * 1000)), "no answer"
                _, _, number, payload = socket.recv_multipart()
                if number == END_OF_REPLAY:
                    return
                yield number_of(number), payload
        finally:
            socket.close(linger=0)

    def _apply(self, number: int, payload: bytes) -> None:
        self.last = number
        batch = self._decoder.decode(payload)
        for event in batch.events:
            if isinstance(event, kv_events.AllBlocksCleared):
                self.blocks.clear()
                continue
            self.ranks[event.ownership] = batch.data_parallel_rank
            place = Place(event.medium, event.ownership, event.group_idx)
            held = self.blocks.setdefault(place, {})
            for name in event.block_hashes:
                if isinstance(event, kv_events.BlockStored):
                    held[name] = event
                else:
                    held.pop(name, None)
