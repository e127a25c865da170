"""Addresses of a host: one look-up for a burst, turns, failures, and names that move."""

from __future__ import annotations

import math
import socket
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from tests import places
from tests.tiers.test_s3_direct import IMAGE, OK, slot, telling
from tiers.store.access import Access
from tiers.store.s3_direct import ANSWER_SECONDS_MAX, Address, Addresses, S3DirectReads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

FOUR, SIX = socket.AF_INET, socket.AF_INET6


class FakeResolver:
    """In place of the system's: answers after a while, and counts."""

    def __init__(self, *hosts: tuple[int, str]) -> None:
        self.hosts: Sequence[tuple[int, str]] = hosts
        self.asked = 0
        self.fails = False

    async def getaddrinfo(self, _: str, port: int, **__: Any) -> list[Any]:
        self.asked += 1
        await anyio.lowlevel.checkpoint()
        if self.fails:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(family, socket.SOCK_STREAM, 6, "", (host, port)) for family, host in self.hosts]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> FakeResolver:
    fake = FakeResolver((FOUR, "10.0.0.1"))
    monkeypatch.setattr(anyio, "getaddrinfo", fake.getaddrinfo)
    return fake


def hosts(found: list[Address]) -> list[str | int]:
    return [one.sockaddr[0] for one in found]


async def all_of(calls: int, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(calls):
            tasks.start_soon(call)


async def test_a_burst_resolves_once_and_the_answer_holds_for_some_seconds(
    resolver: FakeResolver,
) -> None:
    now = [100.0]
    addresses = Addresses("store", 80, clock=lambda: now[0])
    await all_of(20, addresses.take)
    now[0] += ANSWER_SECONDS_MAX / 2
    assert await addresses.take() == [Address(FOUR, 6, ("10.0.0.1", 80))]
    assert resolver.asked == 1
    # The name moves.
    resolver.hosts = [(FOUR, "10.0.0.9")]
    now[0] += ANSWER_SECONDS_MAX
    assert hosts(await addresses.take()) == ["10.0.0.9"]
    assert resolver.asked == 2


async def test_connections_rotate_over_the_addresses_of_the_first_family(
    resolver: FakeResolver,
) -> None:
    resolver.hosts = [(FOUR, "a"), (FOUR, "b"), (SIX, "c"), (FOUR, "a")]
    addresses = Addresses("store", 80)
    taken = [hosts(await addresses.take()) for _ in range(4)]
    assert sorted(one[0] for one in taken) == ["a", "a", "b", "b"]
    assert all(sorted(map(str, one)) == ["a", "b", "c"] and one[-1] == "c" for one in taken)


async def test_failed_addresses_are_skipped_and_resolved_again_when_all_have_failed(
    resolver: FakeResolver,
) -> None:
    resolver.hosts = [(FOUR, "a"), (FOUR, "b")]
    addresses = Addresses("store", 80, clock=lambda: 100.0)
    first, second = await addresses.take()
    addresses.failed(first)
    assert await addresses.take() == [second]
    assert resolver.asked == 1
    addresses.failed(second)
    addresses.failed(second)
    assert len(await addresses.take()) == 2
    assert resolver.asked == 2


async def test_an_unknown_name_fails_and_the_next_call_asks_again(
    resolver: FakeResolver,
) -> None:
    resolver.fails = True
    addresses = Addresses("store", 80)
    for _ in range(2):
        with pytest.raises(socket.gaierror):
            await addresses.take()
    resolver.fails, resolver.hosts = False, []
    with pytest.raises(socket.gaierror, match="store has no address"):
        await addresses.take()
    resolver.hosts = [(FOUR, "a")]
    assert hosts(await addresses.take()) == ["a"]


async def test_a_cancelled_look_up_is_made_by_the_next_caller(
    resolver: FakeResolver,
) -> None:
    addresses = Addresses("store", 80)
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await addresses.take()
        tasks.start_soon(addresses.take)
    assert hosts(await addresses.take()) == ["10.0.0.1"]


async def test_reads_try_the_next_address_also_after_a_socket_error(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPv6 is not there, then an address where nobody listens, then the server."""
    resolver.hosts = [(-1, "::1"), (FOUR, "127.0.0.2"), (FOUR, "127.0.0.1")]
    places.patch(monkeypatch, "IDLE_SECONDS_MAX", -1.0)
    # However slow the machine is, the first answer holds.
    places.patch(monkeypatch, "ANSWER_SECONDS_MAX", math.inf, package="tiers")
    async with telling(*[OK + IMAGE.tobytes()] * 3) as (told, _):
        access = Access(connect_timeout=20, read_timeout=20)
        reads = S3DirectReads(f"http://store:{told.port}/bucket", access, None)
        for _ in range(3):
            assert await reads.get("name", slot()) == IMAGE.nbytes
        reads.close()
    assert told.connections == 3
    assert resolver.asked == 1
