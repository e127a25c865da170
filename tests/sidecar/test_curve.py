"""Jobs over TCP: only the keys of clients that are attached get in, each as itself."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from connector.client import Attempt
from connector.client import Client as ConnectorClient
from sidecar import protocol
from sidecar.config.model import ConfigError, loads
from sidecar.errors import StartError
from sidecar.protocol import Outcome, Role, Submit
from tests import places
from tests.sidecar.client import (
    WAIT_SECONDS_MAX,
    RefusedError,
    RunningSidecar,
    Scheduler,
    Worker,
    attach_message,
    config_in,
    key_of,
)


def tcp(directory: Path, **more: Any) -> RunningSidecar:
    file = directory / "curve.key"
    _, secret = zmq.curve_keypair()
    file.write_bytes(secret)
    file.chmod(0o600)
    runtime = {"endpoint": "tcp://127.0.0.1:0", "curve_secret_key_file": file}
    return RunningSidecar(config_in(directory, runtime=runtime, **more))


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    with tcp(short_directory) as running:
        yield running


def refused(sidecar: RunningSidecar, why: str) -> float:
    for line in sidecar.get("/metrics").decode().splitlines():
        if line.startswith(f'kvlake_handshakes_refused_total{{why="{why}"}}'):
            return float(line.split()[-1])
    return 0.0


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def dealer(
    sidecar: RunningSidecar,
    token: bytes,
    server_key: bytes = b"",
    keys: tuple[bytes, bytes] | None = None,
) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.ROUTING_ID, token)
    if keys is not None:
        sock.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, keys[0])
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys[1])
    sock.connect(sidecar.info.endpoint)
    yield sock
    context.destroy(linger=0)


def serves(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path, engine_id="honest") as worker:
        assert worker.store(1, key_of("honest"), [0]) is Outcome.OK


def test_the_right_key_works_from_end_to_end(sidecar: RunningSidecar) -> None:
    assert sidecar.info.endpoint.startswith("tcp://127.0.0.1:")
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path) as scheduler:
        content = worker.fill(range(4), seed=1)
        assert worker.store(1, key_of("x"), range(4)) is Outcome.OK
        scheduler.lease(2, [key_of("x")])
        assert worker.load(2, key_of("x"), [7, 8, 9, 10]) is Outcome.OK
        assert [worker.read(block) for block in range(7, 11)] == content
        assert worker.attached.curve_key == scheduler.attached.curve_key


def test_events_wait_until_their_client_speaks(sidecar: RunningSidecar) -> None:
    keys = [key_of(number) for number in range(3)]
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path, want_events=True) as scheduler:
        for job_id, key in enumerate(keys, 1):
            assert worker.store(job_id, key, [0]) is Outcome.OK
        scheduler.release()
        told: list[bytes] = []
        while len(told) < len(keys):
            message = scheduler.receive()
            assert isinstance(message, protocol.Events)
            told.extend(event.key for event in message.stored)
        assert told == keys
        assert sidecar.status()["sockets"]["replies_dropped"] == 0


def test_the_connector_brings_its_key(sidecar: RunningSidecar) -> None:
    client = ConnectorClient(
        (str(sidecar.path),), lambda: Attempt(attach_message(Role.SCHEDULER, engine_id="vllm"))
    )
    try:
        assert client.wait_attached(WAIT_SECONDS_MAX)
        session = client.session
        assert session is not None
        assert session.curve is not None
        assert session.curve[2].decode() not in repr(session)
        assert client.send(session, protocol.Lookup(session.epoch, 1, [key_of("none")], 100))
        found: list[object] = []

        def answered() -> bool:
            found.extend(client.poll())
            return bool(found)

        wait_for(answered)
        assert isinstance(found[0], protocol.LookupDone)
    finally:
        client.close()


@pytest.mark.promise("curve-key")
def test_a_key_that_nobody_attached_with_gets_nowhere(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        keys = zmq.curve_keypair()
        with dealer(sidecar, b"\x01" * 16, worker.attached.curve_key, keys) as sock:
            sock.send(protocol.encode(Submit(worker.epoch, 0, [], [])))
            wait_for(lambda: refused(sidecar, "key") >= 1)
        assert sidecar.status()["sockets"]["frames_received"] == 0
        assert worker.store(1, key_of("x"), [0]) is Outcome.OK


@pytest.mark.promise("curve-required")
def test_a_connection_without_curve_gets_nowhere(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker, dealer(sidecar, worker.attached.token) as sock:
        sock.send(protocol.encode(Submit(worker.epoch, 0, [], [])))
        wait_for(lambda: refused(sidecar, "protocol") + refused(sidecar, "broken_off") >= 1)
        assert sidecar.status()["sockets"]["frames_received"] == 0
        assert worker.store(1, key_of("x"), [0]) is Outcome.OK


@pytest.mark.promise("curve-session")
def test_the_key_of_a_session_that_ended_gets_nowhere(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        token, keys, server = worker.attached.token, worker.keys, worker.attached.curve_key
        assert worker.store(1, key_of("x"), [0]) is Outcome.OK
    wait_for(lambda: not sidecar.status()["sessions"])
    before = sidecar.status()["sockets"]["frames_received"]
    with dealer(sidecar, token, server, keys) as sock:
        sock.send(b"anything")
        wait_for(lambda: refused(sidecar, "key") >= 1)
    assert sidecar.status()["sockets"]["frames_received"] == before


@pytest.mark.promise("curve-identity")
def test_a_token_with_another_clients_key_is_refused(sidecar: RunningSidecar) -> None:
    """The thief is attached itself, and knows the victim's token before the victim connects."""
    with Worker(sidecar.path, engine_id="thief") as thief:
        with socket.socket(socket.AF_UNIX) as unix:
            unix.connect(str(sidecar.path))
            keys = zmq.curve_keypair()
            message = attach_message(Role.SCHEDULER, engine_id="victim", curve_key=keys[0])
            unix.sendall(protocol.frame_stream(protocol.encode(message)))
            header, fds, _, _ = socket.recv_fds(unix, 4, 4)
            body = unix.recv(protocol.stream_length(header), socket.MSG_WAITALL)
            attached = protocol.decode_attach_reply(body)
            for fd in fds:
                os.close(fd)
            assert isinstance(attached, protocol.Attached)
            with dealer(sidecar, attached.token, attached.curve_key, thief.keys) as sock:
                sock.send(protocol.encode(protocol.Lookup(thief.epoch, 1, [key_of("x")], 10)))
                sidecar.wait_until(
                    lambda now: now["sockets"]["frames_refused"].get("identity") == 1
                )
                assert not sock.poll(200), "the thief is answered nothing"
            unix.settimeout(WAIT_SECONDS_MAX)
            assert unix.recv(1) == b"", "the victim is told to attach again"
        assert sidecar.status()["counters"]["lookups"] == 0
        assert thief.store(1, key_of("own"), [0]) is Outcome.OK


