"""Clients of a sidecar that the test plays (`listening.py`), with short pauses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from connector.client import Attempt, Client, SidecarSession
from sidecar.protocol import PROTOCOL_VERSION, Attach, Role
from tests.connector.listening import Sidecar, until


def attach_of(role: Role = Role.SCHEDULER) -> Attach:
    return Attach(
        version=PROTOCOL_VERSION,
        role=role,
        engine_id="engine",
        rank=0,
        world_size=1,
        topology="tp1",
        namespace=b"{}",
        block_tokens=16,
        blocks_per_chunk=4,
        pid=os.getpid(),
    )


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[Sidecar]:
    sidecar = Sidecar(short_directory)
    yield sidecar
    sidecar.close()


@pytest.fixture
def make_client(sidecar: Sidecar) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(attempt: Callable[[], Attempt] | None = None, *paths: str) -> Client:
        maker = attempt or (lambda: Attempt(attach_of()))
        clients.append(Client(paths or (sidecar.path,), maker, retry_seconds=0.02))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def live(client: Client) -> SidecarSession:
    until(lambda: client.session is not None, "a session")
    session = client.session
    assert session is not None
    return session
