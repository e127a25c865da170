"""What engines tell of their own caches, joined into the stream of KV events of a sidecar.

The events and their publisher are vLLM's own. What one engine's blocks are, by its events, is asked
without a sidecar.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import zmq

from sidecar.config.sections import EventsSettings
from sidecar.core.directory import Directory
from sidecar.events import records as kvevents
from sidecar.events.engine_feed import EngineBlocks, event_of_block
from sidecar.events.publisher import EVENTS_PER_BATCH_MAX, EventStream
from sidecar.events.records import name_of
from sidecar.protocol import HITS_OWNER, Outcome, Role
from sidecar.sessions.namespaces import Realms
from tests import places
from tests.sidecar.client import (
    WAIT_SECONDS_MAX,
    RefusedError,
    RunningSidecar,
    Scheduler,
    Worker,
    attach_message,
    key_of,
    layout_of,
)
from tests.sidecar.configurations import with_events
from tests.sidecar.engine_sockets import (
    endpoints,
    publish,
    publishing,
    removed,
    stored,
    wait_published,
)
from tests.sidecar.subscriber import Place, Subscriber, kv_events

# --- the stream ----------------------------------------------------------------------------------


@pytest.fixture
def publisher(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's own publisher, in this process; what it replays may come as late as it likes."""
    places.patch(monkeypatch, "REPLAY_SECONDS_MAX", WAIT_SECONDS_MAX)
    with publishing(short_directory, buffer_steps=50) as made:
        yield made


@pytest.mark.promise("events-engine")
def test_an_engines_stream_is_joined(
    short_directory: Path, publisher: Any, subscribe: Callable[..., Subscriber]
) -> None:
    """What it told before anybody listened, what it tells then, and its end."""
    publish(publisher, stored(1, 2))
    config = with_events(short_directory)
    attach = endpoints(short_directory)
    with RunningSidecar(config) as sidecar:
        follower = subscribe(sidecar)
        follower.recover()
        with Scheduler(sidecar.path, **attach), Worker(sidecar.path) as worker:
            # One that comes again and again: subscribing takes its time.
            while follower.names("GPU") != {1, 2, 3}:
                publish(publisher, stored(3, parent=2))
                follower.take(50)
                follower.recover()
            assert {place.owner for place in follower.blocks} == {"engine/engine"}
            key = key_of("chunk")
            assert worker.store(1, key, [0, 1, 2, 3]) is Outcome.OK
            publish(publisher, kv_events.BlockRemoved(block_hashes=[2], medium="GPU"))
            follower.until_equal({"GPU": {1, 3}, "CPU": {name_of(key)}})
            # What the connector told vLLM of our own tiers is told once.
            ours = stored(9, ownership="kvlake/0/tp1")
            publish(publisher, ours, stored(4, 5, parent=3))
            follower.until_equal({"GPU": {1, 3, 4, 5}})
            late = subscribe(sidecar)
            late.see()
            assert late.names("GPU") == {1, 3, 4, 5}
            five = late.blocks[Place("GPU", "engine/engine", None)][5]
            assert (five.parent_block_hash, five.token_ids) == (4, [50, 51])
            # Its cache is cleared, and nobody else's.
            publish(publisher, kv_events.AllBlocksCleared())
            follower.until_equal({"GPU": set(), "CPU": {name_of(key)}})
            publish(publisher, stored(6))
            follower.until_equal({"GPU": {6}})
        # The engine is gone.
        follower.until_equal({"GPU": set(), "CPU": {name_of(key)}})
        sidecar.wait_until(lambda status: status["events"]["engines"] == [])


def test_what_an_engine_cannot_replay_is_forgotten(
    short_directory: Path, publisher: Any, subscribe: Callable[..., Subscriber]
) -> None:
    for number in range(80):
        publish(publisher, stored(number))
    wait_published(short_directory, 79)
    attach = endpoints(short_directory)
    with RunningSidecar(with_events(short_directory)) as sidecar, Scheduler(sidecar.path, **attach):
        follower = subscribe(sidecar)
        while 1000 not in follower.names("GPU"):
            publish(publisher, stored(1000))
            follower.take(50)
            follower.recover()
        assert 0 not in follower.names("GPU")
        assert sidecar.status()["events"]["engines"][0]["gaps"] == 1


