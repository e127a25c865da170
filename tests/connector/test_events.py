"""Events of the tiers for vLLM's publisher, after any sequence of messages; and where it is."""

from __future__ import annotations

import random
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

from connector.events import TierEvents, events_endpoints, vllm_events
from sidecar.protocol import EVENT_NAME_BYTES, Events, Release, RemovedEvent, StoredEvent
from tests.connector.double import DoubleClient, session_of

NOWHERE = bytes(32)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big").ljust(32)[::-1]


def stored(number: int, *, tier: str = "host", group: int = 0) -> StoredEvent:
    return StoredEvent(key_of(number), NOWHERE, 64, tier, group)


def removed(number: int, *, tier: str = "host", group: int = 0) -> RemovedEvent:
    return RemovedEvent(key_of(number), tier, group)


def test_changes_are_taken_once_and_in_order() -> None:
    tiers = TierEvents()
    tiers.set_session("session")
    tiers.receive(Events(1, [stored(1), stored(2)], []))
    assert tiers.take() == [stored(1), stored(2)]
    tiers.receive(Events(1, [], [removed(1), removed(2)]))
    tiers.receive(Events(1, [stored(1)], []))
    assert tiers.take() == [removed(1), removed(2), stored(1)]
    assert tiers.take() == []


def test_an_unknown_block_is_not_removed() -> None:
    tiers = TierEvents()
    tiers.set_session("session")
    tiers.receive(Events(1, [stored(1)], [removed(1), removed(7)]))
    assert tiers.take() == [stored(1), removed(1)]


def test_the_end_of_a_session_removes_all_of_it() -> None:
    tiers = TierEvents()
    tiers.set_session("first")
    both = [stored(1), stored(2, tier="store", group=1)]
    tiers.receive(Events(1, both, []))
    assert tiers.take() == both
    tiers.set_session("second")
    tiers.receive(Events(2, [stored(1)], []))
    assert tiers.take() == [removed(1), removed(2, tier="store", group=1), stored(1)]


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    tiers = TierEvents(blocks_max=4)
    tiers.set_session("session")
    tiers.receive(Events(1, [stored(number) for number in range(4)], []))
    assert tiers.take() == [stored(number) for number in range(4)]
    tiers.receive(Events(1, [stored(1), stored(4), stored(5)], []))
    assert tiers.take() == [stored(1), stored(4), removed(0), stored(5), removed(2)]
    tiers.receive(Events(1, [], [removed(0), removed(3)]))
    assert tiers.take() == [removed(3)]


def test_no_more_is_requested_while_vllm_takes_nothing() -> None:
    client = DoubleClient()
    session = session_of()
    session.wants_events = True
    client.attach(session)
    tiers = TierEvents(blocks_max=2)
    for number in range(6):
        client.inbox.append(Events(session.epoch, [stored(number)], []))
        tiers.poll(client.as_client())
    assert [release.heard for release in client.sent_of(Release)] == [1, 2]
    tiers.take()
    tiers.poll(client.as_client())
    assert client.sent_of(Release)[-1].heard == 6


def test_a_subscriber_has_exactly_the_blocks_that_hold() -> None:
    chooser = random.Random(1)
    tiers = TierEvents()
    tiers.set_session(0)
    there: set[bytes] = set()
    published: set[bytes] = set()
    for step in range(3000):
        number = chooser.randrange(12)
        if chooser.random() < 0.01:
            tiers.set_session(step)
            there.clear()
        elif key_of(number) in there:
            there.discard(key_of(number))
            tiers.receive(Events(1, [], [removed(number)]))
        else:
            there.add(key_of(number))
            tiers.receive(Events(1, [stored(number)], []))
        if chooser.random() < 0.2:
            for event in tiers.take():
                (published.add if isinstance(event, StoredEvent) else published.remove)(event.key)
            assert published == there


def test_runs_are_one_event() -> None:
    chain = [StoredEvent(key_of(1), NOWHERE, 64, "host")]
    chain += [StoredEvent(key_of(n), key_of(n - 1), 64, "host") for n in (2, 3)]
    named = [StoredEvent(key_of(n)[:EVENT_NAME_BYTES], b"", 64, "store") for n in (4, 5)]
    gone = [removed(6), removed(7), removed(8, tier="store")]
    apart = [stored(9), StoredEvent(key_of(10), key_of(9), 16, "host")]
    events = vllm_events(
        [*chain, *named, *gone, *apart], lambda group: f"o{group}", several_groups=False
    )
    assert [len(event.block_hashes) for event in events] == [3, 2, 2, 1, 1, 1]
    assert events[0].parent_block_hash is None
    assert events[-1].parent_block_hash == key_of(9)[:EVENT_NAME_BYTES]


@pytest.mark.parametrize(
    ("endpoint", "replay", "rank", "expected"),
    [
        ("tcp://*:5557", None, 0, ("tcp://127.0.0.1:5557", "")),
        ("tcp://*:5557", "tcp://*:5657", 2, ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:5659")),
        ("ipc:///run/e", "ipc:///run/r", 0, ("ipc:///run/e", "ipc:///run/r")),
        ("tcp://[::]:5557", None, 0, ("tcp://[::1]:5557", "")),
        # vLLM always binds the socket for replays.
        (
            "tcp://*:5557",
            "tcp://127.0.0.1:5558",
            1,
            ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5559"),
        ),
        ("tcp://*:5557", "tcp://0.0.0.0:5558", 0, ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")),
        ("ipc:///run/e", "tcp://elsewhere:5558", 0, ("ipc:///run/e", "")),
        # vLLM connects to these, or takes a port that only it knows, or refuses them.
        ("tcp://router:5557", None, 0, ("", "")),
        ("tcp://0.0.0.0:5557", None, 0, ("", "")),
        ("tcp://*:0", None, 0, ("", "")),
        ("tcp://127.0.0.1:*", None, 0, ("", "")),
        ("ipc:///run/e", None, 1, ("", "")),
    ],
)
def test_where_vllm_publishes_its_own_events(
    endpoint: str,
    replay: str | None,
    rank: int,
    expected: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "vllm.kvlake")
    events = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay)
    assert events_endpoints(events, rank) == expected
    assert events_endpoints(None, rank) == ("", "")
    assert events_endpoints(KVEventsConfig(), rank) == ("", "")
    assert caplog.text.count("cannot follow vLLM's KV events") == (not expected[0])
    cannot = replay is not None and not expected[1]
    assert caplog.text.count("cannot request missed KV events") == cannot


@pytest.mark.skipif(
    not version("vllm").startswith("0.32."), reason="the defect is known of vLLM 0.32 alone"
)
def test_hits_of_a_window_name_blocks_that_are_gone() -> None:
    pool = BlockPool(4, enable_caching=True, hash_block_size=2, enable_kv_cache_events=True)
    request: Any = SimpleNamespace(
        request_id="r",
        block_hashes=[bytes([number]) * 32 for number in range(3)],
        all_token_ids=list(range(6)),
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
        session_id=None,
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=2))
    coordinator: Any = SimpleNamespace(
        single_type_managers=[SimpleNamespace(block_pool=pool)],
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
    )
    hit = [pool.null_block, pool.null_block, *pool.get_new_blocks(1)]
    KVCacheCoordinator.emit_cached_block_events(coordinator, request, (hit,))
    (event,) = pool.take_events()
    assert len(event.block_hashes) == 3, "vLLM names what it has: correct the list of its defects"
