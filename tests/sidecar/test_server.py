"""The sidecar over its real sockets: what clients see, and what is left when they go."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
import numpy as np
import pyarrow as pa
import pytest
import zmq

from sidecar import protocol, realms, router
from sidecar.attach import StartError
from sidecar.engine import Engine
from sidecar.exits import Exit
from sidecar.protocol import (
    FRAME_BYTES_MAX,
    LoadChunk,
    LoadJob,
    Lookup,
    Outcome,
    Role,
    StoreJob,
    Submit,
)
from tests.sidecar.client import (
    BLOCK_TOKENS,
    BLOCKS_PER_CHUNK,
    WAIT_SECONDS_MAX,
    Client,
    RefusedError,
    RunningSidecar,
    Scheduler,
    Worker,
    attach_message,
    config_in,
    key_of,
    layout_of,
    open_fds,
)
from tiers.index import FLAG_HOST, FLAG_STORE
from tiers.layout import KVLayout, Segment
from tiers.memfd import sealed_memfd
from tiers.objects import ObjectTier
from tiers.wrap import FaultRates, Faulty, Verb, Wrapper

T = TypeVar("T")

ROOT_OF_REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    with RunningSidecar(config_in(short_directory)) as running:
        yield running


def folder_store(directory: Path, **settings: Any) -> dict[str, Any]:
    return {"url": f"file://{directory}/bucket", "refresh_seconds": 0.05, **settings}


# --- store and load ------------------------------------------------------------------------------


def test_load_gives_back_exactly_what_was_stored(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path) as scheduler:
        key = key_of("chunk")
        content = worker.fill(range(4), seed=1)
        assert scheduler.flags(key) == [0]
        assert worker.store(1, key, [0, 1, 2, 3]) is Outcome.OK
        assert scheduler.flags(key) == [FLAG_HOST]

        worker.poison()
        scheduler.lease(2, [key])
        assert worker.load(2, key, [63, 7, 8, 20]) is Outcome.OK

        assert [worker.read(block) for block in (63, 7, 8, 20)] == content
        untouched = worker.memory.copy()
        for block in (63, 7, 8, 20):
            for place in worker.coordinates(block):
                untouched[place] = 0xEE
        assert (untouched == 0xEE).all(), "a load wrote beside its blocks"


def test_partial_chunks_and_parts_of_chunks(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        content = worker.fill(range(3), seed=2)
        assert worker.store(1, key_of("tail"), [2, 0, 1]) is Outcome.OK
        worker.poison()
        assert worker.load(2, key_of("tail"), [10, 11], first_block=1) is Outcome.OK
        assert [worker.read(10), worker.read(11)] == [content[0], content[1]]


def test_two_ranks_make_one_chunk(sidecar: RunningSidecar) -> None:
    key = key_of("tp2")
    cut: dict[str, Any] = {"world_size": 2, "topology": "tp2.pp1"}
    with (
        Worker(sidecar.path, rank=0, **cut) as first,
        Worker(sidecar.path, rank=1, **cut) as second,
        Scheduler(sidecar.path, **cut) as scheduler,
    ):
        contents = [worker.fill(range(4), seed=3) for worker in (first, second)]
        assert contents[0] != contents[1]
        assert first.store(1, key, range(4)) is Outcome.OK
        assert scheduler.flags(key) == [0], "half a chunk must not be offered"
        assert second.store(1, key, range(4)) is Outcome.OK
        assert scheduler.flags(key) == [FLAG_HOST]
        for worker, content in zip((first, second), contents, strict=True):
            worker.poison()
            assert worker.load(2, key, [40, 41, 42, 43]) is Outcome.OK
            assert [worker.read(block) for block in range(40, 44)] == content


def test_realms_do_not_see_each_other(sidecar: RunningSidecar) -> None:
    with (
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path, engine_id="other", namespace=b'{"model":"other"}') as other,
        Scheduler(sidecar.path, engine_id="cut", topology="pp1.tp1") as cut,
    ):
        assert worker.store(1, key_of("mine"), [0]) is Outcome.OK
        assert other.flags(key_of("mine")) == [0]
        assert cut.flags(key_of("mine")) == [0]
        assert other.attached.index_salt == worker.attached.index_salt
        assert cut.attached.index_salt != worker.attached.index_salt


def test_load_of_an_unknown_chunk_is_a_miss(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        worker.poison()
        assert worker.load(1, key_of("never"), [0]) is Outcome.MISSING
        assert (worker.memory == 0xEE).all()


def test_jobs_wait_for_their_fence(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        worker.submit(stores=[StoreJob(1, [worker.chunk(key_of("late"), [0])])], fence=5)
        worker.fence.signal(4)
        sidecar.wait_until(lambda now: now["pending"]["copies_running"] == 1)
        content = worker.fill([0], seed=4)
        worker.fence.signal(5)
        assert worker.outcome(1) is Outcome.OK
        assert worker.load(2, key_of("late"), [1]) is Outcome.OK
        assert worker.read(1) == content[0]


def test_revoked_jobs_touch_nothing(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path) as scheduler:
        assert worker.store(1, key_of("kept"), [0]) is Outcome.OK
        worker.submit(
            stores=[StoreJob(2, [worker.chunk(key_of("void"), [1])])],
            loads=[LoadJob(3, [LoadChunk(key_of("kept"), 0, [2])])],
            fence=9,
        )
        assert worker.fence.try_revoke(4)
        worker.poison()
        worker.fence.signal(9)
        assert worker.outcome(2) is Outcome.REVOKED
        assert worker.outcome(3) is Outcome.REVOKED
        assert (worker.memory == 0xEE).all()
        assert scheduler.flags(key_of("void")) == [0]
        assert worker.load(4, key_of("kept"), [2]) is Outcome.OK, "later jobs are not void"


def test_load_with_a_corrupt_slot_is_a_miss(sidecar: RunningSidecar, short_directory: Path) -> None:
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path) as scheduler:
        good, bad = key_of("good"), key_of("bad")
        worker.fill(range(8), seed=5)
        marker = worker.read(6)
        assert worker.store(1, good, range(4)) is Outcome.OK
        assert worker.store(2, bad, [4, 5, 6, 7]) is Outcome.OK
        (pool,) = (short_directory / "pool").glob("*.pool")
        memory = np.memmap(pool, dtype=np.uint8, mode="r+")
        memory[memory.tobytes().index(marker) + 100] ^= 1
        worker.poison()
        worker.submit(loads=[LoadJob(3, [LoadChunk(good, 0, [0, 1]), LoadChunk(bad, 2, [2])])])
        assert worker.outcome(3) is Outcome.CORRUPT
        # Only blocks of the failed job may hold anything: the engine computes those anew.
        rest = [block for block in range(worker.layout.num_blocks) if block not in (0, 1, 2)]
        assert all(set(worker.read(block)) == {0xEE} for block in rest)
        assert scheduler.flags(good, bad) == [FLAG_HOST, 0]


def test_index_grows_under_its_readers(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realms, "INDEX_ENTRIES_FIRST", 8)
    keys = [key_of("many", number) for number in range(40)]
    with (
        RunningSidecar(config_in(short_directory)) as sidecar,
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path) as scheduler,
    ):
        jobs = [StoreJob(n, [worker.chunk(key, [n])]) for n, key in enumerate(keys)]
        worker.submit(stores=jobs)
        assert {worker.outcome(number) for number in range(40)} == {Outcome.OK}
        before = scheduler.attached.index_bytes
        while scheduler.flags(*keys) != [FLAG_HOST] * 40:
            assert scheduler.take_moved_index().index_bytes > before
        with Scheduler(sidecar.path, engine_id="late") as late:
            assert late.flags(*keys) == [FLAG_HOST] * 40


# --- clients that misbehave, or die --------------------------------------------------------------


def junk(worker: Worker) -> list[tuple[bytes, str]]:
    epoch = worker.epoch
    far = worker.chunk(key_of("x"), [10_000])
    short = msgspec.structs.replace(worker.chunk(key_of("x"), [0]), token_ids=b"1234")
    wide = worker.chunk(key_of("x"), range(BLOCKS_PER_CHUNK + 1))
    over = LoadJob(1, [LoadChunk(key_of("x"), 3, [0, 1])])
    return [
        (b"\xc1 not msgpack", "malformed"),
        (b"", "malformed"),
        (msgspec.msgpack.encode({"type": "dance", "epoch": epoch}), "unknown_tag"),
        (msgspec.msgpack.encode({"type": "submit", "epoch": "now"}), "field"),
        (protocol.encode(protocol.Lookup(epoch, 1, [], 5)), "role"),
        (protocol.encode(Submit(epoch + 1, 0, [], [])), "epoch"),
        (protocol.encode(Submit(epoch, 0, [], [StoreJob(1, [far])])), "field"),
        (protocol.encode(Submit(epoch, 0, [], [StoreJob(1, [short])])), "field"),
        (protocol.encode(Submit(epoch, 0, [], [StoreJob(1, [wide])])), "field"),
        (protocol.encode(Submit(epoch, 0, [over], [])), "field"),
        (bytes(FRAME_BYTES_MAX + 1), "frame_too_large"),
    ]


def test_bad_frames_are_answered_and_disturb_nobody(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as bad, Worker(sidecar.path, engine_id="good") as good:
        good.fill([0], seed=6)
        expected: dict[str, int] = {}
        for number, (frame, code) in enumerate(junk(bad)):
            bad.send(frame)
            assert bad.error().code == code
            expected[code] = expected.get(code, 0) + 1
            assert good.store(number, key_of(number), [0]) is Outcome.OK
        bad.dealer.send_multipart([b"two", b"frames"])
        assert bad.error().code == "malformed"
        expected["malformed"] += 1
        stranger = zmq.Context()
        dealer = stranger.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(sidecar.info.endpoint)
        dealer.send(protocol.encode(Submit(bad.epoch, 0, [], [])))
        expected["unknown_peer"] = 1
        sidecar.wait_until(lambda now: now["sockets"]["frames_refused"] == expected)
        stranger.destroy()
        assert bad.store(1, key_of("after all"), [0]) is Outcome.OK, "the session goes on"


def test_burst_of_one_client_is_drained_whole_and_starves_nobody(
    sidecar: RunningSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "FRAMES_PER_WAKE_MAX", 2)
    with Worker(sidecar.path) as noisy, Worker(sidecar.path, engine_id="quiet") as quiet:
        empty = protocol.encode(Submit(noisy.epoch, 0, [], []))
        for _ in range(500):
            noisy.send(empty)
        assert quiet.store(1, key_of("quiet"), [0]) is Outcome.OK
        # Nothing more is sent to ring the bell: what one drain leaves must be taken by the next.
        sidecar.wait_until(lambda now: now["sockets"]["frames_received"] == 501)


def test_a_client_that_does_not_read_its_answers_is_cut_off(short_directory: Path) -> None:
    config = config_in(short_directory, limits={"replies_queued_max": 16})
    with (
        RunningSidecar(config) as sidecar,
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path, engine_id="deaf") as deaf,
    ):
        deaf.dealer.setsockopt(zmq.SNDTIMEO, 100)
        number = 0
        # What the kernel and its own ZMQ take for it comes first.
        while not select.select([deaf.unix], [], [], 0)[0]:
            number += 1
            with contextlib.suppress(zmq.Again):
                deaf.send(Lookup(deaf.epoch, number, [key_of("nowhere")], 1000))
        assert deaf.at_end()
        assert worker.store(1, key_of("other"), [0]) is Outcome.OK
        now = sidecar.wait_until(lambda now: len(now["sessions"]) == 1)
        assert now["sockets"]["replies_dropped"] > 0


def test_frames_beyond_the_cut_end_a_connection_only(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as bad, Worker(sidecar.path, engine_id="good") as good:
        bad.send(bytes(2 * FRAME_BYTES_MAX + 1))
        assert good.store(1, key_of("good"), [0]) is Outcome.OK


def test_another_epoch_is_refused_and_counted(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        job = StoreJob(1, [worker.chunk(key_of("old"), [0])])
        worker.submit(stores=[job], epoch=worker.epoch - 1)
        error = worker.error()
        assert (error.code, error.epoch) == ("epoch", worker.epoch)
        assert sidecar.status()["sockets"]["frames_refused"] == {"epoch": 1}
        assert b'kvlake_frames_refused_total{code="epoch"} 1.0' in sidecar.get("/metrics")


def settle(before: int) -> None:
    """Wait until no more descriptors are open than `before`; HTTP connections close late."""
    deadline = time.monotonic() + 10
    while open_fds() > before:
        assert time.monotonic() < deadline, subprocess.run(
            ["ls", "-l", f"/proc/{os.getpid()}/fd"], capture_output=True, text=True, check=True
        ).stdout
        time.sleep(0.05)


VICTIM = """
import sys
from pathlib import Path
from sidecar.protocol import StoreJob
from tests.sidecar.client import Worker, key_of
worker = Worker(Path(sys.argv[1]), engine_id="victim")
assert worker.store(1, key_of("victim"), [0]).name == "OK"
worker.submit(stores=[StoreJob(2, [worker.chunk(key_of("half"), [1])])], fence=7)
print("submitted", flush=True)
sys.stdin.read()
"""


def test_killed_client_leaves_nothing_behind(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as other:
        other.fill([0], seed=7)
        sidecar.status()
        before = open_fds()
        child = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(sidecar.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT_OF_REPOSITORY,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"submitted\n"
        sidecar.wait_until(lambda now: now["pending"]["copies_running"] == 1)
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        after = sidecar.wait_until(lambda now: len(now["sessions"]) == 1)
        assert after["pending"]["copies_running"] == 0
        assert after["tiers"]["host"]["classes"][0]["slots_used"] == 1
        assert other.load(1, key_of("victim"), [3]) is Outcome.OK, "what it stored stays"
        settle(before)


def test_descriptors_do_not_leak(sidecar: RunningSidecar) -> None:
    def use(number: int) -> None:
        with Worker(sidecar.path) as worker, Scheduler(sidecar.path):
            assert worker.store(1, key_of(number), [0]) is Outcome.OK
            with pytest.raises(RefusedError):
                Worker(sidecar.path)
        for fds in ((), (0,), (0, 1, 2), (0, 1, 2, 0, 1)):
            with pytest.raises(RefusedError):
                Client(sidecar.path, attach_message(Role.WORKER, layout_of()), fds)
        with pytest.raises(RefusedError):
            Client(sidecar.path, attach_message(Role.SCHEDULER), (0,))
        sidecar.wait_until(lambda now: now["sessions"] == [])

    use(0)
    before = open_fds()
    for number in range(1, 6):
        use(number)
    settle(before)


def test_client_that_reattaches_takes_its_own_place(sidecar: RunningSidecar) -> None:
    first = Worker(sidecar.path)
    assert first.store(1, key_of("before"), [0]) is Outcome.OK
    with pytest.raises(RefusedError, match="give each engine its own id") as caught:
        Worker(sidecar.path)
    assert caught.value.code == "engine"
    first.close()
    with Worker(sidecar.path) as second:
        assert second.load(1, key_of("before"), [1]) is Outcome.OK


def test_bytes_after_attach_end_the_session(sidecar: RunningSidecar) -> None:
    with Scheduler(sidecar.path) as scheduler:
        scheduler.unix.sendall(b"?")
        assert scheduler.at_end()


# --- refusals ------------------------------------------------------------------------------------


def refused(call: Callable[[], Client]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        call()
    return caught.value


def test_another_version_is_refused_by_name(sidecar: RunningSidecar) -> None:
    message = msgspec.msgpack.encode({"type": "attach", "version": 99, "future": True})
    error = refused(lambda: Client(sidecar.path, message))
    assert error.code == "version"
    assert "99" in error.message
    assert "same kvlake release" in error.message


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"segment": Segment(0, 1, 0, 1)}, "layout", "0-1.0-1"),
        ({"block_tokens": BLOCK_TOKENS * 2}, "layout", "block_tokens=32"),
        ({"memory": protocol.Memory("memfd", 4096)}, "layout", "memory.size_bytes=4096"),
        ({"memory": protocol.Memory("rocm_ipc", 4096)}, "memory_kind", "cuda_vmm"),
        ({"namespace": b"[1]"}, "namespace", "object"),
        ({"namespace": b"{"}, "namespace", "not JSON"),
        ({"namespace": b'{"a":' * 16 + b"{}" + b"}" * 16}, "namespace", "nested more than 16"),
        ({"rank": 3}, "field", "rank=3"),
        ({"blocks_per_chunk": 4096}, "pool", "host.size"),
        ({"blocks_per_chunk": 65536}, "layout", "blocks_per_chunk * block_tokens=1048576"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    sidecar: RunningSidecar, changes: dict[str, Any], code: str, words: str
) -> None:
    error = refused(lambda: Worker(sidecar.path, layout=layout_of(), **changes))
    assert (error.code, words in error.message) == (code, True), error
    assert sidecar.status()["sockets"]["attaches_refused"] == {code: 1}
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of("fine"), [0]) is Outcome.OK


@pytest.mark.parametrize(
    ("content_bytes", "block_tokens", "blocks_per_chunk", "words"),
    [
        # Each of them ended the sidecar once: fuzzing found them.
        (1 << 20, 16, 4096, "over the 2147483647 that Arrow can hold"),
        (1, 1, 4, "block_payload_bytes=1"),
    ],
)
def test_a_geometry_that_has_no_image_is_refused(
    sidecar: RunningSidecar,
    content_bytes: int,
    block_tokens: int,
    blocks_per_chunk: int,
    words: str,
) -> None:
    layout = KVLayout(
        Segment(0, 1, 0, 1), 1, block_tokens, content_bytes, "uint8", "plain", 1 << 25, (0,), 0, 0,
        content_bytes,
    )  # fmt: skip
    changes = {"block_tokens": block_tokens, "blocks_per_chunk": blocks_per_chunk}
    error = refused(lambda: Worker(sidecar.path, layout=layout, **changes))
    assert (error.code, words in error.message) == ("layout", True), error
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of("fine"), [0]) is Outcome.OK


def test_refused_clients_use_up_no_realm(sidecar: RunningSidecar) -> None:
    # Each of the 300 used to leave a realm behind, of which there are 256 at most.
    before = open_fds()
    for number in range(300):
        topology = f"other-{number}"
        error = refused(lambda: Worker(sidecar.path, topology=topology, blocks_per_chunk=4096))  # noqa: B023 (called at once)
        assert error.code == "pool"
    assert open_fds() <= before + 2, "a refused client's index was kept"
    with Worker(sidecar.path, topology="the last") as worker:
        assert worker.store(1, key_of("fine"), [0]) is Outcome.OK


def test_memory_smaller_than_its_layout_is_refused(sidecar: RunningSidecar) -> None:
    small = os.memfd_create("small")
    os.ftruncate(small, 4096)
    fence = sealed_memfd("fence", 4096)
    try:
        error = refused(lambda: Worker(sidecar.path, fds=(small, fence)))
        assert error.code == "memory"
        assert "4096 bytes" in error.message
    finally:
        for fd in (small, fence):
            os.close(fd)


def test_layout_of_a_rank_is_fixed(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path):
        pass
    other = msgspec.structs.replace(layout_of(), dtype="bfloat16")
    error = refused(lambda: Worker(sidecar.path, layout=other))
    assert error.code == "layout"
    with Worker(sidecar.path, num_blocks=32) as worker:
        assert worker.store(1, key_of("smaller cache"), [0]) is Outcome.OK


def test_ranks_of_one_engine_must_agree(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path, world_size=2, topology="tp2"):
        error = refused(lambda: Worker(sidecar.path, rank=1, world_size=2, topology="other"))
        assert error.code == "engine"
        assert "topology='tp2'" in error.message


def test_sessions_are_bounded(short_directory: Path) -> None:
    config = config_in(short_directory, limits={"sessions_max": 1})
    with RunningSidecar(config) as sidecar, Worker(sidecar.path):
        error = refused(lambda: Scheduler(sidecar.path))
        assert error.code == "sessions"
        assert "limits.sessions_max=1" in error.message


# --- the object store ----------------------------------------------------------------------------


def test_store_carries_chunks_to_an_empty_sidecar(short_directory: Path) -> None:
    keys = [key_of("prompt", number) for number in range(3)]
    store = folder_store(short_directory)
    cut: dict[str, Any] = {"world_size": 2, "topology": "tp2.pp1"}
    contents: list[list[bytes]] = []
    first = config_in(short_directory, store=store, runtime={"name": "first"})
    with (
        RunningSidecar(first) as sidecar,
        Worker(sidecar.path, rank=0, **cut) as one,
        Worker(sidecar.path, rank=1, **cut) as two,
    ):
        for worker in (one, two):
            contents.append(worker.fill(range(12), seed=8))
            parent = bytes(32)
            for number, key in enumerate(keys):
                blocks = range(4 * number, 4 * number + 4)
                assert worker.store(number, key, blocks, parent) is Outcome.OK
                parent = key
    second = config_in(short_directory, store=store, runtime={"name": "second"})
    with (
        RunningSidecar(second) as sidecar,
        Worker(sidecar.path, rank=0, **cut) as one,
        Worker(sidecar.path, rank=1, **cut) as two,
        Scheduler(sidecar.path, **cut) as scheduler,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 3)
        assert scheduler.flags(*keys) == [FLAG_STORE] * 3
        answer = scheduler.lookup(1, [*keys, key_of("unknown")])
        assert answer.ready == 3
        assert scheduler.flags(*keys) == [FLAG_HOST | FLAG_STORE] * 3
        scheduler.lease(5, keys)
        chunks = [LoadChunk(key, 0, [n * 4 + b for b in range(4)]) for n, key in enumerate(keys)]
        for worker, content in zip((one, two), contents, strict=True):
            worker.poison()
            worker.submit(loads=[LoadJob(5, chunks)])
            assert worker.outcome(5) is Outcome.OK
            assert [worker.read(block) for block in range(12)] == content
        assert sidecar.status()["counters"]["chunks_read"] >= 3


def test_corrupt_object_is_quarantined(short_directory: Path) -> None:
    key = key_of("spoilt")
    store = folder_store(short_directory)
    with (
        RunningSidecar(config_in(short_directory, store=store)) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        assert worker.store(1, key, range(4)) is Outcome.OK
    bucket = short_directory / "bucket"
    (path,) = bucket.glob("v1/*/??/*/*.arrow")
    image = bytearray(path.read_bytes())
    image[5000] ^= 4
    path.write_bytes(image)
    with (
        RunningSidecar(config_in(short_directory, store=store)) as sidecar,
        Worker(sidecar.path),
        Scheduler(sidecar.path) as scheduler,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 1)
        answer = scheduler.lookup(1, [key])
        assert (answer.ready, answer.outcome) == (0, Outcome.CORRUPT)
        assert scheduler.flags(key) == [0]
        sidecar.wait_until(lambda _: not path.exists())
        assert len(list(bucket.glob("quarantine/**/*.arrow"))) == 1


def faulty(**rates: float) -> Callable[[ObjectTier], ObjectTier]:
    return lambda tier: Faulty(tier, seed=1, rates=FaultRates(**rates))


def test_unwell_store_leaves_the_host_tier_working(short_directory: Path) -> None:
    store = folder_store(short_directory, retries_max=0)
    with (
        RunningSidecar(config_in(short_directory, store=store), faulty(unavailable=1.0)) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["state"] == "unwell")
        readiness = json.loads(sidecar.get("/readyz"))
        assert readiness["state"] == "degraded"
        (problem,) = readiness["problems"]
        assert (problem["code"], problem["serious"]) == ("store", False)
        assert "injected" in problem["reason"]
        assert b"kvlake_store_well 0.0" in sidecar.get("/metrics")
        assert worker.store(1, key_of("anyway"), [0]) is Outcome.OK
        assert worker.load(2, key_of("anyway"), [1]) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["writes_failed"] >= 1)


def test_drain_waits_for_a_slow_store(short_directory: Path) -> None:
    store = folder_store(short_directory, writes_inflight_max=1)
    slow = faulty(stall=1.0, stall_seconds=0.1)
    with (
        RunningSidecar(config_in(short_directory, store=store), slow) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        for number in range(5):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
        sidecar.info.stop()
        sidecar.wait_until(lambda now: now["state"] == "draining")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            sidecar.get("/readyz")
        assert worker.store(9, key_of(9), [0]) is not Outcome.OK, "nothing new is begun"
        sidecar.stop()
        assert worker.at_end()
    assert sidecar.code == 0
    assert len(list(short_directory.glob("bucket/v1/*/??/*/*.arrow"))) == 5


class HeldCatalog(Wrapper):
    """A store that answers, but takes no catalog file until it is let."""

    def __init__(self, inner: ObjectTier) -> None:
        super().__init__(inner)
        self.asked = threading.Event()
        self.let = threading.Event()

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb == "write" and "/catalog/" in name:
            self.asked.set()
            await anyio.to_thread.run_sync(self.let.wait, WAIT_SECONDS_MAX)
        return await call()


def test_drain_waits_for_loads_that_came_while_it_announced(short_directory: Path) -> None:
    held: list[HeldCatalog] = []

    def hold(tier: ObjectTier) -> ObjectTier:
        held.append(HeldCatalog(tier))
        return held[0]

    store = folder_store(short_directory, catalog_flush=3600)
    with (
        RunningSidecar(config_in(short_directory, store=store), hold) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        sidecar.info.stop()
        assert held[0].asked.wait(WAIT_SECONDS_MAX)
        worker.submit(loads=[LoadJob(2, [LoadChunk(key_of(1), 0, [1])])], fence=7)
        sidecar.wait_until(lambda now: now["pending"]["copies_running"] == 1)
        held[0].let.set()
        sidecar.wait_until(lambda _: any(short_directory.glob("bucket/**/catalog/**/*.arrow")))
        worker.fence.signal(7)
        assert worker.outcome(2) is Outcome.OK
    assert sidecar.code == 0


def test_drain_is_bounded_and_tells_what_is_lost(
    short_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = folder_store(short_directory, writes_inflight_max=1)
    config = config_in(short_directory, store=store, limits={"drain_seconds_max": 0.2})
    stuck = faulty(stall=1.0, stall_seconds=3600)
    with RunningSidecar(config, stuck) as sidecar, Worker(sidecar.path) as worker:
        for number in range(3):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
        sidecar.stop()
    assert sidecar.code is Exit.LOSS
    (record,) = [one for one in caplog.records if "drained in part" in one.getMessage()]
    assert record.__dict__["kvlake_fields"]["writes_lost"] == 3


def test_what_a_client_still_pins_at_the_end_is_no_leak(
    short_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        RunningSidecar(config_in(short_directory)) as sidecar,
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path) as scheduler,
    ):
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        scheduler.lease(1, [key_of(1)])
        sidecar.wait_until(lambda now: now["leases"] == 1)
        sidecar.stop()
    assert sidecar.code == 0
    assert [one for one in caplog.records if one.levelname == "ERROR"] == []


# --- the process ---------------------------------------------------------------------------------

PROCESS = """
import sys, json
from pathlib import Path
import anyio
from sidecar.server import serve
from tests.sidecar.client import config_in
from tiers.wrap import Faulty, FaultRates

