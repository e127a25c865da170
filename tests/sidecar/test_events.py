"""The stream of KV events of a sidecar that runs, read with vLLM's own definitions.

The subscriber is in `subscriber.py`; what engines tell of their own caches, in the same stream, is
in `test_engine_events.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sidecar.config.sections import EventsSettings
from sidecar.events import records as kvevents
from sidecar.events.publisher import History
from sidecar.events.records import SNAPSHOT, name_of, number_frame
from sidecar.protocol import Group, Outcome, Role, StoreJob
from sidecar.sessions.namespaces import Realms
from tests.sidecar.client import (
    BLOCK_TOKENS,
    RunningSidecar,
    Scheduler,
    Worker,
    attach_message,
    config_in,
    key_of,
)
from tests.sidecar.configurations import with_events
from tests.sidecar.subscriber import Subscriber, kv_events
from tiers.kv.index import FLAG_HOST, FLAG_STORE

# --- the format ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BlockStored", "BlockRemoved", "AllBlocksCleared"])
def test_the_records_are_vllms(name: str) -> None:
    theirs = set(getattr(kv_events, name).__struct_fields__)
    ours = set(getattr(kvevents, name).__struct_fields__)
    # What a release newer or older than the installed one has is left out where it is not given.
    assert theirs <= ours
    assert ours - theirs <= {"lookahead_token_ids"}


def test_what_vllm_encodes_is_what_we_decode_and_back() -> None:
    stored = kv_events.BlockStored(
        block_hashes=[1, b"h" * 32],
        parent_block_hash=-5,
        token_ids=[1, 2],
        block_size=1,
        lora_id=None,
        medium="GPU",
        lora_name="adapter",
        extra_keys=[("salt",), None],
        group_idx=1,
        kv_cache_spec_kind="full_attention",
    )
    removed = kv_events.BlockRemoved(block_hashes=[b"h" * 32], medium=None)
    batch = kv_events.KVEventBatch(
        ts=1.5, events=[stored, removed, kv_events.AllBlocksCleared()], data_parallel_rank=2
    )
    theirs = msgspec.msgpack.encode(batch)
    ours = kvevents.decode(theirs)
    # Field by field: a record that may have more than 15 has a longer head.
    assert msgspec.msgpack.decode(kvevents.encode(ours)) == msgspec.msgpack.decode(theirs)
    assert msgspec.msgpack.decode(kvevents.encode(ours), type=kv_events.KVEventBatch) == batch


# --- one stream ----------------------------------------------------------------------------------


def test_off_by_default(short_directory: Path) -> None:
    with RunningSidecar(config_in(short_directory)) as sidecar:
        assert sidecar.events == ""
        assert sidecar.status()["events"] is None
        assert not (sidecar.path.parent / "events.sock").exists()


def test_what_an_event_says(short_directory: Path, subscribe: Callable[..., Subscriber]) -> None:
    with RunningSidecar(with_events(short_directory, events={"topic": "kv@here"})) as sidecar:
        subscriber = subscribe(sidecar, topic="kv@here")
        with Worker(sidecar.path) as worker:
            first, second = key_of("one"), key_of("two")
            assert worker.store(1, first, [0, 1, 2, 3]) is Outcome.OK
            assert worker.store(2, second, [4, 5], parent=first) is Outcome.OK
            subscriber.recover()
            subscriber.until(lambda: len(subscriber.names("CPU")) == 2)
            ((place, held),) = subscriber.blocks.items()
            assert place.owner is not None
            assert place.owner.startswith("kvlake/")
            assert place.owner.endswith(f"/tp1.pp1.b{BLOCK_TOKENS}")
            assert held[name_of(first)].parent_block_hash is None
            event = held[name_of(second)]
            assert event.parent_block_hash == name_of(first)
            assert event.block_size == 2 * BLOCK_TOKENS
            assert event.token_ids == [second[0] + n for n in range(2 * BLOCK_TOKENS)]
            assert (event.medium, event.locality) == ("CPU", "LOCAL")
    assert not (sidecar.path.parent / "events.sock").exists()


def test_realms_of_one_model_have_owners_of_their_own() -> None:
    """They name equal chunks alike: the removal in one took the other's from a subscriber."""
    realms = Realms()
    group = Group(b'{"group":1}', 16, 1)
    for changes in (
        {},
        {"block_tokens": 32, "blocks_per_chunk": 2},
        {"groups": (group,)},
        # Another home alone: a recurrent group's chunks do not depend on the first group's.
        {"groups": (group,), "namespace": b'{"chunk_tokens":512}'},
        {"groups": (group,), "block_tokens": 32, "blocks_per_chunk": 2},
    ):
        realms.join(attach_message(Role.SCHEDULER, **changes).parts)
    owners = [realm.owner for realm in realms.all()]
    assert len(set(owners)) == len(owners) == 6
    realms.close()