def test_a_key_belongs_to_one_session(sidecar: RunningSidecar) -> None:
    with (
        Worker(sidecar.path) as worker,
        pytest.raises(RefusedError, match="another session has it"),
    ):
        Scheduler(sidecar.path, engine_id="other", curve_key=worker.keys[0])


@pytest.mark.parametrize("key", [b"short", b"\x00" * 40, b'"' * 40, b"a" * 41])
def test_what_is_no_key_is_refused(sidecar: RunningSidecar, key: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        Scheduler(sidecar.path, curve_key=key)
    assert caught.value.code == "curve"
    serves(sidecar)


def test_garbage_and_silence_disturb_nobody(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "HANDSHAKE_MILLISECONDS_MAX", 300)
    with tcp(short_directory) as sidecar:
        host, port = sidecar.info.endpoint.removeprefix("tcp://").rsplit(":", 1)
        garbage = [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, bytes(4096), b""]
        socks: list[socket.socket] = []
        for one in garbage:
            sock = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS_MAX)
            sock.sendall(one)
            socks.append(sock)
        serves(sidecar)
        for sock in socks:
            # A handshake that does not end in time is cut off, whatever came.
            while True:
                try:
                    if sock.recv(65536) == b"":
                        break
                except ConnectionResetError:
                    break
            sock.close()
        assert sidecar.status()["sockets"]["frames_received"] == 1


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.promise("tcp-key")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{endpoint: 'tcp://127.0.0.1:1'}", r"kvlake keygen.*curve_secret_key_file"),
        ("{endpoint: 'tcp://127.0.0.1', curve_secret_key_file: /k}", "is no endpoint"),
        ("{endpoint: 'udp://127.0.0.1:1', curve_secret_key_file: /k}", "is no endpoint"),
        ("{endpoint: ipc, curve_secret_key_file: /k}", "leave it out"),
        ("{endpoint: 'tcp://127.0.0.1:1', curve_secret_key_file: k}", "absolute"),
    ],
)
def test_an_endpoint_that_anybody_could_use_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loads(f"runtime: {given}")


@pytest.mark.parametrize(
    ("mode", "content", "said"),
    [(0o644, None, "mode 0644"), (0o600, "not a key", "holds no CURVE key"), (0o600, "", "empty")],
)
def test_a_key_file_that_is_none_stops_the_start(
    short_directory: Path, mode: int, content: str | None, said: str
) -> None:
    file = short_directory / "key"
    file.write_text(zmq.curve_keypair()[1].decode() if content is None else content)
    file.chmod(mode)
    runtime = {"endpoint": "tcp://127.0.0.1:0", "curve_secret_key_file": file}
    with pytest.raises(StartError, match=said):
        RunningSidecar(config_in(short_directory, runtime=runtime))


def test_a_taken_port_is_told(sidecar: RunningSidecar, short_directory: Path) -> None:
    runtime = {
        "name": "two",
        "endpoint": sidecar.info.endpoint,
        "curve_secret_key_file": short_directory / "curve.key",
    }
    with pytest.raises(StartError, match=r"runtime\.endpoint=.*cannot be bound"):
        RunningSidecar(config_in(short_directory, runtime=runtime))