directory, stall_seconds = Path(sys.argv[1]), float(sys.argv[2])
config = config_in(
    directory,
    store={"url": f"file://{directory}/bucket", "writes_inflight_max": 1},
    limits={"drain_seconds_max": 600},
)
rates = FaultRates(stall=1.0, stall_seconds=stall_seconds)

async def main() -> int:
    return await serve(
        config,
        ready=lambda info: print(info.attach_path, flush=True),
        wrap_store=lambda tier: Faulty(tier, seed=1, rates=rates),
    )

sys.exit(anyio.run(main))
"""


class SidecarProcess:
    def __init__(self, directory: Path, stall_seconds: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS), str(directory), str(stall_seconds)],
            stdout=subprocess.PIPE,
            cwd=ROOT_OF_REPOSITORY,
            text=True,
        )
        assert self.process.stdout is not None
        self.path = Path(self.process.stdout.readline().strip())

    def end(self) -> int:
        code = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def left_in(directory: Path) -> list[str]:
    files = [path for path in directory.rglob("*") if not path.is_dir() and path.name != "lock"]
    return sorted(path.name for path in files if "bucket" not in path.parts)


def test_sigterm_drains_and_leaves_nothing(short_directory: Path) -> None:
    sidecar = SidecarProcess(short_directory, stall_seconds=0.1)
    with Worker(sidecar.path) as worker:
        for number in range(4):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
        sidecar.process.send_signal(signal.SIGTERM)
        assert worker.at_end()
    assert sidecar.end() == 0
    assert len(list(short_directory.glob("bucket/v1/*/??/*/*.arrow"))) == 4
    assert left_in(short_directory) == []


def test_second_signal_ends_it_at_once(short_directory: Path) -> None:
    sidecar = SidecarProcess(short_directory, stall_seconds=600)
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        sidecar.process.send_signal(signal.SIGINT)
        while sidecar.path.exists():
            time.sleep(0.01)
        sidecar.process.send_signal(signal.SIGTERM)
        assert worker.at_end()
    assert sidecar.end() == Exit.AT_ONCE
    assert [name for name in left_in(short_directory) if not name.endswith(".lock")] == []


def test_killed_sidecar_is_replaced(short_directory: Path) -> None:
    sidecar = SidecarProcess(short_directory, stall_seconds=0)
    worker = Worker(sidecar.path)
    sidecar.process.kill()
    assert worker.at_end()
    worker.close()
    sidecar.end()
    assert sidecar.path.exists(), "a killed process removes nothing"
    with (
        RunningSidecar(config_in(short_directory)) as running,
        Worker(running.path) as again,
    ):
        assert again.epoch != worker.epoch
        assert again.store(1, key_of(1), [0]) is Outcome.OK
    assert left_in(short_directory) == []


def test_live_sidecar_is_not_replaced(sidecar: RunningSidecar, short_directory: Path) -> None:
    with pytest.raises(StartError, match=rf"pid {os.getpid()}\) already serves"):
        RunningSidecar(config_in(short_directory))
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of(1), [0]) is Outcome.OK


def test_taken_port_is_told(sidecar: RunningSidecar, short_directory: Path) -> None:
    port = int(sidecar.info.http_url.rsplit(":", 1)[1])
    config = config_in(short_directory, runtime={"name": "two"}, http={"port": port})
    with pytest.raises(StartError, match=r"choose another http\.port"):
        RunningSidecar(config)
    assert [name for name in left_in(short_directory) if "two" in name] == []


def test_bug_in_the_engine_ends_the_sidecar(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = RunningSidecar(config_in(short_directory))
    with Worker(sidecar.path) as worker:
        monkeypatch.setattr(Engine, "_submit", lambda *_: 1 / 0)
        worker.submit(stores=[StoreJob(1, [worker.chunk(key_of(1), [0])])])
        assert worker.at_end()
        with pytest.raises(ZeroDivisionError):
            sidecar.stop()
    assert left_in(short_directory) == []


def test_pages(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path):
        assert worker.store(1, key_of(1), range(4)) is Outcome.OK
        assert sidecar.get("/healthz") == b"ok\n"
        assert json.loads(sidecar.get("/readyz"))["state"] == "ok"
        status = sidecar.status()
        assert {one["role"] for one in status["sessions"]} == {"worker", "scheduler"}
        assert {one["pid"] for one in status["sessions"]} == {os.getpid()}
        assert status["tiers"]["host"]["chunks"] == 1
        metrics = sidecar.get("/metrics").decode()
        assert "kvlake_chunks_stored_total 1.0" in metrics
        assert 'kvlake_sessions{role="worker"} 1.0' in metrics
        assert 'kvlake_chunks{tier="host"} 1.0' in metrics
        assert re.search(r"^kvlake_tasks [1-9]", metrics, re.MULTILINE)


def test_arrow_has_one_thread(sidecar: RunningSidecar) -> None:
    assert pa.cpu_count() == 1
