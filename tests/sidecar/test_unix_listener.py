"""The listener of all Unix sockets, by itself."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from sidecar.protocol.peer import Peer
from sidecar.transport.unix_socket import UnixListener
from tests.sidecar.bench import until


async def test_a_lack_of_descriptors_is_a_pause(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = [errno.EMFILE, errno.ENOMEM]
    accept = socket.socket.accept

    def fails_twice(listener: socket.socket) -> Any:
        if left:
            raise OSError(left.pop(), "no more")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_twice)
    came: list[Peer] = []
    listener = UnixListener(short_directory / "a.sock", 0o600)

    def accepted(sock: socket.socket, peer: Peer) -> None:
        came.append(peer)
        sock.close()

    listener.start(accepted, lambda error: pytest.fail(repr(error)))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(listener.path))
        await until(lambda: bool(came))
    assert came == [Peer(os.getpid(), os.getuid(), os.getgid())]
    assert [one.getMessage() for one in caplog.records] == ["cannot accept"] * 2
    listener.close()
    listener.close()


async def test_who_is_connected_stays_when_the_file_is_made_again(short_directory: Path) -> None:
    came: list[socket.socket] = []
    listener = UnixListener(short_directory / "a.sock", 0o600)
    listener.start(lambda sock, _: came.append(sock), lambda error: pytest.fail(repr(error)))
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.connect(str(listener.path))
        await until(lambda: len(came) == 1)
        listener.path.unlink()
        listener.bind_again()
        second.connect(str(listener.path))
        await until(lambda: len(came) == 2)
        first.send(b"x")
        assert came[0].recv(1) == b"x"
    for sock in came:
        sock.close()
    listener.close()


async def test_an_error_of_the_callback_is_passed_on(short_directory: Path) -> None:
    errors: list[BaseException] = []

    def raises(sock: socket.socket, _: Peer) -> None:
        sock.close()
        raise RuntimeError("a bug")

    listener = UnixListener(short_directory / "a.sock", 0o600)
    listener.start(raises, errors.append)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(listener.path))
        await until(lambda: bool(errors))
    assert isinstance(errors[0], RuntimeError)
    listener.close()
