"""KV events over TCP: what a peer without a key can do, and the settings of jobs that went."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import zmq

from sidecar.config.model import ConfigError, loads
from sidecar.errors import StartError
from sidecar.protocol import Outcome
from tests import places
from tests.sidecar.client import WAIT_SECONDS_MAX, RunningSidecar, Worker, key_of
from tests.sidecar.configurations import with_events
from tests.sidecar.test_job_socket import COMMAND, LONG, MORE, anonymous_bytes, at_end, frame, ready

MIB: Final = 1 << 20
PUBLISHER, REPLAY = "events", "replay"


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def tcp(directory: Path, **changes: Any) -> dict[str, Any]:
    """The section `events`, over TCP with keys that nobody here has."""
    file = directory / "curve.key"
    if not file.exists():
        file.write_bytes(zmq.curve_keypair()[1])
        file.chmod(0o600)
    return {
        "endpoint": "tcp://127.0.0.1:0",
        "replay_endpoint": "tcp://127.0.0.1:0",
        "curve_secret_key_file": str(file),
        "subscribers": [zmq.curve_keypair()[0].decode()],
        **changes,
    }


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    config = with_events(short_directory, events=tcp(short_directory))
    with RunningSidecar(config) as running:
        yield running


def connected(sidecar: RunningSidecar, which: str) -> socket.socket:
    endpoint = sidecar.events if which == PUBLISHER else sidecar.replay
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WAIT_SECONDS_MAX)


def serves(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path, engine_id="honest") as worker:
        assert worker.store(1, key_of("honest"), [0]) is Outcome.OK


@pytest.mark.promise("event-memory")
@pytest.mark.parametrize("which", [PUBLISHER, REPLAY])
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(greeting(b"CURVE"), id="curve"),
        pytest.param(greeting(b"NULL") + ready(b"x"), id="null"),
        # Another version of the protocol, in which nothing is asked before messages come.
        pytest.param(b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00", id="zmtp-2"),
        pytest.param(b"\x01\x00", id="zmtp-1"),
    ],
)
@pytest.mark.parametrize("size_bytes", [1, 1000, MIB])
def test_frames_of_a_peer_without_a_key_take_no_memory(
    sidecar: RunningSidecar, which: str, before: bytes, size_bytes: int
) -> None:
    """A message that never ends, again and again: 64 MiB of it on each socket."""
    held = anonymous_bytes()
    many = frame(bytes(size_bytes), MORE) * max(1, MIB // (size_bytes + 9))
    sent = 0
    while sent < 64 * MIB:
        with connected(sidecar, which) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(before)
            for _ in range(64):
                sent += len(many)
                sock.sendall(many)
    serves(sidecar)
    grown = anonymous_bytes() - held
    assert grown < 24 * MIB, f"{grown / MIB:.0f} MiB"


@pytest.mark.promise("event-memory")
@pytest.mark.parametrize("which", [PUBLISHER, REPLAY])
def test_a_long_frame_of_a_peer_without_a_key_takes_no_memory_while_it_comes(
    sidecar: RunningSidecar, which: str
) -> None:
    """A handshake frame that says it has 256 MiB, and 64 of them."""
    held = anonymous_bytes()
    with connected(sidecar, which) as sock:
        # Where the frame is refused, the connection is cut, and sending fails.
        with contextlib.suppress(ConnectionError):
            sock.sendall(greeting(b"CURVE") + struct.pack(">BQ", COMMAND | LONG, 256 * MIB))
            for _ in range(64):
                sock.sendall(bytes(MIB))
        serves(sidecar)
        grown = anonymous_bytes() - held
    assert grown < 24 * MIB, f"{grown / MIB:.0f} MiB"


@pytest.mark.parametrize("which", [PUBLISHER, REPLAY])
def test_garbage_and_silence_disturb_nobody(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    places.patch(monkeypatch, "HANDSHAKE_MILLISECONDS_MAX", 300)
    config = with_events(short_directory, events=tcp(short_directory))
    garbage = [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, bytes(4096), b""]
    garbage += [greeting(b"CURVE") + struct.pack(">BQ", 6, 1 << 62)]
    with RunningSidecar(config) as sidecar:
        socks: list[socket.socket] = []
        for one in garbage:
            socks.append(connected(sidecar, which))
            socks[-1].sendall(one)
        serves(sidecar)
        for sock in socks:
            # A handshake that does not end in time is cut off, whatever came.
            assert at_end(sock)
            sock.close()


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "content", "said"),
    [(0o644, None, "mode 0644"), (0o600, "", "empty")],
)
def test_a_key_file_that_is_none_stops_the_start(
    short_directory: Path, mode: int, content: str | None, said: str
) -> None:
    events = tcp(short_directory)
    file = Path(events["curve_secret_key_file"])
    if content is not None:
        file.write_text(content)
    file.chmod(mode)
    with pytest.raises(StartError, match=said):
        RunningSidecar(with_events(short_directory, events=events))


def test_a_taken_port_is_told(sidecar: RunningSidecar, short_directory: Path) -> None:
    taken = tcp(short_directory, endpoint=sidecar.events)
    config = with_events(short_directory, runtime={"name": "two"}, events=taken)
    with pytest.raises(StartError, match=r"events\.endpoint=.*cannot be bound"):
        RunningSidecar(config)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("runtime: {endpoint: ipc}", "runtime.endpoint"),
        ("runtime: {curve_secret_key_file: /k}", "runtime.curve_secret_key_file"),
        ("limits: {frames_queued_max: 16}", "limits.frames_queued_max"),
    ],
)
def test_settings_of_jobs_over_tcp_are_unknown(given: str, field: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{field}: unknown setting")):
        loads(given)
