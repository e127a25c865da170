"""An HTTP proxy in front of a real object store that fails on command, and notes what it is asked.

Owns a listener on the loopback address, with TLS or without, one exchange per connection, and the
list of faults of `Fault`. It speaks just enough HTTP/1.1 for clients of object stores: a request
with a length or none, a response that ends with the connection. A client may take it for the
server itself (reverse), or be told to use it as its proxy (forward): then targets are whole URLs,
and `CONNECT` is a tunnel to the same server.

Does not own the server behind it, and knows nothing of S3 but error bodies. `Host` reaches the
server as the client sent it, because the signature covers it.

Invariants: what was asked of it is in `exchanges`, in order; leaving the block ends every
connection, stalled ones too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
import socket
import struct
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream, Listener, SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSListener

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Mapping

HOST: Final = "127.0.0.1"
CHUNK: Final = r"/[0-9a-f]{2}/[0-9a-f]{64}/[^/]+\.arrow$"
"""Ends a request for a chunk, for `only`. The catalog's files are requested all the time."""
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
    NOT_FOUND = "not found"
    """404 NoSuchKey, whatever is asked for."""
    NO_BUCKET = "no bucket"
    """404 NoSuchBucket."""
    TOO_MANY = "too many"
    """429, as stores other than S3 say "slow down"."""
    BROKEN = "broken"
    """500 InternalError."""
    EXPIRED = "expired"
    """400 ExpiredToken: the credentials were good once."""
    SKEWED = "skewed"
    """403 RequestTimeTooSkewed: the clocks differ too much."""
    NO_CONDITIONS = "no conditions"
    """501 NotImplemented, to a write that must not replace anything; others pass."""
    RESET = "reset"
    """The first half of the answer's body arrives, then the connection is reset."""
    TRUNCATE = "truncate"
    """The first half of the answer's body arrives, then the connection closes."""
    WRONG_BYTES = "wrong bytes"
    """One byte of the answer's body is changed."""


