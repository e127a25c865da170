"""The event sockets of an engine: vLLM's own publisher, or a double that answers as a test says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sidecar.events.records import END_OF_REPLAY, number_frame, number_of
from tests.sidecar.client import WAIT_SECONDS_MAX
from tests.sidecar.subscriber import kv_events


def stored(*names: int, parent: int | None = None, **fields: Any) -> Any:
    return kv_events.BlockStored(
        block_hashes=list(names),
        parent_block_hash=parent,
        token_ids=[10 * name + n for name in names for n in range(2)],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        **fields,
    )


def removed(*names: int, **fields: Any) -> Any:
    return kv_events.BlockRemoved(block_hashes=list(names), medium="GPU", **fields)


def endpoints(directory: Path) -> dict[str, str]:
    """The fields of a scheduler's attach message that name the sockets."""
    return {
        "events_endpoint": f"ipc://{directory}/engine",
        "events_replay": f"ipc://{directory}/again",
    }


@contextlib.contextmanager
def publishing(directory: Path, **options: Any) -> Iterator[Any]:
    """vLLM's own publisher, in this process."""
    at = endpoints(directory)
    publisher = kv_events.ZmqEventPublisher(
        0, endpoint=at["events_endpoint"], replay_endpoint=at["events_replay"], **options
    )
    try:
        yield publisher
    finally:
        publisher.shutdown()


def publish(publisher: Any, *events: Any) -> None:
    publisher.publish(kv_events.KVEventBatch(ts=1.0, events=list(events)))


def wait_published(directory: Path, number: int) -> None:
    """Wait until vLLM's publisher, which has a thread, has published this batch."""
    with zmq.Context() as context, context.socket(zmq.REQ) as asks:
        asks.setsockopt(zmq.LINGER, 0)
        asks.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_SECONDS_MAX))
        asks.connect(endpoints(directory)["events_replay"])
        first = END_OF_REPLAY
        while first == END_OF_REPLAY:
            asks.send(number_frame(number))
            _, first, _ = asks.recv_multipart()


class DoubleEngine:
    """Has the sockets of vLLM's publisher, and sends what a test says. Block N is in batch N."""

    def __init__(self, directory: Path) -> None:
        self.attach = endpoints(directory)
        self._context = zmq.Context()
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_SECONDS_MAX))
        self._replay.bind(self.attach["events_replay"])
        self._events = self._context.socket(zmq.XPUB)
        self._events.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_SECONDS_MAX))

    def bind_events(self) -> None:
        """Until then, nothing is published."""
        self._events.bind(self.attach["events_endpoint"])

    def wait_for_subscription(self) -> None:
        assert self._events.recv() == b"\1"

    def publish(self, number: int) -> None:
        self._events.send_multipart((b"", number_frame(number), batch(number)))

    def asked(self) -> tuple[bytes, int]:
        """Who requests a replay, and from which batch. Waits for it."""
        asker, empty, first = self._replay.recv_multipart()
        assert empty == b""
        return asker, number_of(first)

    def is_asked(self, milliseconds: int) -> bool:
        """Whether `asked` would return, within this time."""
        return bool(self._replay.poll(milliseconds))

    def answer(self, asker: bytes, numbers: Iterable[int], *, end: bool = True) -> None:
        """Replay these batches."""
        for number in numbers:
            self._replay.send_multipart((asker, b"", b"", number_frame(number), batch(number)))
        if end:
            self._replay.send_multipart((asker, b"", b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        self._context.destroy(linger=0)


def batch(number: int) -> bytes:
    """As published: the batch that stores the block of this name."""
    return msgspec.msgpack.encode(kv_events.KVEventBatch(ts=0.0, events=[stored(number)]))
