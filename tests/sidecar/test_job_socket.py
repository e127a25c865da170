"""The Unix socket for jobs against peers that speak its protocol by hand, and mean harm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Final

import anyio.to_thread
import pytest

from sidecar.protocol import Outcome
from sidecar.transport.zmtp_server import JobSocket, Sent
from tests import places
from tests.mappings import open_fds
from tests.sidecar.bench import until
from tests.sidecar.client import RunningSidecar, Worker, config_in, key_of

MIB: Final = 1 << 20
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4


def frame(payload: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BQ", flags | LONG, len(payload)) + payload


def ready(identity: bytes) -> bytes:
    named = b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    )
    body = b"\x05READY" + named
    return bytes([COMMAND, len(body)]) + body


def raw(endpoint: str, identity: bytes = b"stranger") -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(endpoint.removeprefix("ipc://"))
    sock.sendall(GREETING + ready(identity))
    return sock


def at_end(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def attached_raw(sidecar: RunningSidecar, worker: Worker) -> socket.socket:
    """A connection by hand in the place of a worker's own."""
    worker.dealer.close()
    while True:
        # Refused for as long as the sidecar has the other one.
        sock = raw(sidecar.endpoint, worker.attached.token)
        try:
            sock.sendall(frame(b"junk"))
            told = b""
            while b"message refused" not in told:
                piece = sock.recv(4096)
                if not piece:
                    break
                told += piece
            else:
                return sock
        except ConnectionError:
            pass
        sock.close()


@pytest.mark.promise("jobs-memory")
def test_frames_of_one_that_never_attached_take_no_memory(sidecar: RunningSidecar) -> None:
    """ZMQ kept every frame until the last one: such a peer took the sidecar to 1,554 MiB."""
    before = anonymous_bytes()
    part = frame(bytes(MIB), MORE)
    with raw(sidecar.endpoint) as sock, contextlib.suppress(ConnectionError):
        for _ in range(300):
            sock.sendall(part)
    grown = anonymous_bytes() - before
    assert grown < 32 * MIB, f"{grown / MIB:.0f} MiB"


@pytest.mark.promise("jobs-memory")
def test_frames_of_one_message_take_no_memory_of_an_attached_peer_either(
    sidecar: RunningSidecar,
) -> None:
    with Worker(sidecar.path) as bad, Worker(sidecar.path, engine_id="good") as good:
        with attached_raw(sidecar, bad) as sock:
            before = anonymous_bytes()
            part = frame(bytes(MIB), MORE)
            for _ in range(300):
                sock.sendall(part)
            grown = anonymous_bytes() - before
            assert grown < 32 * MIB, f"{grown / MIB:.0f} MiB"
            sock.sendall(frame(b""))
            sidecar.wait_until(lambda now: now["sockets"]["frames_refused"].get("malformed") == 1)
        assert good.store(1, key_of("good"), [0]) is Outcome.OK