def test_an_idle_engines_blocks_are_known_at_once(
    short_directory: Path, publisher: Any, subscribe: Callable[..., Subscriber]
) -> None:
    """It tells nothing more, and is asked by every sidecar that it attaches to."""
    publish(publisher, stored(1, 2))
    attach = endpoints(short_directory)
    for _ in range(2):
        with (
            RunningSidecar(with_events(short_directory)) as sidecar,
            Scheduler(sidecar.path, **attach),
        ):
            sidecar.wait_until(
                lambda status: [one["blocks"] for one in status["events"]["engines"]] == [2]
            )
            late = subscribe(sidecar)
            late.see()
            assert late.names("GPU") == {1, 2}
            assert sidecar.status()["events"]["engines"][0]["gaps"] == 0


def test_an_engine_that_cannot_be_followed_is_served(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_sockets(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with RunningSidecar(with_events(short_directory)) as sidecar:
        places.patch(monkeypatch, "EngineFeed", no_sockets)
        attach = {"events_endpoint": f"ipc://{short_directory}/engine"}
        with Scheduler(sidecar.path, **attach), Worker(sidecar.path) as worker:
            assert worker.store(1, key_of("chunk"), [0, 1]) is Outcome.OK
            assert sidecar.status()["events"]["engines"] == []
    assert "an engine's events are not followed" in caplog.text


@pytest.mark.parametrize(
    "place",
    [
        "tcp://10.0.0.1:1",
        "tcp://*:1",
        "ipc://relative",
        "inproc://x",
        "tcp://127.0.0.1",
        "ipc:///" + 107 * "x",
        "ipc:///" + 54 * "\u00e9",
    ],
)
def test_an_engine_elsewhere_is_refused(short_directory: Path, place: str) -> None:
    with (
        RunningSidecar(with_events(short_directory)) as sidecar,
        pytest.raises(RefusedError, match="events_endpoint"),
    ):
        Scheduler(sidecar.path, events_endpoint=place)


# --- one engine's blocks -------------------------------------------------------------------------


def applied(blocks: EngineBlocks, *events: Any) -> list[Any]:
    """What subscribers are told of an engine's events."""
    frame = msgspec.msgpack.encode(kv_events.KVEventBatch(ts=0.0, events=list(events)))
    return blocks.apply(kvevents.decode(frame).events)


def test_an_engines_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "BLOCKS_MAX", 3, package="sidecar")
    blocks = EngineBlocks("e")
    told = applied(blocks, stored(1, 2, 3, 4, 5))
    assert len(blocks) == 3
    assert isinstance(told[-1], kvevents.BlockRemoved)
    assert told[-1].block_hashes == [1, 2]
    assert [event.block_hashes for event in blocks.snapshot()] == [[3], [4], [5]]  # type: ignore[union-attr]


def test_a_tier_that_vllm_names_is_each_engines_own() -> None:
    """What one engine's kvcr tier lost was removed for all engines, and as local."""
    event = stored(1, ownership="kvcr", locality="REMOTE")
    owners: set[str] = set()
    for engine_id in "ab":
        blocks = EngineBlocks(engine_id)
        for told in (*applied(blocks, event), *blocks.snapshot(), *blocks.clear()):
            assert told.locality == "REMOTE"
            owners.add(told.ownership)
    assert owners == {"engine/a/kvcr", "engine/b/kvcr"}


def test_with_vllms_own_offloading_no_copies_are_counted() -> None:
    """Its tiers do not learn which requests have their hits reported as stored blocks."""
    blocks = EngineBlocks("a", counts=False)
    applied(blocks, stored(1, 2), stored(1, 2))
    assert [list(one.block_hashes) for one in applied(blocks, removed(1))] == [[1]]
    assert len(blocks) == 1


def test_a_block_goes_with_its_last_copy() -> None:
    """VLLM tells of each copy that it keeps of a block, and subscribers do not count."""
    blocks = EngineBlocks("e")
    assert len(applied(blocks, stored(1, 2), stored(1, 2), stored(3, parent=2))) == 3
    assert len(blocks) == 3
    (told,) = applied(blocks, removed(1, 3))
    assert told.block_hashes == [3]
    assert applied(blocks, removed(2)) == []
    assert [event.block_hashes for event in blocks.snapshot()] == [[1], [2]]  # type: ignore[union-attr]
    (told,) = applied(blocks, removed(1, 2))
    assert told.block_hashes == [1, 2]
    assert len(blocks) == 0
    # Each group by itself; with the cache all copies go.
    applied(blocks, stored(1, group_idx=0), stored(1, group_idx=1), stored(1, group_idx=1))
    (told,) = applied(blocks, removed(1, group_idx=0))
    assert told.group_idx == 0
    (told,) = applied(blocks, kv_events.AllBlocksCleared())
    assert (told.block_hashes, told.group_idx) == ([1], 1)
    (_, told) = applied(blocks, stored(1, group_idx=1), removed(1, group_idx=1))
    assert told.block_hashes == [1]


@pytest.mark.promise("events-hits")
def test_where_vllm_tells_of_hits_nothing_is_counted() -> None:
    """What is told too often would be there for ever."""
    # Not above: what it imports of vLLM warns, and is there by now.
    from connector.events import hits_event

    assert hits_event().ownership == HITS_OWNER
    blocks = EngineBlocks("e")
    applied(blocks, stored(1, 2), stored(1, 2))
    # The request's hits, before the connector's word for them in the same batch.
    (_, told) = applied(blocks, stored(1, 2), removed(1), hits_event())
    assert told.block_hashes == [1]
    applied(blocks, stored(2), stored(2))
    (told,) = applied(blocks, removed(2))
    assert told.block_hashes == [2]
    assert len(blocks) == 0


def test_of_a_range_that_vllm_kept_in_part_no_tokens_are_made_up() -> None:
    """vLLM keeps the last block of a window of four, and tells the tokens of all."""
    blocks = EngineBlocks("e")
    tokens = list(range(8))
    event = msgspec.structs.replace(stored(4, parent=9), token_ids=tokens)
    (told,) = applied(blocks, event)
    assert isinstance(told, kvevents.BlockStored)
    assert told.token_ids == tokens, "as the engine tells it"
    (held,) = blocks.snapshot()
    assert isinstance(held, kvevents.BlockStored)
    assert (held.block_hashes, held.token_ids, held.parent_block_hash) == ([4], [], None)


def test_a_late_subscriber_is_told_of_an_engines_blocks_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may be a million, and the event loop turns between two parts."""
    made: list[int] = []
    one_of = event_of_block

    def counting(event: kvevents.BlockStored, position: int) -> kvevents.BlockStored:
        made.append(position)
        return one_of(event, position)

    places.patch(monkeypatch, "event_of_block", counting)
    nobody = SimpleNamespace(realms={})
    stream = EventStream(
        cast("Any", SimpleNamespace(publish=lambda *_: None)),
        cast("Any", nobody),
        cast("Any", nobody),
        np.empty(0, np.uint8),
        EventsSettings(),
        first_number=1,
    )
    blocks = EngineBlocks("e")
    applied(blocks, stored(*range(3 * EVENTS_PER_BATCH_MAX)))
    stream.engines[1] = cast("Any", SimpleNamespace(blocks=blocks))
    payloads = stream.snapshot()
    next(payloads)
    assert not made
    for parts in range(1, 4):
        next(payloads)
        assert len(made) == parts * EVENTS_PER_BATCH_MAX
    assert not list(payloads)


def test_a_realm_that_is_forgotten_while_a_late_subscriber_is_told_of_it_ends_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The walk went on, and looked its realm up where it was no more."""
    package = places.find("EventStream").module.__name__
    monkeypatch.setattr(f"{package}.HASHES_PER_EVENT_MAX", 2)
    realms, directory = Realms(), Directory(readable=True)
    [known] = realms.join(attach_message(Role.SCHEDULER).parts)
    held = directory.open_realm(known.realm_id, 1)
    for number in range(6):
        directory.set_stored(held, bytes([number]) * 32, 1, 1)
    held.segment_sources.register(0, layout_of().segment)
    told: list[bytes] = []
    stream = EventStream(
        cast("Any", SimpleNamespace(publish=lambda _, payload: told.append(payload))),
        realms,
        directory,
        np.empty(0, np.uint8),
        EventsSettings(),
        first_number=1,
    )
    payloads = stream.snapshot()
    assert isinstance(kvevents.decode(next(payloads)).events[0], kvevents.AllBlocksCleared)
    assert isinstance(kvevents.decode(next(payloads)).events[0], kvevents.BlockStored)
    del directory.realms[held.realm_id]
    realms.forget([known])
    stream.forgotten(known, list(held.stored_names()))
    assert not list(payloads)
    gone = [
        name
        for event in kvevents.decode(told[-1]).events
        if isinstance(event, kvevents.BlockRemoved)
        for name in event.block_hashes
    ]
    assert sorted(gone) == [bytes([number]) * 16 for number in range(6)]
    realms.close()
