"""Clients of a real sidecar that misbehave, die or come again, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from sidecar import protocol
from sidecar.protocol import (
    FRAME_BYTES_MAX,
    LoadChunk,
    LoadJob,
    Lookup,
    Outcome,
    Role,
    StoreJob,
    Submit,
    codec,
)
from tests import places
from tests.mappings import open_fds
from tests.sidecar.client import (
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
)


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
        (codec.encode(protocol.Lookup(epoch, 1, [], 5)), "role"),
        (codec.encode(Submit(epoch + 1, 0, [], [])), "epoch"),
        (codec.encode(Submit(epoch, 0, [], [StoreJob(1, [far])])), "field"),
        (codec.encode(Submit(epoch, 0, [], [StoreJob(1, [short])])), "field"),
        (codec.encode(Submit(epoch, 0, [], [StoreJob(1, [wide])])), "field"),
        (codec.encode(Submit(epoch, 0, [over], [])), "field"),
        (bytes(FRAME_BYTES_MAX + 1), "frame_too_large"),
    ]


@pytest.mark.promise("bad-frames")
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
        dealer.connect(sidecar.endpoint)
        dealer.send(codec.encode(Submit(bad.epoch, 0, [], [])))
        expected["unknown_peer"] = 1
        # Its connection is closed before any frame is read; ZMQ connects again and again.
        sidecar.wait_until(lambda now: set(now["sockets"]["frames_refused"]) == set(expected))
        refused = sidecar.status()["sockets"]["frames_refused"]
        assert {code: refused[code] for code in expected if code != "unknown_peer"} == {
            code: count for code, count in expected.items() if code != "unknown_peer"
        }
        stranger.destroy(linger=0)
        assert bad.store(1, key_of("after all"), [0]) is Outcome.OK, "the session goes on"


def test_a_message_of_the_other_role_is_refused(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path) as scheduler:
        epoch, keys = worker.epoch, [key_of("x")]
        for message in (
            Lookup(epoch, 1, keys, 5),
            protocol.Lease(epoch, 1, keys),
            protocol.Pin(epoch, keys, 5),
            protocol.Release(epoch, [1], []),
        ):
            worker.send(message)
            assert worker.error().code == "role"
        scheduler.send(Submit(epoch, 0, [], []))
        assert scheduler.error().code == "role"


@pytest.mark.promise("bad-frames")
@pytest.mark.parametrize("kept", [0, 10])
def test_group_that_a_client_lacks_is_refused(short_directory: Path, kept: int) -> None:
    config = config_in(short_directory, limits={"prompts_kept": kept})
    with RunningSidecar(config) as sidecar, Scheduler(sidecar.path) as scheduler:
        epoch, keys = scheduler.epoch, [key_of("x"), key_of("y")]
        for message in (
            Lookup(epoch, 1, keys, 5, groups=[0, 1]),
            protocol.Pin(epoch, keys, 5, groups=[0, 1]),
            protocol.Use(epoch, keys, 64, [0, 1]),
            protocol.Use(epoch, keys, 64, [63, 63]),
        ):
            scheduler.send(message)
            assert scheduler.error().code == "field"
        assert b'kvlake_frames_refused_total{code="field"} 4.0' in sidecar.get("/metrics")


def test_burst_of_one_client_is_drained_whole_and_starves_nobody(
    sidecar: RunningSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "FRAMES_PER_TURN_MAX", 2)
    with Worker(sidecar.path) as noisy, Worker(sidecar.path, engine_id="quiet") as quiet:
        empty = codec.encode(Submit(noisy.epoch, 0, [], []))
        for _ in range(500):
            noisy.send(empty)
        assert quiet.store(1, key_of("quiet"), [0]) is Outcome.OK
        # Nothing more is sent to ring the bell: what one drain leaves must be taken by the next.
        sidecar.wait_until(lambda now: now["sockets"]["frames_received"] == 501)


@pytest.mark.promise("unread-answers")
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
    deadline = time.monotonic() + WAIT_SECONDS_MAX
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
            cwd=places.ROOT,
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