@pytest.mark.promise("share-of-loop")
async def test_many_small_frames_do_not_hold_the_loop(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of 300,000 frames of one byte held it for 1.7 s."""
    frames, per_turn = 300_000, 32
    places.patch(monkeypatch, "FRAMES_PER_TURN_MAX", per_turn)
    places.patch(monkeypatch, "WAKE_SECONDS_MAX", 0.0)
    messages: list[list[bytes]] = []
    path = short_directory / "jobs.sock"
    jobs = JobSocket(
        path,
        lambda _token, parts: messages.append(parts),
        lambda _token, _uid: True,
        lambda _token: None,
        lambda error: messages.append([repr(error).encode()]),
        mode=0o600,
        uids=[os.geteuid()],
        replies_queued_max=4,
    )
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    with await anyio.to_thread.run_sync(raw, str(path)) as sock:
        turn()
        data = bytes([MORE, 1, 7]) * frames + bytes([0, 1, 7])
        await anyio.to_thread.run_sync(sock.sendall, data)
        await until(lambda: bool(messages))
    assert messages == [[]]
    # A peer's turn ends with what one `recv` brought, and what was left before it.
    assert turns > frames / (2 * per_turn)
    jobs.close()


@pytest.mark.promise("jobs-identity")
def test_a_name_that_is_taken_is_refused_and_its_owner_goes_on(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        with raw(sidecar.endpoint, worker.attached.token) as thief:
            assert at_end(thief)
        assert worker.store(2, key_of(2), [0]) is Outcome.OK


def test_the_connection_ends_with_its_session(sidecar: RunningSidecar) -> None:
    worker = Worker(sidecar.path)
    with attached_raw(sidecar, worker) as sock:
        worker.close()
        assert at_end(sock)


def test_who_names_nobody_is_closed_in_time_and_makes_room(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "HANDSHAKES_MAX", 4)
    places.patch(monkeypatch, "HANDSHAKE_SECONDS_MAX", 3600.0)
    with RunningSidecar(config_in(short_directory)) as sidecar:
        before = open_fds()
        silent: list[socket.socket] = []
        for _ in range(20):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(20)
            sock.connect(sidecar.endpoint.removeprefix("ipc://"))
            silent.append(sock)
        for sock in silent[:16]:
            assert at_end(sock), "the oldest makes room"
        assert open_fds() <= before + 20 + 4
        with Worker(sidecar.path) as worker:
            assert worker.store(1, key_of(1), [0]) is Outcome.OK
        for sock in silent:
            sock.close()
        places.patch(monkeypatch, "HANDSHAKE_SECONDS_MAX", 0.1)
        with socket.socket(socket.AF_UNIX) as late:
            late.settimeout(20)
            late.connect(sidecar.endpoint.removeprefix("ipc://"))
            assert at_end(late)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
        GREETING.replace(b"NULL", b"CURV"),
        GREETING[:10] + b"\x01" + GREETING[11:],
        GREETING + frame(b"a message before its READY"),
        GREETING + bytes([COMMAND, 5]) + b"\x04PING",
        GREETING + bytes([COMMAND, 7]) + b"\x05READY\x20",
        GREETING + bytes([COMMAND, 12]) + b"\x05READY\x01aaaaa",
        GREETING + struct.pack(">BQ", COMMAND | LONG, 1 << 40),
        GREETING + struct.pack(">BQ", COMMAND | LONG, (1 << 64) - 1),
        GREETING + ready(b""),
        GREETING + ready(b"x" * 200),
    ],
)
def test_what_is_no_handshake_ends_the_connection_alone(
    sidecar: RunningSidecar, said: bytes
) -> None:
    with Worker(sidecar.path) as worker:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(20)
            sock.connect(sidecar.endpoint.removeprefix("ipc://"))
            with contextlib.suppress(BrokenPipeError):
                sock.sendall(said)
            assert at_end(sock)
        assert worker.store(1, key_of(1), [0]) is Outcome.OK


@pytest.mark.parametrize(
    "said", [struct.pack(">BQ", LONG, 1 << 40), bytes([COMMAND, 5]) + b"\x04PING"]
)
def test_a_frame_out_of_bounds_ends_its_connection(sidecar: RunningSidecar, said: bytes) -> None:
    with Worker(sidecar.path) as bad, Worker(sidecar.path, engine_id="good") as good:
        with attached_raw(sidecar, bad) as sock:
            sock.sendall(said)
            assert at_end(sock)
        assert good.store(1, key_of("good"), [0]) is Outcome.OK


async def test_what_a_peer_does_not_read_is_kept_up_to_the_limit(short_directory: Path) -> None:
    path = short_directory / "jobs.sock"
    came: list[bytes] = []
    jobs = JobSocket(
        path,
        lambda token, _parts: came.append(token),
        lambda _token, _uid: True,
        lambda _token: None,
        lambda error: came.append(repr(error).encode()),
        mode=0o600,
        uids=[os.geteuid()],
        replies_queued_max=4,
    )
    assert jobs.send(b"peer", b"x") is Sent.GONE
    with await anyio.to_thread.run_sync(raw, str(path), b"peer") as sock:
        await anyio.to_thread.run_sync(sock.sendall, frame(b"here"))
        await until(lambda: came == [b"peer"])
        payload = bytes(range(256)) * 4096
        sent = 0
        while jobs.send(b"peer", payload) is Sent.OK:
            sent += 1
        assert sent == 4, "what the kernel took of the first counts with it"
        assert jobs.send(b"peer", payload) is Sent.FULL

        def read_all() -> bytes:
            data = bytearray()
            wanted = len(payload) * sent
            while data.count(payload) < sent:
                data += sock.recv(1 << 20)
                assert len(data) < wanted + 4096
            return bytes(data)

        data = await anyio.to_thread.run_sync(read_all)
        assert data.endswith(payload)
        assert jobs.send(b"peer", b"y" * 10) is Sent.OK
    jobs.close()
