"""The proxy of the tests: what it does to tests other than those that use it."""

from __future__ import annotations

import gc
import socket

import anyio
import anyio.lowlevel
import pytest

from tests.faulty_proxy import HOST, Fault, faulty_proxy


async def test_a_connection_that_comes_as_it_stops_listening_is_not_left_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with faulty_proxy(f"http://{HOST}:9") as proxy:
        await anyio.wait_all_tasks_blocked()
        with socket.create_connection((HOST, proxy.port)):
            # The event loop hears of it as this task goes on, and has not accepted it yet.
            await anyio.lowlevel.checkpoint()
            await proxy.become(Fault.REFUSE)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, proxy.port))
        await proxy.become(Fault.PASS)
        with socket.create_connection((HOST, proxy.port)):
            await anyio.lowlevel.checkpoint()
    # pytest complains of sockets that nobody closed, in whatever test it is that they are found.
    gc.collect()
    assert not caplog.records
