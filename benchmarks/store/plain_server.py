"""A server that speaks just enough S3 and costs next to nothing. As a program it prints its port.

Owns objects in one memfd: a GET is one `sendfile` from it, a PUT one receive into it, so that what
a benchmark of a client measures is the client. One thread per connection, one bucket, nobody is
asked who they are. For rates as a real store has them the same benchmarks run on SeaweedFS, too.

Invariant: an object is in the table once all its bytes are there; one that is replaced by another
of its size keeps its place.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import mmap
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tiers.store.access import Access, Credentials

if TYPE_CHECKING:
    from collections.abc import Generator

HOST: Final = "127.0.0.1"
BUCKET: Final = "kvlake"
CAPACITY_BYTES: Final = 8 << 30
"""Address space; memory is taken as objects come."""
HEAD_PIECE_BYTES: Final = 4096


class PlainServer(NamedTuple):
    """Where it listens."""

    port: int

    @property
    def url(self) -> str:
        """The bucket's URL."""
        return f"s3://{BUCKET}"

    @property
    def access(self) -> Access:
        """How `UrlObjects` gets there. The keys are signed with, and not looked at."""
        keys = Credentials(kind="static", access_key="anybody", secret_key="anything")
        return Access(endpoint=self.endpoint, region="us-east-1", credentials=keys)

    @property
    def endpoint(self) -> str:
        """Without the bucket."""
        return f"http://{HOST}:{self.port}"

    @property
    def settings(self) -> dict[str, object]:
        """A `store` section without its URL."""
        keys = {"kind": "static", "access_key": "anybody", "secret_key": "anything"}
        return {"endpoint": self.endpoint, "region": "us-east-1", "credentials": keys}


@contextlib.contextmanager
def plain_server() -> Generator[PlainServer]:
    """One in a process of its own."""
    with subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield PlainServer(int(process.stdout.readline()))
        finally:
            process.kill()


class _Object(NamedTuple):
    offset: int
    size_bytes: int
    modified: dt.datetime


class _Objects:
    """The memory and its table."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("plain-server")
        os.ftruncate(self.fd, CAPACITY_BYTES)
        self.memory = memoryview(mmap.mmap(self.fd, CAPACITY_BYTES))
        self.table: dict[str, _Object] = {}
        self._lock = threading.Lock()
        self._end = 0

    def place(self, name: str, size_bytes: int) -> int:
        """Where an object of that size goes."""
        with self._lock:
            found = self.table.get(name)
            if found is not None and found.size_bytes == size_bytes:
                return found.offset
            offset = self._end
            self._end += -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            assert self._end <= CAPACITY_BYTES, "more than the server has room for"
            return offset

    def put(self, name: str, offset: int, size_bytes: int, *, create: bool) -> bool:
        """Enter it; False if the name is taken and must not be."""
        with self._lock:
            if create and name in self.table:
                return False
            self.table[name] = _Object(offset, size_bytes, dt.datetime.now(dt.UTC))
            return True


class _Peer:
    """One connection, in its thread."""

    def __init__(self, sock: socket.socket, objects: _Objects) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._objects = objects
        self._received = b""

    def serve(self) -> None:
        """Answer until the client goes away."""
        with self._sock, contextlib.suppress(ConnectionError):
            while (end := self._received.find(b"\r\n\r\n")) >= 0 or self._more():
                if end < 0:
                    continue
                head, self._received = self._received[:end], self._received[end + 4 :]
                first, *lines = head.decode("latin-1").split("\r\n")
                fields = {k.lower(): v.strip() for k, _, v in (one.partition(":") for one in lines)}
                method, target, _ = first.split(" ", 2)
                self._answer(method, target, fields)

    def _more(self) -> bool:
        piece = self._sock.recv(HEAD_PIECE_BYTES)
        self._received += piece
        return bool(piece)

    def _answer(self, method: str, target: str, fields: dict[str, str]) -> None:
        parts = urlsplit(target)
        name = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        match method:
            case "PUT" if "x-amz-copy-source" in fields:
                self._say("501 Not Implemented")
            case "PUT":
                self._put(name, fields)
            case "GET" if not name:
                self._say("200 OK", self._listing(parse_qs(parts.query)))
            case "GET" | "HEAD":
                self._get(name, fields, whole=method == "GET")
            case "DELETE":
                self._objects.table.pop(name, None)
                self._say("204 No Content")
            case _:
                self._say("501 Not Implemented")

    def _put(self, name: str, fields: dict[str, str]) -> None:
        size_bytes = int(fields.get("content-length", "0"))
        offset = self._objects.place(name, size_bytes)
        target = self._objects.memory[offset : offset + size_bytes]
        done = min(len(self._received), size_bytes)
        target[:done] = self._received[:done]
        self._received = self._received[done:]
        while done < size_bytes:
            count = self._sock.recv_into(target[done:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError
            done += count
        create = fields.get("if-none-match") == "*"
        kept = self._objects.put(name, offset, size_bytes, create=create)
        self._say("200 OK" if kept else "412 Precondition Failed", fields='ETag: "x"\r\n')

    def _get(self, name: str, fields: dict[str, str], *, whole: bool) -> None:
        found = self._objects.table.get(name)
        if found is None:
            self._say("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>" if whole else b"")
            return
        first, last, status = 0, found.size_bytes - 1, "200 OK"
        extra = f'ETag: "x"\r\nLast-Modified: {found.modified:%a, %d %b %Y %H:%M:%S} GMT\r\n'
        if fields.get("range", "").startswith("bytes="):
            low, _, high = fields["range"].removeprefix("bytes=").partition("-")
            first, last = int(low), min(int(high or last), last)
            status = "206 Partial Content"
            extra += f"Content-Range: bytes {first}-{last}/{found.size_bytes}\r\n"
        size_bytes = last + 1 - first
        head = f"HTTP/1.1 {status}\r\n{extra}Content-Length: {size_bytes}\r\n\r\n"
        self._sock.sendall(head.encode())
        sent = 0
        while whole and sent < size_bytes:
            sent += os.sendfile(
                self._sock.fileno(),
                self._objects.fd,
                found.offset + first + sent,
                size_bytes - sent,
            )

    def _listing(self, query: dict[str, list[str]]) -> bytes:
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        delimiter = query.get("delimiter", [""])[0]
        parts: list[str] = []
        folders: set[str] = set()
        for name, found in sorted(self._objects.table.items()):
            if not name.startswith(prefix) or name <= after:
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter, 1)[0] + delimiter)
                continue
            parts.append(
                f"<Contents><Key>{escape(name)}</Key><Size>{found.size_bytes}</Size><ETag>x</ETag>"
                f"<LastModified>{found.modified:%Y-%m-%dT%H:%M:%S.000Z}</LastModified></Contents>"
            )
        parts += [
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders
        ]
        body = (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(parts)}</ListBucketResult>"
        )
        return body.encode()

    def _say(self, status: str, body: bytes = b"", fields: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
        self._sock.sendall(head.encode() + body)


def main() -> None:
    listener = socket.create_server((HOST, 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    objects = _Objects()
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_Peer(sock, objects).serve, daemon=True).start()


if __name__ == "__main__":
    main()