def test_the_store(short_directory: Path, subscribe: Callable[..., Subscriber]) -> None:
    store = {"url": f"file://{short_directory}/bucket", "refresh_seconds": 0.05}
    key = key_of("written")
    with RunningSidecar(with_events(short_directory, store=store)) as sidecar:
        subscriber = subscribe(sidecar)
        with Worker(sidecar.path) as worker:
            assert worker.store(1, key, [0, 1, 2, 3]) is Outcome.OK
            subscriber.until(lambda: subscriber.names("STORAGE") == {name_of(key)})
            subscriber.recover()
            (event,) = (
                event
                for place, held in subscriber.blocks.items()
                if place.medium == "STORAGE"
                for event in held.values()
            )
            assert event.locality == "REMOTE"
            assert len(event.token_ids) == event.block_size == 4 * BLOCK_TOKENS
    # Another sidecar learns of it from the catalog alone: its name, and not what is in it.
    other = short_directory / "other"
    other.mkdir()
    with RunningSidecar(with_events(other, store=store)) as sidecar:
        subscriber = subscribe(sidecar)
        with Scheduler(sidecar.path), Worker(sidecar.path):
            subscriber.until(lambda: subscriber.names("STORAGE") == {name_of(key)})
            assert subscriber.names("CPU") == set()
            late = subscribe(sidecar)
            late.see()
            assert late.names("STORAGE") == {name_of(key)}


# --- the directory, rebuilt ----------------------------------------------------------------------


def in_directory(sidecar: RunningSidecar, keys: list[bytes]) -> dict[str, set[bytes]]:
    with Scheduler(sidecar.path) as scheduler:
        flags = dict(zip(keys, scheduler.flags(*keys), strict=True))
    return {
        medium: {name_of(key) for key, flag in flags.items() if flag & bit}
        for medium, bit in (("CPU", FLAG_HOST), ("STORAGE", FLAG_STORE))
    }


@pytest.mark.promise("events-any-order", "events-tiers")
@pytest.mark.slow
def test_a_random_life_with_evictions_and_a_restart(
    short_directory: Path, subscribe: Callable[..., Subscriber]
) -> None:
    """Every subscriber has, at every rest, what the directory has; so has a late one."""
    chooser = random.Random(7)
    store = {
        "url": f"file://{short_directory}/bucket",
        "refresh_seconds": 0.05,
        "catalog_flush": 0.05,
    }
    config = with_events(
        short_directory,
        host={"size": 2 << 20, "after_stop": "keep"},
        store=store,
        events={"buffer_batches": 40},
    )
    keys: list[bytes] = []
    evicted = 0
    follower: Subscriber | None = None
    for life in range(2):
        with RunningSidecar(config) as sidecar:
            if follower is None:
                follower = subscribe(sidecar)
            with Worker(sidecar.path) as worker:
                for step in range(12):
                    jobs = []
                    for _ in range(chooser.randrange(1, 12)):
                        key = key_of(life, step, chooser.random())
                        parent = chooser.choice([*keys, bytes(32)])
                        blocks = chooser.sample(range(64), chooser.randrange(1, 5))
                        jobs.append(worker.chunk(key, blocks, parent))
                        keys.append(key)
                    job_id = 1 + 100 * life + step
                    worker.submit(stores=[StoreJob(job_id, jobs)])
                    worker.outcome(job_id)
                    if chooser.random() < 0.5:
                        follower.take()
                idle = sidecar.wait_until(lambda status: not any(status["pending"].values()))
                evicted += idle["counters"]["chunks_evicted"]
                late = subscribe(sidecar)
                late.recover()
                expected: dict[str, set[bytes]] = {}

                def equal(one: Subscriber) -> bool:
                    # Looked at again each time: the catalog is still being read in a second life.
                    expected.update(in_directory(sidecar, keys))  # noqa: B023
                    return all(one.names(where) == held for where, held in expected.items())  # noqa: B023

                follower.until(partial(equal, follower))
                late.until(partial(equal, late))
                assert expected["CPU"]
                assert expected["STORAGE"]
                assert late.snapshots == 1, "the first batches are not kept any more"
    assert evicted > 0
    assert follower is not None
    assert follower.snapshots + follower.replays >= 1, "the restart was noticed"


