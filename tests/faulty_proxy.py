"""An HTTP proxy in front of a real object store that fails on command.

Owns a listener on the loopback address, one exchange per connection, and the list of faults of
`Fault`. It speaks just enough HTTP/1.1 for S3 clients: a request with a length or none, a response
that ends with the connection.

Does not own the server behind it, and knows nothing of S3 but two error bodies. `Host` reaches the
server as the client sent it, because the signature covers it.

Invariants: what was asked of it is in `requests`, in order; leaving the block ends every
connection, stalled ones too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

HOST: Final = "127.0.0.1"
HEAD_BYTES_MAX: Final = 65_536
PIECE_BYTES: Final = 65_536
ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024


class Fault(enum.Enum):
    """What the proxy does with an exchange."""

    PASS = "pass"
    REFUSE = "refuse"
    """Nobody listens: connecting fails."""
    HANG_UP = "hang up"
    """The connection is closed without an answer."""
    STALL = "stall"
    """The request is read and never answered, until the fault changes."""
    STALL_BODY = "stall body"
    """The head of the answer arrives, its body never."""
    HOLD = "hold"
    """Half of the request's body is sent on, or the first piece of the answer to one that has
    none; the rest when the fault changes."""
    SLOW_DOWN = "slow down"
    """503, as S3 answers one that asks too often."""
    FORBIDDEN = "forbidden"
    """403 AccessDenied."""
    TRUNCATE = "truncate"
    """The first half of the answer's body arrives, then the connection closes."""
    WRONG_BYTES = "wrong bytes"
    """One byte of the answer's body is changed."""


_ANSWERS: Final = {
    Fault.SLOW_DOWN: ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    Fault.FORBIDDEN: ("403 Forbidden", "AccessDenied", "Access Denied"),
}


@dataclasses.dataclass(frozen=True)
class _Request:
    line: str
    head: bytes
    body: bytes


