"""GETs of S3 objects whose bytes go from the socket to the slot and nowhere else.

Owns plain HTTP/1.1 connections to one server, its addresses, and the exchange of one object on a
connection, in a thread of its own: the kernel copies into the slot. obstore allocates its own
memory: its reads cost twice the processor time. Does not own credentials (`aws_credentials.py`),
nor which stores are read this way (`obstore_client.py`).

Invariants: when `get` has returned or raised, cancelled or not, no thread touches the slot any
more, and a cancelled one ends at once, because its connection is shut down; one object is one
request, unless a kept connection had been closed by the server before it could read the request; a
connection is kept only after an answer that was read to its end.
"""

import asyncio
import contextlib
import datetime as dt
import errno
import math
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import quote, urlsplit

import anyio
import anyio.to_thread

from tiers.store.access import Access
from tiers.store.aws_credentials import OBSTORE_AHEAD_SECONDS, Credential, Provider, region_of
from tiers.store.client import PIECE_BYTES, Bytes, Seen, check_size, run_to_end
from tiers.threads import ComputeLimiter

IDLE_SECONDS_MAX: Final = 60.0
ANSWER_SECONDS_MAX: Final = 5.0
"""How long an answer of the resolver holds: longer than a burst, and short enough to follow a name
that moves."""
HEAD_BYTES_MAX: Final = 65_536
HEAD_PIECE_BYTES: Final = 2048
"""Room for a usual head, and little of the body, which is copied once more behind it."""
ERROR_BYTES_MAX: Final = 65_536
_LAST_CHUNK = re.compile(rb"(^|\r\n)0\r\n\r\n$")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |$)")
_CODE = re.compile(rb"<Code>(\w+)</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]*)</Message>")


class Address(NamedTuple):
    """What `socket.socket` and `connect` take."""

    family: int
    protocol: int
    sockaddr: tuple[str | int, ...]


