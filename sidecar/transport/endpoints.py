"""ZMQ endpoints that a sidecar binds: one way to bind them, for a start and for a trial of it.

Owns the binding and what is said where it fails. Does not own the sockets (`events/keyed_port.py`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import zmq

from sidecar.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Generator


def bind(socket: zmq.Socket[bytes], field: str, endpoint: str) -> str:
    """Bind a socket to what a setting says; returns where it is. Raises `StartError`."""
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise StartError(
            f"{field}={endpoint} cannot be bound: {error}; it must be an address of this "
            "machine, with a port that is free (or 0 for any)"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


@contextlib.contextmanager
def bound(field: str, endpoint: str) -> Generator[None]:
    """Have an endpoint over TCP for a moment, and serve nobody there. Raises `StartError`."""
    context = zmq.Context(io_threads=1)
    try:
        bind(context.socket(zmq.ROUTER), field, endpoint)
        yield
    finally:
        context.destroy(linger=0)