_ANSWERS: Final = {
    Fault.SLOW_DOWN: ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    Fault.FORBIDDEN: ("403 Forbidden", "AccessDenied", "Access Denied"),
    Fault.NOT_FOUND: ("404 Not Found", "NoSuchKey", "The specified key does not exist."),
    Fault.NO_BUCKET: ("404 Not Found", "NoSuchBucket", "The specified bucket does not exist"),
    Fault.TOO_MANY: ("429 Too Many Requests", "TooManyRequests", "Please slow down"),
    Fault.BROKEN: ("500 Internal Server Error", "InternalError", "We encountered an error."),
    Fault.EXPIRED: ("400 Bad Request", "ExpiredToken", "The provided token has expired."),
    Fault.NO_CONDITIONS: ("501 Not Implemented", "NotImplemented", "A header is not implemented"),
    Fault.SKEWED: ("403 Forbidden", "RequestTimeTooSkewed", "The difference is too large."),
}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One request, as it was on the wire."""

    method: str
    target: str
    """A path with its query; a whole URL where the client took this for its proxy."""
    fields: Mapping[str, str]
    """The head's fields, names in lower case."""
    body: bytes

    @property
    def line(self) -> str:
        """Method and path, such as "GET /bucket/name"."""
        return f"{self.method} {urlsplit(self.target).path}"

    @property
    def head(self) -> bytes:
        """What the server behind is sent."""
        parts = urlsplit(self.target)
        origin = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        lines = [f"{self.method} {origin} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.fields.items() if name not in _HOP]
        return ("\r\n".join([*lines, "connection: close"]) + "\r\n\r\n").encode("latin-1")


_HOP: Final = frozenset(("connection", "expect", "proxy-connection", "proxy-authorization"))


class FaultyProxy:
    """A running proxy. Made by `faulty_proxy`."""

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(upstream)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"upstream={upstream!r}: must have a host and a port")
        self._upstream = (parts.hostname, parts.port)
        self._tls = tls
        self._fault = Fault.PASS
        self._times = 0
        self._only = re.compile("")
        self._changed = anyio.Event()
        self._listening = anyio.Event()
        self._refusing = anyio.Event()
        self._listener: Listener[ByteStream] | None = None
        self._closed = False
        self.port = 0
        self.latency_seconds = 0.0
        """How long each exchange waits before the server hears of it."""
        self.bytes_per_second_max = 0
        """How fast bodies pass, each on its own; 0 for as fast as they come."""
        self.exchanges: list[Exchange] = []
        """Each request that arrived."""
        self.holding: list[str] = []
        """Those of `Fault.HOLD` that are half-way now."""

    @property
    def endpoint(self) -> str:
        """What a client takes as `endpoint_url`."""
        return f"{'http' if self._tls is None else 'https'}://{HOST}:{self.port}"

    @property
    def requests(self) -> list[str]:
        """Method and path of each request that arrived, such as "GET /bucket/name"."""
        return [one.line for one in self.exchanges]

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
            await self._stop_listening()
            await self._refusing.wait()
        elif refused and fault is not Fault.REFUSE:
            await self._listening.wait()

    async def serve(self) -> None:
        """Listen, or do not, as the fault says, until `aclose`."""
        while not self._closed:
            while self._fault is Fault.REFUSE:
                self._refusing.set()
                await self._changed.wait()
            # The same port again, for clients that keep their endpoint.
            listener: Listener[ByteStream] = await anyio.create_tcp_listener(
                local_host=HOST, local_port=self.port, reuse_port=False
            )
            self.port = listener.extra(SocketAttribute.local_port)
            if self._tls is not None:
                listener = TLSListener(listener, self._tls, standard_compatible=False)
            self._listener = listener
            async with listener:
                self._listening.set()
                try:
                    await listener.serve(self._exchange)
                except* anyio.ClosedResourceError:
                    """It was closed, and its connections ended with it."""

    async def aclose(self) -> None:
        """End every connection, and listen no more."""
        self._closed = True
        await self._stop_listening()

    async def _stop_listening(self) -> None:
        # Closed rather than cancelled: asyncio loses a connection that arrives while it is told to
        # accept no more, and its socket is complained of in whatever test comes next.
        if self._listener is not None:
            await self._listener.aclose()

    async def wait_listening(self) -> None:
        """Wait until clients can connect."""
        await self._listening.wait()

    async def _exchange(self, client: ByteStream) -> None:
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
                # Without the body: a long run asks for gigabytes.
                self.exchanges.append(dataclasses.replace(request, body=b""))
                if request.method == "CONNECT":
                    await self._tunnel(client)
                    return
                await self._answer(client, request, self._take_fault(request), self._changed)

    def _take_fault(self, request: Exchange) -> Fault:
        if not self._only.search(request.line):
            return Fault.PASS
        fault = self._fault
        if fault is Fault.NO_CONDITIONS and "if-none-match" not in request.fields:
            return Fault.PASS
        if self._times:
            self._times -= 1
            if not self._times:
                self._fault = Fault.PASS
        return fault

    async def _answer(
        self, client: ByteStream, request: Exchange, fault: Fault, changed: anyio.Event
    ) -> None:
        match fault:
            case Fault.HANG_UP | Fault.REFUSE:
                return
            case Fault.STALL:
                await changed.wait()
            case Fault.HOLD:
                await self._hold(client, request, changed)
            case fault if fault in _ANSWERS:
                await client.send(_error(fault, with_body=request.method != "HEAD"))
            case Fault.RESET:
                head, body = await self._ask(request)
                await client.send(head + body[: len(body) // 2])
                _reset(client)
            case Fault.PASS | Fault.TRUNCATE | Fault.WRONG_BYTES | Fault.STALL_BODY:
                await anyio.sleep(self.latency_seconds + self._passing_seconds(request.body))
                head, body = await self._ask(request)
                await client.send(head)
                if fault is Fault.STALL_BODY:
                    await changed.wait()
                else:
                    await anyio.sleep(self._passing_seconds(body))
                    await client.send(_damage(body, fault))
            case _:
                raise AssertionError(fault)

    async def _tunnel(self, client: ByteStream) -> None:
        host, port = self._upstream
        async with await anyio.connect_tcp(host, port) as server, anyio.create_task_group() as both:
            await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            both.start_soon(_pump, client, server, both.cancel_scope)
            both.start_soon(_pump, server, client, both.cancel_scope)

    async def _hold(self, client: ByteStream, request: Exchange, changed: anyio.Event) -> None:
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

    async def _ask(self, request: Exchange) -> tuple[bytes, bytes]:
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
async def faulty_proxy(
    upstream: str, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[FaultyProxy]:
    """A proxy in front of `upstream` (such as "http://127.0.0.1:8333"), passing at first."""
    proxy = FaultyProxy(upstream, tls)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(proxy.serve)
        await proxy.wait_listening()
        try:
            yield proxy
        finally:
            with anyio.CancelScope(shield=True):
                await proxy.aclose()
            tasks.cancel_scope.cancel()


async def _receive(client: ByteStream) -> Exchange:
    stream = BufferedByteReceiveStream(client)
    raw = await stream.receive_until(b"\r\n\r\n", HEAD_BYTES_MAX)
    first, *rest = raw.decode("latin-1").split("\r\n")
    fields = {
        name.lower(): value.strip() for name, _, value in (one.partition(":") for one in rest)
    }
    # The proxy asks for the body itself.
    if fields.get("expect", "").lower() == "100-continue":
        await client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "transfer-encoding" in fields:
        raise ValueError("the proxy reads bodies with a Content-Length only")
    body = await stream.receive_exactly(int(fields.get("content-length", "0")))
    method, target, _ = first.split(" ", 2)
    return Exchange(method, target, fields, body)


async def _pump(source: ByteStream, sink: ByteStream, scope: anyio.CancelScope) -> None:
    with contextlib.suppress(
        anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError
    ):
        while True:
            await sink.send(await source.receive(PIECE_BYTES))
    scope.cancel()


def _reset(client: ByteStream) -> None:
    """Have the kernel send RST, rather than FIN, when the connection is closed."""
    raw: socket.socket = client.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


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