class FaultyProxy:
    """A running proxy. Made by `faulty_proxy`."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"upstream={upstream!r}: must have a host and a port")
        self._upstream = (parts.hostname, parts.port)
        self._fault = Fault.PASS
        self._times = 0
        self._only = re.compile("")
        self._changed = anyio.Event()
        self._listening = anyio.Event()
        self._refusing = anyio.Event()
        self._scope = anyio.CancelScope()
        self.port = 0
        self.latency_seconds = 0.0
        """How long each exchange waits before the server hears of it."""
        self.bytes_per_second_max = 0
        """How fast bodies pass, each on its own; 0 for as fast as they come."""
        self.requests: list[str] = []
        """Method and path of each request that arrived, such as "GET /bucket/name"."""
        self.holding: list[str] = []
        """Those of `Fault.HOLD` that are half-way now."""

    @property
    def endpoint(self) -> str:
        """What a client takes as `endpoint_url`."""
        return f"http://{HOST}:{self.port}"

    async def become(self, fault: Fault, *, times: int = 0, only: str = "") -> None:
        """Treat exchanges that begin from now on so; after `times` of them pass again (0: stay).

        `only` is a regular expression: requests (as in `requests`) in which it is not found pass.
        Exchanges that were stalled are closed, those that were held go on. Returns once the fault
        is in force.
        """
        refused = self._fault is Fault.REFUSE
        self._fault, self._times, self._only = fault, times, re.compile(only)
        self._changed.set()
        self._changed = anyio.Event()
        if fault is Fault.REFUSE and not refused:
            self._refusing = anyio.Event()
            self._listening = anyio.Event()
            self._scope.cancel()
            await self._refusing.wait()
        elif refused and fault is not Fault.REFUSE:
            await self._listening.wait()

    async def serve(self) -> None:
        """Listen, or do not, as the fault says, until cancelled."""
        while True:
            while self._fault is Fault.REFUSE:
                self._refusing.set()
                await self._changed.wait()
            # The same port again, for clients that keep their endpoint.
            listener = await anyio.create_tcp_listener(
                local_host=HOST, local_port=self.port, reuse_port=False
            )
            self.port = listener.extra(SocketAttribute.local_port)
            with anyio.CancelScope() as self._scope:
                async with listener:
                    self._listening.set()
                    await listener.serve(self._exchange)

    async def wait_listening(self) -> None:
        """Wait until clients can connect."""
        await self._listening.wait()

    async def _exchange(self, client: SocketStream) -> None:
        async with client:
            # A client may go away at any moment, and the server may be down: that is a test's
            # business, and the other side sees it as a connection that closes.
            with contextlib.suppress(
                OSError,
                anyio.BrokenResourceError,
                anyio.ClosedResourceError,
                anyio.IncompleteRead,
                anyio.EndOfStream,
            ):
                request = await _receive(client)
                self.requests.append(request.line)
                await self._answer(client, request, self._take_fault(request), self._changed)

    def _take_fault(self, request: _Request) -> Fault:
        if not self._only.search(request.line):
            return Fault.PASS
        fault = self._fault
        if self._times:
            self._times -= 1
            if not self._times:
                self._fault = Fault.PASS
        return fault

    async def _answer(
        self, client: SocketStream, request: _Request, fault: Fault, changed: anyio.Event
    ) -> None:
        match fault:
            case Fault.HANG_UP | Fault.REFUSE:
                return
            case Fault.STALL:
                await changed.wait()
            case Fault.HOLD:
                await self._hold(client, request, changed)
            case Fault.SLOW_DOWN | Fault.FORBIDDEN:
                await client.send(_error(fault, with_body=not request.line.startswith("HEAD ")))
            case Fault.PASS | Fault.TRUNCATE | Fault.WRONG_BYTES | Fault.STALL_BODY:
                await anyio.sleep(self.latency_seconds + self._passing_seconds(request.body))
                head, body = await self._ask(request)
                await client.send(head)
                if fault is Fault.STALL_BODY:
                    await changed.wait()
                else:
                    await anyio.sleep(self._passing_seconds(body))
                    await client.send(_damage(body, fault))

    async def _hold(self, client: SocketStream, request: _Request, changed: anyio.Event) -> None:
        host, port = self._upstream
        half = len(request.body) // 2
        async with await anyio.connect_tcp(host, port) as server:
            await server.send(request.head + request.body[:half])
            if not request.body:
                await client.send(await server.receive(PIECE_BYTES))
            self.holding.append(request.line)
            try:
                await changed.wait()
            finally:
                self.holding.remove(request.line)
            if request.body:
                await server.send(request.body[half:])
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    await client.send(await server.receive(PIECE_BYTES))

    def _passing_seconds(self, body: bytes) -> float:
        return len(body) / self.bytes_per_second_max if self.bytes_per_second_max else 0.0

    async def _ask(self, request: _Request) -> tuple[bytes, bytes]:
        host, port = self._upstream
        async with await anyio.connect_tcp(host, port) as server:
            await server.send(request.head)
            await server.send(request.body)
            answer = bytearray()
            with contextlib.suppress(anyio.EndOfStream):
                while len(answer) < ANSWER_BYTES_MAX:
                    answer += await server.receive(PIECE_BYTES)
        head, end, body = bytes(answer).partition(b"\r\n\r\n")
        return head + end, body


@contextlib.asynccontextmanager
async def faulty_proxy(upstream: str) -> AsyncGenerator[FaultyProxy]:
    """A proxy in front of `upstream` (such as "http://127.0.0.1:8333"), passing at first."""
    proxy = FaultyProxy(upstream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(proxy.serve)
        await proxy.wait_listening()
        try:
            yield proxy
        finally:
            tasks.cancel_scope.cancel()


async def _receive(client: SocketStream) -> _Request:
    stream = BufferedByteReceiveStream(client)
    raw = await stream.receive_until(b"\r\n\r\n", HEAD_BYTES_MAX)
    first, *rest = raw.decode("latin-1").split("\r\n")
    fields = {
        name.lower(): value.strip() for name, _, value in (one.partition(":") for one in rest)
    }
    # The proxy asks for the body itself; "close" makes the end of the answer the end of file.
    if fields.get("expect", "").lower() == "100-continue":
        await client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "transfer-encoding" in fields:
        raise ValueError("the proxy reads bodies with a Content-Length only")
    body = await stream.receive_exactly(int(fields.get("content-length", "0")))
    kept = [one for one in rest if one.split(":")[0].lower() not in {"connection", "expect"}]
    head = "\r\n".join([first, *kept, "Connection: close"]) + "\r\n\r\n"
    method, target, _ = first.split(" ", 2)
    return _Request(f"{method} {urlsplit(target).path}", head.encode("latin-1"), body)


def _error(fault: Fault, *, with_body: bool) -> bytes:
    status, code, message = _ANSWERS[fault]
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return (head + body if with_body else head).encode()


def _damage(body: bytes, fault: Fault) -> bytes:
    if fault is Fault.TRUNCATE:
        return body[: len(body) // 2]
    if fault is Fault.WRONG_BYTES and body:
        middle = len(body) // 2
        return body[:middle] + bytes([body[middle] ^ 0xFF]) + body[middle + 1 :]
    return body