class Addresses:
    """The addresses of one host for TCP, looked up once, in a thread, for a burst of connections.

    Connections rotate over the addresses of the family that the system names first. An address that
    failed is not offered again while the answer holds.
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
        """Addresses in the order to try them, at least one. Raises `OSError` if there is none."""
        async with self._asking:
            if not self._answer or self._clock() - self._answered >= ANSWER_SECONDS_MAX:
                lines = await anyio.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                found = [
                    Address(family, protocol, place) for family, _, protocol, _, place in lines
                ]
                if not found:
                    raise socket.gaierror(socket.EAI_NONAME, f"{self._host} has no address")
                self._answer, self._answered = list(dict.fromkeys(found)), self._clock()
        first = [one for one in self._answer if one.family == self._answer[0].family]
        others = [one for one in self._answer if one.family != self._answer[0].family]
        self._turn += 1
        turn = self._turn % len(first)
        return [*first[turn:], *first[:turn], *others]

    def failed(self, address: Address) -> None:
        """Do not offer this one before the host is looked up again."""
        if address in self._answer:
            self._answer.remove(address)


class NotUnderstoodError(Exception):
    """The server answers in a way that only a full HTTP client follows."""


class AnswerError(Exception):
    """The server refused. `response` has botocore's shape, which `errors.py` reads."""

    def __init__(self, status: int, body: bytes) -> None:
        code, message = _CODE.search(body), _MESSAGE.search(body)
        words = message[1].decode(errors="replace") if message else "no message"
        super().__init__(f"status code: {status}, {code[1].decode() if code else ''} {words}")
        self.response: dict[str, dict[str, object]] = {
            "Error": {"Code": code[1].decode() if code else ""},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class _StaleError(Exception):
    """A kept connection had ended before it could be used again."""


class _Head(NamedTuple):
    status: int
    length_bytes: int
    keep: bool
    rest: bytes
    """The part of the body that came with it."""


class _Connection:
    """A connected socket, used by one exchange at a time."""

    def __init__(self, sock: socket.socket, read_seconds_max: float, turns: ComputeLimiter) -> None:
        # A blocking socket with the kernel's own limit: Python's would make it non-blocking, and
        # then one call could not wait for a whole body.
        sock.setblocking(True)
        seconds = int(read_seconds_max)
        limit = struct.pack("ll", seconds, int((read_seconds_max - seconds) * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._read_seconds_max = read_seconds_max
        self._turns = turns
        self.idle_since = 0.0

    def fetch(
        self, request: Callable[[], bytes], into: Bytes, seen: Seen | None
    ) -> tuple[int, bool]:
        """In a thread: send the request and fill the start of `into`.

        Returns the size, and whether the connection may serve again.
        """
        with _batch_scheduling():
            with self._turns:
                signed_request = request()
            try:
                head = self._ask(signed_request)
                if head.status not in (200, 206):
                    raise AnswerError(head.status, self._error_body(head))
                check_size(head.length_bytes, into.nbytes)
                self._fill(into.data[: head.length_bytes], head.rest, seen)
            except BlockingIOError as error:
                raise TimeoutError("the server is silent for store.read_timeout") from error
            return head.length_bytes, head.keep

    def _ask(self, request: bytes) -> _Head:
        try:
            self._sock.sendall(request)
            return self._head()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _StaleError from error

    def _head(self) -> _Head:
        received, skipped = b"", 0
        while True:
            while (end := received.find(b"\r\n\r\n")) < 0:
                piece = self._sock.recv(HEAD_PIECE_BYTES)
                if not piece and not received and not skipped:
                    raise _StaleError
                if not piece or skipped + len(received) > HEAD_BYTES_MAX:
                    raise _ended(skipped + len(received), "the head")
                received += piece
            head = _parsed(received[:end], received[end + 4 :])
            if head.status >= 200:
                return head
            # Informational: 103 Early Hints, for one.
            received, skipped = head.rest, skipped + end + 4

    def _fill(self, target: memoryview, rest: bytes, seen: Seen | None) -> None:
        """Receive in pieces that are still in the core's cache when `seen` reads them.

        The thread waits in the kernel, which wakes it for a piece and not for each packet. During
        its turn it takes what has arrived.
        """
        done = min(len(rest), len(target))
        target[:done] = rest[:done]
        size_bytes, reported, low_water = len(target), 0, 1
        arrived = select.poll()
        arrived.register(self._sock, select.POLLIN)
        while done < size_bytes:
            piece_bytes = min(PIECE_BYTES, size_bytes - done)
            if piece_bytes != low_water:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, piece_bytes)
                low_water = piece_bytes
            silent = not arrived.poll(1000 * self._read_seconds_max)
            with self._turns:
                while done < size_bytes:
                    piece = target[done : min(reported + PIECE_BYTES, size_bytes)]
                    try:
                        count = self._sock.recv_into(piece, 0, socket.MSG_DONTWAIT)
                    except BlockingIOError:
                        if silent:
                            raise
                        break
                    if count == 0:
                        raise _ended(done, f"an object of {size_bytes} bytes")
                    done += count
                    if seen is not None:
                        seen(size_bytes, reported, done)
                    reported, silent = done, False
        if seen is not None and reported < done:
            seen(size_bytes, reported, done)
        if low_water != 1:
            # The next answer's head is shorter.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _error_body(self, head: _Head) -> bytes:
        body = bytearray(head.rest)
        with contextlib.suppress(OSError):
            # One without a length ends with the connection, or with its last chunk.
            while len(body) < head.length_bytes and not _LAST_CHUNK.search(body):
                piece = self._sock.recv(HEAD_PIECE_BYTES)
                if not piece:
                    break
                body += piece
        return bytes(body)

    def usable(self, now: float) -> bool:
        """Whether a kept connection is still open and silent."""
        # Not select(): it knows no descriptor above 1,023.
        readable = select.poll()
        readable.register(self._sock, select.POLLIN)
        return not readable.poll(0) and now - self.idle_since < IDLE_SECONDS_MAX

    def cut(self) -> None:
        """Make a thread that waits for the socket return at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Not while a thread uses it."""
        self._sock.close()


class S3DirectReads:
    """Reads objects below `base`, `http://host:port/path` of a bucket or a prefix in it.

    `provider` has the credentials; None is an anonymous reader.
    """

    def __init__(self, base: str, access: Access, provider: Provider | None) -> None:
        parts = urlsplit(base)
        self._addresses = Addresses(parts.hostname or "", parts.port or 80)
        self._host_field = parts.netloc.rsplit("@", 1)[-1]
        self._path = parts.path.rstrip("/")
        self._region = region_of(access)
        self._provider = provider
        self._credential: Credential | None = None
        self._connect_seconds_max = access.connect_timeout
        self._read_seconds_max = access.read_timeout
        if provider is not None:
            # Here, because it takes a while that the first read should not.
            import botocore.auth  # noqa: F401 # pyright: ignore[reportUnusedImport]
        # The caller bounds how many reads run at a time; a thread mostly waits for its socket.
        self._threads = anyio.CapacityLimiter(math.inf)
        self._idle: list[_Connection] = []
        self._turns = ComputeLimiter()
        self._closed = False

    async def get(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """Fill the start of `into` with an object; its size. `seen` is called for each piece.

        Raises `ImageTruncated`, `AnswerError`, `NotUnderstoodError` or an `OSError`.
        """
        request = partial(self._request, name, into.nbytes, await self._renewed())
        while self._idle and not self._idle[-1].usable(time.monotonic()):
            self._idle.pop().close()
        if self._idle:
            with contextlib.suppress(_StaleError):
                return await self._exchange(self._idle.pop(), request, into, seen)
        try:
            return await self._exchange(await self._connect(), request, into, seen)
        except _StaleError:
            raise _ended(0, "an answer") from None

    async def _exchange(
        self,
        connection: _Connection,
        request: Callable[[], bytes],
        into: Bytes,
        seen: Seen | None,
    ) -> int:
        keep = False
        try:
            fetch = partial(connection.fetch, request, into, seen)
            size_bytes, keep = await run_to_end(fetch, self._threads, abort=connection.cut)
            return size_bytes
        finally:
            if keep and not self._closed:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()

    async def _renewed(self) -> Credential | None:
        if self._provider is None:
            return None
        ends = None if self._credential is None else self._credential["expires_at"]
        ahead = dt.timedelta(seconds=OBSTORE_AHEAD_SECONDS)
        if self._credential is None or (ends and dt.datetime.now(dt.UTC) >= ends - ahead):
            self._credential = await anyio.to_thread.run_sync(
                self._provider, abandon_on_cancel=True
            )
        return self._credential

    def _request(self, name: str, room_bytes: int, credential: Credential | None) -> bytes:
        """In the thread of the exchange: signing is not the loop's work."""
        # The safe characters are SigV4's: what is signed is what is sent.
        path = quote(f"{self._path}/{name}", safe="/-_.~")
        # One more than there is room for: so a longer object shows, and none is ever longer.
        fields = {"host": self._host_field, "range": f"bytes=0-{room_bytes}"}
        if credential is not None:
            fields = signed(fields, path, credential, self._region)
        lines = [f"{field}: {value}" for field, value in fields.items()]
        return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode()

    def tidy(self) -> None:
        """Close kept connections that the server has closed, or that were idle for long."""
        for connection in self._idle[:]:
            if not connection.usable(time.monotonic()):
                self._idle.remove(connection)
                connection.close()

    async def _connect(self) -> _Connection:
        """On the loop: an unknown name or a silent host holds no thread."""
        with anyio.fail_after(self._connect_seconds_max):
            found = await self._addresses.take()
        seconds = self._connect_seconds_max / len(found)
        for address in found[:-1]:
            with contextlib.suppress(OSError):
                return await self._connect_to(address, seconds)
        return await self._connect_to(found[-1], seconds)

    async def _connect_to(self, address: Address, seconds_max: float) -> _Connection:
        with contextlib.ExitStack() as unused:
            try:
                # A machine without IPv6 refuses such a socket to begin with.
                kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
                sock = unused.enter_context(socket.socket(address.family, kind, address.protocol))
                with anyio.fail_after(seconds_max):
                    await asyncio.get_running_loop().sock_connect(sock, address.sockaddr)
            except OSError:
                self._addresses.failed(address)
                raise
            connection = _Connection(sock, self._read_seconds_max, self._turns)
            unused.pop_all()
            return connection

    def close(self) -> None:
        """Close kept connections, and keep none from now on. A `get` that runs goes on."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def signed(
    fields: dict[str, str], path: str, credential: Credential, region: str
) -> dict[str, str]:
    """The fields of a GET, `host` among them, with those that sign them (AWS Signature Version 4).

    `path` is percent-encoded, as it is sent, and has no query.
    """
    # Not at the top: a sidecar whose store is not S3 does not have botocore.
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    keys = Credentials(
        credential["access_key_id"], credential["secret_access_key"], credential["token"]
    )
    request = AWSRequest("GET", f"http://{fields['host']}{path}", headers=fields)
    S3SigV4Auth(keys, "s3", region).add_auth(request)
    return dict(request.headers.items())


@contextlib.contextmanager
def _batch_scheduling() -> Generator[None]:
    """Keep the kernel from preempting the loop's thread whenever bytes arrive for this one.

    With the usual policy a dozen readers kept the loop waiting several times as long.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _parsed(head: bytes, rest: bytes) -> _Head:
    first, *lines = head.split(b"\r\n")
    status = _STATUS.match(first)
    if status is None:
        raise NotUnderstoodError(f"its answer begins with {first[:40]!r}")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip().lower()
    number = int(status[1])
    length = fields.get(b"content-length", b"")
    if 300 <= number < 400:
        raise NotUnderstoodError(f"it answers with status {number}, a redirection")
    known = length.isdigit() and b"transfer-encoding" not in fields
    if number < 200:
        return _Head(number, 0, keep=False, rest=rest)
    if number >= 400:
        # A refusal may have no length: a load balancer before the store, for one.
        length_bytes = min(int(length), ERROR_BYTES_MAX) if known else ERROR_BYTES_MAX
        return _Head(number, length_bytes, keep=False, rest=rest)
    if not known:
        raise NotUnderstoodError(f"its answer of status {number} has no length")
    keep = first.startswith(b"HTTP/1.1") and fields.get(b"connection") != b"close"
    # More bytes than announced do not belong to the answer: the connection is out of step.
    return _Head(number, int(length), keep and len(rest) <= int(length), rest)


def _ended(done: int, of: str) -> ConnectionResetError:
    return ConnectionResetError(
        errno.ECONNRESET, f"the server closed the connection after {done} bytes of {of}"
    )
