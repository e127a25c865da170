"""GETs of S3 objects whose bytes go from the socket to the slot and nowhere else.

Owns plain HTTP/1.1 connections to one server and the exchange of one object on one of them, in a
thread of its own: the kernel copies into the slot, and nothing is allocated, collected or copied
again. obstore gives memory of its own and takes none of ours: its reads cost twice the processor
time. Does not own who asks (`sigv4.py`, `aws_credentials.py`), the meaning of errors (`errors.py`),
nor when this is used and what else there is (`obstore_client.py`), nor where the server is
(`resolving.py`).

Invariants:

* When `get` has returned or raised, cancelled or not, no thread touches the slot any more; a
  cancelled one ends at once, because its connection is shut down under it.
* One object, one request. Only a connection that was kept, and that the server had closed before
  it could hear of the request, is replaced by a new one.
* A connection is kept only after an answer that was read to its end.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, urlsplit

import anyio

from tiers.store.client import PIECE_BYTES, Bytes, Seen, check_size, run_to_end
from tiers.store.resolving import Address, Addresses
from tiers.store.sigv4 import Keys, sign_get
from tiers.threads import ThreadTurns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

IDLE_SECONDS_MAX: Final = 60.0
HEAD_BYTES_MAX: Final = 65_536
HEAD_PIECE_BYTES: Final = 2048
"""Room for a usual head, and little of the body, which is copied once more behind it."""
ERROR_BYTES_MAX: Final = 65_536
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |$)")
_CODE = re.compile(rb"<Code>(\w+)</Code>")
_SAYS = re.compile(rb"<Message>([^<]*)</Message>")


class NotUnderstoodError(Exception):
    """The server answers in a way that only a whole HTTP client follows."""


class AnswerError(Exception):
    """The server refused. `response` is as botocore has it, for `object_errors.judge`."""

    def __init__(self, status: int, body: bytes) -> None:
        code, says = _CODE.search(body), _SAYS.search(body)
        words = says[1].decode(errors="replace") if says else "no message"
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
    """What of the body came with it."""
    chunked: bool = False
    """Only of a refusal, whose text is looked through as it came."""


class _Connection:
    """A connected socket, used by one exchange at a time."""

    def __init__(self, sock: socket.socket, read_seconds_max: float, turns: ThreadTurns) -> None:
        # A blocking socket with the kernel's own limit: Python's would make it non-blocking, and
        # then one call could not wait for a whole body.
        sock.setblocking(True)
        whole = int(read_seconds_max)
        limit = struct.pack("ll", whole, int((read_seconds_max - whole) * 1e6))
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
        """In a thread: ask, and fill the start of `into`.

        Returns the size, and whether the connection may serve again.
        """
        with _behind_the_loop():
            with self._turns:
                asked = request()
            return self._fetch(asked, into, seen)

    def _fetch(self, request: bytes, into: Bytes, seen: Seen | None) -> tuple[int, bool]:
        try:
            try:
                self._sock.sendall(request)
                head = self._head()
            except (BrokenPipeError, ConnectionResetError) as error:
                raise _StaleError from error
            if head.status not in (200, 206):
                raise AnswerError(head.status, self._error_body(head))
            check_size(head.length_bytes, into.nbytes)
            target = into.data[: head.length_bytes]
            self._fill(target, head.rest, seen)
        except BlockingIOError as error:
            raise TimeoutError("the server is silent for store.read_timeout") from error
        return head.length_bytes, head.keep

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
            # What comes before the answer ("early hints") is none.
            received, skipped = head.rest, skipped + end + 4

    def _fill(self, target: memoryview, rest: bytes, seen: Seen | None) -> None:
        size_bytes = len(target)
        done = min(len(rest), size_bytes)
        target[:done] = rest[:done]
        if seen is not None:
            self._fill_and_tell(target, done, seen)
            return
        while done < size_bytes:
            # One call for all that is missing, so that the thread wakes, and takes the GIL, once.
            # It returns earlier only at the limit of silence or at the end.
            count = self._sock.recv_into(target[done:], 0, socket.MSG_WAITALL)
            if count == 0:
                raise _ended(done, f"an object of {size_bytes} bytes")
            done += count

    def _fill_and_tell(self, target: memoryview, done: int, seen: Seen) -> None:
        """In pieces that are in the core's cache still when somebody looks at them next.

        The thread waits in the kernel, where it is woken for a whole piece and not for each packet.
        With its turn it takes what is there.
        """
        size_bytes, told, wakes_at = len(target), 0, 1
        arrived = select.poll()
        arrived.register(self._sock, select.POLLIN)
        while done < size_bytes:
            piece_bytes = min(PIECE_BYTES, size_bytes - done)
            if piece_bytes != wakes_at:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, piece_bytes)
                wakes_at = piece_bytes
            silent = not arrived.poll(1000 * self._read_seconds_max)
            with self._turns:
                while done < size_bytes:
                    piece = target[done : min(told + PIECE_BYTES, size_bytes)]
                    try:
                        count = self._sock.recv_into(piece, 0, socket.MSG_DONTWAIT)
                    except BlockingIOError:
                        if silent:
                            raise
                        break
                    if count == 0:
                        raise _ended(done, f"an object of {size_bytes} bytes")
                    done += count
                    seen(size_bytes, told, done)
                    told, silent = done, False
        if told < done:
            seen(size_bytes, told, done)
        if wakes_at != 1:
            # The next answer's head is shorter.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _error_body(self, head: _Head) -> bytes:
        body = bytearray(head.rest)
        with contextlib.suppress(OSError):
            # One without a length ends with the connection, or with its last chunk.
            while len(body) < head.length_bytes:
                if head.chunked and (b"\r\n" + body[-7:]).endswith(_LAST_CHUNK):
                    break
                piece = self._sock.recv(HEAD_PIECE_BYTES)
                if not piece:
                    break
                body += piece
        return bytes(body)

    def usable(self, now: float) -> bool:
        """Whether a kept connection is still there: nothing was said, not even goodbye."""
        # Not select(): it knows no descriptor above 1,023.
        heard = select.poll()
        heard.register(self._sock, select.POLLIN)
        return not heard.poll(0) and now - self.idle_since < IDLE_SECONDS_MAX

    def cut(self) -> None:
        """Have a thread that waits for the socket return at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Not while a thread uses it."""
        self._sock.close()


class S3DirectReads:
    """Reads objects of one bucket, or of a prefix in it.

    Args:
        base: `http://host:port/path` of the bucket's prefix; object names are added to it.
        region: for the signature.
        keys: asked before each request; None for an anonymous reader.
    """

    def __init__(
        self,
        base: str,
        *,
        region: str,
        keys: Callable[[], Awaitable[Keys]] | None,
        connect_seconds_max: float,
        read_seconds_max: float,
    ) -> None:
        parts = urlsplit(base)
        self._addresses = Addresses(parts.hostname or "", parts.port or 80)
        self._host_field = parts.netloc.rsplit("@", 1)[-1]
        self._path = parts.path.rstrip("/")
        self._region = region
        self._keys = keys
        self._connect_seconds_max = connect_seconds_max
        self._read_seconds_max = read_seconds_max
        # The caller bounds how many reads run at a time; a thread waits for its socket mostly.
        self._threads = anyio.CapacityLimiter(math.inf)
        self._idle: list[_Connection] = []
        self._turns = ThreadTurns()
        self._closed = False

    async def get(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """Fill the start of `into` with an object; its size. `seen` is told of each piece.

        Raises `ImageTruncated`, `AnswerError`, `NotUnderstoodError` or an `OSError`.
        """
        keys = None if self._keys is None else await self._keys()

        def request() -> bytes:
            return self._request(name, into.nbytes, keys)

        kept = self._take()
        if kept is not None:
            with contextlib.suppress(_StaleError):
                return await self._exchange(kept, request, into, seen)
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
            size_bytes, keep = await run_to_end(
                lambda: connection.fetch(request, into, seen),
                self._threads,
                abort=connection.cut,
            )
        finally:
            if keep and not self._closed:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()
        return size_bytes

    def _request(self, name: str, room_bytes: int, keys: Keys | None) -> bytes:
        """In the thread of the exchange: signing is not the loop's work."""
        # The safe characters are SigV4's: what is signed is what is sent.
        path = quote(f"{self._path}/{name}", safe="/-_.~")
        # One more than there is room for: so a longer object shows, and none is ever longer.
        fields = {"host": self._host_field, "range": f"bytes=0-{room_bytes}"}
        if keys is not None:
            now = dt.datetime.now(dt.UTC)
            fields = sign_get(fields, path, keys=keys, region=self._region, now=now)
        lines = [f"{field}: {value}" for field, value in fields.items()]
        return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode()

    def _take(self) -> _Connection | None:
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable(now):
                return connection
            connection.close()
        return None

    def tidy(self) -> None:
        """Close kept connections that the server has closed, or that nobody needed for long."""
        now = time.monotonic()
        ended = [one for one in self._idle if not one.usable(now)]
        for connection in ended:
            self._idle.remove(connection)
            connection.close()

    async def _connect(self) -> _Connection:
        """On the loop: a name that does not resolve, or a host that is silent, holds no thread."""
        with anyio.fail_after(self._connect_seconds_max):
            found = await self._addresses.take()
        seconds = self._connect_seconds_max / len(found)
        *others, last = found
        for address in others:
            with contextlib.suppress(OSError):
                return await self._connect_to(address, seconds)
        return await self._connect_to(last, seconds)

    async def _connect_to(self, address: Address, seconds_max: float) -> _Connection:
        sock: socket.socket | None = None
        try:
            # A machine without IPv6 refuses such a socket to begin with.
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            sock = socket.socket(address.family, kind, address.protocol)
            with anyio.fail_after(seconds_max):
                await asyncio.get_running_loop().sock_connect(sock, address.sockaddr)
            return _Connection(sock, self._read_seconds_max, self._turns)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, OSError):
                self._addresses.failed(address)
            raise

    def close(self) -> None:
        """Close what is kept, and keep nothing from now on. A `get` that runs goes on."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()


@contextlib.contextmanager
def _behind_the_loop() -> Generator[None]:
    """Have the kernel not put the loop's thread aside whenever bytes arrive for this one.

    With the usual policy a dozen readers that wake in turn kept the loop waiting several times as
    long. Their share of the processor stays the same. Where it is forbidden, that is all that is
    lost.
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
    chunked = b"transfer-encoding" in fields
    if number < 200:
        return _Head(number, 0, keep=False, rest=rest)
    if number >= 400:
        # Whoever refuses may do so without a length: a load balancer before the store, say.
        whole = length.isdigit() and not chunked
        length_bytes = min(int(length), ERROR_BYTES_MAX) if whole else ERROR_BYTES_MAX
        return _Head(number, length_bytes, keep=False, rest=rest, chunked=chunked)
    if not length.isdigit() or chunked:
        raise NotUnderstoodError(f"its answer of status {number} has no length")
    keep = first.startswith(b"HTTP/1.1") and fields.get(b"connection") != b"close"
    # More than was announced is not the answer's: such a connection is out of step.
    return _Head(number, int(length), keep and len(rest) <= int(length), rest)


def _ended(done: int, of: str) -> ConnectionResetError:
    return ConnectionResetError(
        errno.ECONNRESET, f"the server closed the connection after {done} bytes of {of}"
    )
