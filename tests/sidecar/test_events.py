"""The stream of KV events of a sidecar that runs, read with vLLM's own definitions.

`Subscriber` is what a router would write: vLLM's decoder, a set of blocks for each medium and
owner, a gap is asked for and what is not kept any more is taken from a snapshot.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sidecar import kvevents
from sidecar.config import Events
from sidecar.eventstream import History
from sidecar.kvevents import END_OF_REPLAY, SNAPSHOT, name_of, number_frame, number_of
from sidecar.protocol import Outcome, StoreJob
from tests.sidecar.client import (
    BLOCK_TOKENS,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)
from tiers.index import FLAG_HOST, FLAG_STORE

kv_events = pytest.importorskip("vllm.distributed.kv_events")

WAIT_SECONDS_MAX = 20.0


class Subscriber:
    """A cache of what is cached, kept by events alone."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.blocks: dict[tuple[str, str | None], dict[Any, Any]] = {}
        """(medium, owner) to the blocks there, each with the event that told of it."""
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
        """What is in a medium, whoever holds it."""
        return {
            name for (where, _), held in self.blocks.items() if where == medium for name in held
        }

    def until(self, true: Callable[[], bool]) -> None:
        """Take what comes until something holds. Where nothing comes, ask whether it was missed."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not true():
            assert time.monotonic() < deadline, self.blocks
            self.take(100)
            self.recover()

    def until_equal(self, expected: dict[str, set[bytes]]) -> None:
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
        for event in self._decoder.decode(payload).events:
            if isinstance(event, kv_events.AllBlocksCleared):
                self.blocks.clear()
                continue
            held = self.blocks.setdefault((event.medium, event.ownership), {})
            for name in event.block_hashes:
                if isinstance(event, kv_events.BlockStored):
                    held[name] = event
                else:
                    held.pop(name, None)


@pytest.fixture
def subscribe() -> Iterator[Callable[..., Subscriber]]:
    made: list[Subscriber] = []

    def make(sidecar: RunningSidecar, **options: Any) -> Subscriber:
        subscriber = Subscriber(sidecar.info.events, sidecar.info.replay, **options)
        made.append(subscriber)
        return subscriber

    yield make
    for subscriber in made:
        subscriber.close()


def with_events(directory: Path, **sections: Any) -> Any:
    sections["events"] = {"enabled": True, **sections.get("events", {})}
    return config_in(directory, **sections)


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
        assert sidecar.info.events == ""
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
            ((medium, owner),) = subscriber.blocks
            held = subscriber.blocks[medium, owner]
            assert owner is not None
            assert owner.startswith("kvlake/")
            assert owner.endswith("/tp1.pp1")
            assert held[name_of(first)].parent_block_hash is None
            event = held[name_of(second)]
            assert event.parent_block_hash == name_of(first)
            assert event.block_size == 2 * BLOCK_TOKENS
            assert event.token_ids == [second[0] + n for n in range(2 * BLOCK_TOKENS)]
            assert (event.medium, event.locality) == ("CPU", "LOCAL")
    assert not (sidecar.path.parent / "events.sock").exists()


def test_the_store(short_directory: Path, subscribe: Callable[..., Subscriber]) -> None:
    store = {"url": f"file://{short_directory}/bucket", "refresh_seconds": 0.05}
    key = key_of("written")
    with RunningSidecar(with_events(short_directory, store=store)) as sidecar:
        subscriber = subscribe(sidecar)
        with Worker(sidecar.path) as worker:
            assert worker.store(1, key, [0, 1, 2, 3]) is Outcome.OK
            subscriber.until(lambda: subscriber.names("STORAGE") == {name_of(key)})
            subscriber.recover()
            (event,) = subscriber.blocks["STORAGE", next(iter(subscriber.blocks))[1]].values()
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
            for number, payload in late.ask(SNAPSHOT):
                late._apply(number, payload)
            assert late.names("STORAGE") == {name_of(key)}


# --- the directory, rebuilt ----------------------------------------------------------------------


def in_directory(sidecar: RunningSidecar, keys: list[bytes]) -> dict[str, set[bytes]]:
    with Scheduler(sidecar.path) as scheduler:
        flags = dict(zip(keys, scheduler.flags(*keys), strict=True))
    return {
        medium: {name_of(key) for key, flag in flags.items() if flag & bit}
        for medium, bit in (("CPU", FLAG_HOST), ("STORAGE", FLAG_STORE))
    }


def test_a_random_life_with_evictions_and_a_restart(
    short_directory: Path, subscribe: Callable[..., Subscriber]
) -> None:
    """Whoever follows has, at every rest, what the directory has; so has who comes late."""
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
                expected = in_directory(sidecar, keys)
                late = subscribe(sidecar)
                late.recover()
                for one in (follower, late):
                    one.until_equal(expected)
                assert expected["CPU"]
                assert expected["STORAGE"]
                assert late.snapshots == 1, "the first batches are not kept any more"
    assert evicted > 0
    assert follower is not None
    assert follower.snapshots + follower.replays >= 1, "the restart was noticed"


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
            sleeper.connect(sidecar.info.events)
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
            dealer.connect(sidecar.info.replay)
            for frames in ((b"",), (b"", b"1"), (b"", b"x" * 8, b"y"), (b"x" * 900,)):
                dealer.send_multipart(frames)
            sidecar.wait_until(lambda status: status["events"]["requests_dropped"] == 4)
        finally:
            context.destroy(linger=0)
        # A number that will never come, and then a sensible question.
        assert list(subscriber.ask(b"\x7f" + bytes(7))) == []
        assert len(list(subscriber.ask(number_frame(0)))) == 1


def test_over_tcp_with_keys(short_directory: Path, subscribe: Callable[..., Subscriber]) -> None:
    """Whoever has no key that the configuration names hears nothing, and gets no answer."""
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
        endpoint = sidecar.info.replay.replace("0.0.0.0", "127.0.0.1")

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
                return bool(dealer.poll(20_000 if pair == known else 300))
            finally:
                context.destroy(linger=0)

        known = (public, secret)
        assert asked(known)
        assert not asked(zmq.curve_keypair())
        assert not asked(None)
        sidecar.wait_until(lambda status: status["events"]["handshakes_refused"] >= 1)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ({"endpoint": "tcp://0.0.0.0:5557"}, "can be reached from other machines"),
        ({"replay_endpoint": "tcp://10.0.0.1:5558"}, "can be reached from other machines"),
        ({"endpoint": "5557"}, "is no endpoint"),
        ({"subscribers": ["x"]}, "no public CURVE key"),
        ({"subscribers": ["x" * 40]}, "this side has none"),
        ({"curve_secret_key_file": "/k"}, "give both endpoints over TCP"),
    ],
)
def test_what_would_let_strangers_read_prompts_is_refused(
    events: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Events.model_validate(events)


def test_loopback_needs_no_key() -> None:
    Events.model_validate({"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://[::1]:2"})


# --- what is kept --------------------------------------------------------------------------------


def test_history_is_bounded_in_batches_and_in_bytes() -> None:
    history = History(100, batches_max=3, bytes_max=10)
    for size in (1, 2, 3, 4):
        history.add(b"x" * size)
    assert [told.number for told in history.since(0)] == [101, 102, 103]
    assert [told.number for told in history.since(102)] == [102, 103]
    assert history.since(104) == []
    history.add(b"y" * 9)
    assert [told.number for told in history.since(0)] == [104]
    assert history.size_bytes == 9
    history.add(b"z" * 11)
    assert history.since(0) == []
    assert (history.next_number, history.size_bytes) == (106, 0)
