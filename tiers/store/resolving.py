"""Where a host is: its addresses, looked up once for all connections of a burst.

Owns looking a host's name up, how long an answer holds, and in which order the addresses are tried.
Does not own connections (`s3_direct.py`), nor what time they may take.

The system's resolver is asked in a thread, so a burst of connections that each asked would start as
many threads at the moment when the event loop has most to do. An answer holds for a few seconds: a
name that moves is followed. Connections take turns at the addresses of the kind that the system
names first (a store behind a name with several of them), then at the others in the system's order.

Invariants: one look-up at a time; of those that wait for it, whoever was to make it may be
cancelled; an address that failed is not offered again while the answer holds, and when all have,
the name is looked up anew.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER_SECONDS_MAX: Final = 5.0
"""How long an answer holds: longer than a burst, shorter than anybody waits for a name to move."""


class Address(NamedTuple):
    """What `socket.socket` and `connect` take."""

    family: int
    protocol: int
    sockaddr: tuple[str | int, ...]


class Addresses:
    """The addresses of one host for TCP.

    Args:
        host: a name, or an address in digits.
        port: for all of them.
        clock: monotonic seconds.
    """

    def __init__(
        self, host: str, port: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._host = host
        self._port = port
        self._clock = clock
        self._asking = anyio.Lock()
        self._answer: list[Address] = []
        self._answered = 0.0
        self._turn = 0

    async def take(self) -> list[Address]:
        """Addresses in the order to try them: at least one. Raises an `OSError` for none."""
        if not self._holds:
            async with self._asking:
                # Somebody else may have asked meanwhile.
                if not self._holds:
                    await self._ask()
        first = [one for one in self._answer if one.family == self._answer[0].family]
        others = [one for one in self._answer if one.family != self._answer[0].family]
        self._turn += 1
        turn = self._turn % len(first)
        return [*first[turn:], *first[:turn], *others]

    def failed(self, address: Address) -> None:
        """Do not offer this one again before the host is looked up anew."""
        if address in self._answer:
            self._answer.remove(address)

    @property
    def _holds(self) -> bool:
        return bool(self._answer) and self._clock() - self._answered < ANSWER_SECONDS_MAX

    async def _ask(self) -> None:
        answer = await anyio.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        found = [Address(family, protocol, place) for family, _, protocol, _, place in answer]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, f"{self._host} has no address")
        self._answer, self._answered = list(dict.fromkeys(found)), self._clock()