def test_numbers_grow_though_the_clock_went_back(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_events(short_directory)
    number = 0
    for now in (5_000, 4_000, 10**18, 3_000):
        monkeypatch.setattr("time.time_ns", lambda now=now: now)
        with RunningSidecar(config) as sidecar:
            begun = sidecar.status()["events"]["next_number"]
            assert begun > number
            number = begun


def test_removed_sockets_are_made_again(
    short_directory: Path, subscribe: Callable[..., Subscriber]
) -> None:
    with (
        RunningSidecar(with_events(short_directory)) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        here_before = subscribe(sidecar)
        assert worker.store(1, key_of("one"), [0]) is Outcome.OK
        here_before.until_equal({"CPU": {name_of(key_of("one"))}})
        sockets = [sidecar.path.parent / name for name in ("events.sock", "replay.sock")]
        for path in sockets:
            path.unlink()
        here_before.until(lambda: all(path.exists() for path in sockets))
        newcomer = subscribe(sidecar)
        newcomer.recover()
        assert worker.store(2, key_of("two"), [0]) is Outcome.OK
        for subscriber in (here_before, newcomer):
            subscriber.until_equal({"CPU": {name_of(key_of("one")), name_of(key_of("two"))}})
        assert b"kvlake_sockets_renewed_total 2.0" in sidecar.get("/metrics")
    assert not any(path.exists() for path in sockets)


# --- who does not read, and who may not ----------------------------------------------------------


def test_a_subscriber_that_does_not_read_holds_nobody_up(
    short_directory: Path, subscribe: Callable[..., Subscriber]
) -> None:
    config = with_events(short_directory, events={"queue_batches": 1, "buffer_batches": 5000})
    with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:
        context = zmq.Context()
        try:
            sleeper = context.socket(zmq.SUB)
            sleeper.setsockopt(zmq.RCVHWM, 1)
            sleeper.setsockopt(zmq.RCVBUF, 1)
            sleeper.setsockopt_string(zmq.SUBSCRIBE, "")
            sleeper.connect(sidecar.events)
            dropped = 0
            job_id = 0
            while not dropped:
                keys = [key_of(job_id, number) for number in range(40)]
                job_id += 1
                chunks = [worker.chunk(key, [0, 1, 2, 3]) for key in keys]
                worker.submit(stores=[StoreJob(job_id, chunks)])
                worker.outcome(job_id)
                dropped = sidecar.status()["events"]["batches_dropped"]
                assert job_id < 2000
        finally:
            context.destroy(linger=0)
        reader = subscribe(sidecar)
        reader.recover()
        keys = [key_of(job, number) for job in range(job_id) for number in range(40)]
        expected = in_directory(sidecar, keys)
        reader.until(lambda: reader.names("CPU") == expected["CPU"])


def test_requests_that_make_no_sense(
    short_directory: Path, subscribe: Callable[..., Subscriber]
) -> None:
    with RunningSidecar(with_events(short_directory)) as sidecar:
        subscriber = subscribe(sidecar)
        context = zmq.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.connect(sidecar.replay)
            for frames in ((b"",), (b"", b"1"), (b"", b"x" * 8, b"y"), (b"x" * 900,)):
                dealer.send_multipart(frames)
            sidecar.wait_until(lambda status: status["events"]["requests_dropped"] == 4)
        finally:
            context.destroy(linger=0)
        # Numbers that will never come, and then a sensible question.
        for number in (b"\x7f" + bytes(7), b"\xff" * 8):
            assert list(subscriber.ask(number)) == []
        assert len(list(subscriber.ask(number_frame(0)))) == 1


@pytest.mark.promise("event-keys")
def test_over_tcp_with_keys(short_directory: Path, subscribe: Callable[..., Subscriber]) -> None:
    """A peer without a key that the configuration names hears nothing, and gets no answer."""
    server_public, server_secret = zmq.curve_keypair()
    public, secret = zmq.curve_keypair()
    file = short_directory / "key"
    file.write_bytes(server_secret)
    file.chmod(0o600)
    events = {
        "endpoint": "tcp://0.0.0.0:0",
        "replay_endpoint": "tcp://0.0.0.0:0",
        "curve_secret_key_file": str(file),
        "subscribers": [public.decode()],
    }
    with RunningSidecar(with_events(short_directory, events=events)) as sidecar:
        endpoint = sidecar.replay.replace("0.0.0.0", "127.0.0.1")

        def asked(pair: tuple[bytes, bytes] | None) -> bool:
            context = zmq.Context()
            try:
                dealer = context.socket(zmq.DEALER)
                if pair is not None:
                    dealer.setsockopt(zmq.CURVE_SERVERKEY, server_public)
                    dealer.setsockopt(zmq.CURVE_PUBLICKEY, pair[0])
                    dealer.setsockopt(zmq.CURVE_SECRETKEY, pair[1])
                dealer.connect(endpoint)
                dealer.send_multipart((b"", SNAPSHOT))
                if pair == known:
                    return bool(dealer.poll(20_000))
                # One that hangs up before it was refused would show nothing.
                sidecar.wait_until(lambda status: status["events"]["handshakes_refused"] >= 1)
                return bool(dealer.poll(300))
            finally:
                context.destroy(linger=0)

        known = (public, secret)
        assert asked(known)
        assert not asked(zmq.curve_keypair())
        assert not asked(None)


@pytest.mark.promise("event-config")
@pytest.mark.parametrize(
    ("events", "message"),
    [
        ({"endpoint": "tcp://0.0.0.0:5557"}, "can be reached by every user"),
        # The kernel says nobody's user over TCP.
        ({"endpoint": "tcp://127.0.0.1:5557"}, "use `ipc`, or give curve_secret_key_file"),
        ({"replay_endpoint": "tcp://[::1]:5558"}, "replay_endpoint=tcp"),
        ({"replay_endpoint": "tcp://10.0.0.1:5558"}, "can be reached by every user"),
        ({"endpoint": "5557"}, "is no endpoint"),
        ({"subscribers": ["x"]}, "no public CURVE key"),
        ({"subscribers": ["x" * 40]}, "subscribers need a CURVE key of this side"),
        ({"curve_secret_key_file": "/k"}, "give both endpoints over TCP"),
    ],
)
def test_what_would_let_strangers_read_prompts_is_refused(
    events: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EventsSettings.model_validate(events)


# --- what is kept --------------------------------------------------------------------------------


def test_history_is_bounded_in_batches_and_in_bytes() -> None:
    history = History(100, EventsSettings.model_construct(buffer_batches=3, buffer_max=10))
    for size in (1, 2, 3, 4):
        history.add(b"x" * size)
    assert [number for number, _ in history.since(0)] == [101, 102, 103]
    assert [number for number, _ in history.since(102)] == [102, 103]
    assert history.since(104) == []
    history.add(b"y" * 9)
    assert [number for number, _ in history.since(0)] == [104]
    assert history.size_bytes == 9
    history.add(b"z" * 11)
    assert [number for number, _ in history.since(0)] == [105], "all before it was missed"
    assert (history.next_number, history.size_bytes) == (106, 11)
