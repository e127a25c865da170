"""The tiers' changes for vLLM's KV event publisher, and where vLLM publishes its own events.

Owns which blocks are published, by name, tier and group, and the changes that vLLM has not taken
yet. Does not own the sidecar's own event stream (`docs/reference/events.md`).

Invariants:

* A subscriber that applies every event in order never has a block that is gone. A block is
  published as removed exactly if it was published as stored. The end of a session with the sidecar
  removes all of them. After a reset of vLLM's own cache, which clears every block of its
  subscribers, what holds is published again.
* At most `blocks_max` blocks are published at a time: the oldest is published as removed to make
  room. Beyond as many changes that vLLM has not taken, no more are requested.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from connector.client import Client
from sidecar.protocol import (
    EVENT_NAME_BYTES,
    HITS_OWNER,
    Events,
    Release,
    RemovedEvent,
    ServerMessage,
    StoredEvent,
)
from sidecar.protocol.codec import is_local_endpoint

logger = logging.getLogger("vllm.kvlake")

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

BLOCKS_MAX: Final = 1 << 18
HASHES_PER_EVENT_MAX: Final = 4096

TierEvent: TypeAlias = StoredEvent | RemovedEvent
_Place: TypeAlias = tuple[bytes, str, int]


class TierEvents:
    """Changes of the tiers, as the sidecar of each session reports them."""

    def __init__(self, *, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._session: object = None
        self._received, self._acknowledged = 0, -1
        """Messages of the session, and how many of them were acknowledged."""
        self._published: dict[_Place, StoredEvent] = {}
        """The last event of each block, oldest first."""
        self._changes: list[TierEvent] = []

    def poll(self, client: Client) -> list[ServerMessage]:
        """Receive and acknowledge events that have arrived; returns the other messages."""
        session = client.session
        self.set_session(session)
        others: list[ServerMessage] = []
        for message in client.poll(session):
            if isinstance(message, Events):
                self.receive(message)
            else:
                others.append(message)
        unread = self._acknowledged != self._received and len(self._changes) <= self._blocks_max
        if session is not None and session.wants_events and unread:
            release = Release(session.epoch, [], [], heard=self._received)
            if client.send(session, release):
                self._acknowledged = self._received
        return others

    def set_session(self, session: object) -> None:
        """Take the live session, None for none. Blocks of an earlier one are removed."""
        if session is not self._session:
            self._session = session
            self._received, self._acknowledged = 0, -1
            self._remove_all()

    def receive(self, message: Events) -> None:
        """Take a message of the live session."""
        self._received += 1
        if message.anew:
            self._remove_all()
        for stored in message.stored:
            place = _place(stored)
            # Removed first, so that the newest is last.
            self._published.pop(place, None)
            self._published[place] = stored
            self._changes.append(stored)
            if len(self._published) > self._blocks_max:
                self._remove(next(iter(self._published)))
        for removed in message.removed:
            self._remove(_place(removed))

    def republish(self) -> None:
        """Publish all blocks again: vLLM tells its subscribers that every block is gone."""
        self._changes = list(self._published.values())

    def take(self) -> list[TierEvent]:
        """What changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _remove(self, place: _Place) -> None:
        stored = self._published.pop(place, None)
        if stored is not None:
            self._changes.append(RemovedEvent(stored.key, stored.tier, stored.group))

    def _remove_all(self) -> None:
        for place in list(self._published):
            self._remove(place)


def _place(event: TierEvent) -> _Place:
    return (event.key[:EVENT_NAME_BYTES], event.tier, event.group)


# vLLM is imported late: the scheduler role runs in tests and benchmarks without it.
def vllm_events(
    events: Iterable[TierEvent], owner: Callable[[int], str], *, several_groups: bool
) -> "list[KVCacheEvent]":
    """As vLLM's events, without tokens; consecutive chunks are joined. `owner` is by group."""
    runs: list[list[TierEvent]] = []
    for event in events:
        if runs and len(runs[-1]) < HASHES_PER_EVENT_MAX and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [_vllm_event(run, owner, several_groups=several_groups) for run in runs]


def _continues(last: TierEvent, event: TierEvent) -> bool:
    """Whether `event` can join the event of vLLM that ends with `last`."""
    if (event.tier, event.group) != (last.tier, last.group):
        return False
    if isinstance(event, StoredEvent):
        if not isinstance(last, StoredEvent) or event.num_tokens != last.num_tokens:
            return False
        named_only = len(event.key) == len(last.key) == EVENT_NAME_BYTES
        return named_only or event.parent == last.key
    return not isinstance(last, StoredEvent)


def _vllm_event(
    run: list[TierEvent], owner: Callable[[int], str], *, several_groups: bool
) -> "KVCacheEvent":
    from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored

    first = run[0]
    host = first.tier == "host"
    fields: dict[str, Any] = {
        "block_hashes": [event.key[:EVENT_NAME_BYTES] for event in run],
        "medium": MEDIUM_CPU if host else "STORAGE",
        "locality": "LOCAL" if host else "REMOTE",
        "ownership": owner(first.group),
        "group_idx": first.group if several_groups else None,
    }
    if isinstance(first, RemovedEvent):
        return BlockRemoved(**fields)
    return BlockStored(
        parent_block_hash=first.parent[:EVENT_NAME_BYTES] if any(first.parent) else None,
        token_ids=[],
        block_size=first.num_tokens,
        lora_id=None,
        lora_name=None,
        **fields,
    )


def hits_event() -> "KVCacheEvent":
    """Tells the sidecar, and no other subscriber, that vLLM publishes hits like new blocks."""
    from vllm.distributed.kv_events import MEDIUM_GPU, BlockRemoved

    return BlockRemoved(block_hashes=[], medium=MEDIUM_GPU, ownership=HITS_OWNER)


def events_endpoints(events: Any, data_parallel_rank: int) -> tuple[str, str]:
    """Where a process of this machine subscribes to vLLM's own KV events and asks for replays.

    Empty where vLLM publishes none, connects to its subscriber instead of binding (it always binds
    the socket for replays), or takes a port that only it knows.
    """
    from vllm.distributed.kv_events import ZmqEventPublisher

    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return "", ""
    places: list[str] = []
    # vLLM connects to 0.0.0.0 instead of binding it, except for replays.
    replays = (events.replay_endpoint or "").replace("tcp://0.0.0.0:", "tcp://*:")
    for given in (events.endpoint, replays):
        try:
            place = ZmqEventPublisher.offset_endpoint_port(given, data_parallel_rank) or ""
        except ValueError:
            # vLLM itself refuses such an endpoint for this rank, and logs that.
            place = ""
        place = place.replace("tcp://*:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
        bound = bool(places) or place.startswith("ipc:///") or "*" in given or "::" in given
        known = is_local_endpoint(place) and not place.endswith(":0")
        places.append(place if bound and known else "")
    endpoint, replay = places
    for place, what, given in (
        (endpoint, "follow vLLM's KV events", events.endpoint),
        (replay, "request missed KV events of vLLM", events.replay_endpoint),
    ):
        if given and not place:
            logger.info(
                "kvlake: the sidecar cannot %s at %r: it needs a socket that vLLM binds on this "
                "machine, such as ipc:///run/kvlake/engine.sock or tcp://*:5557",
                what,
                given,
            )
    return (endpoint, replay) if endpoint else ("", "")
