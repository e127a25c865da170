"""A TCP proxy that lets a store be only so fast: `Throttle` runs it in a process of its own.

Owns one rate for all connections together, in the direction of the client, as a link has it; what
the client sends is not held up. The rate is set while it runs. Knows nothing of what it carries, so
signatures that cover the client's `Host` still hold.

Invariant: no more than the rate allows has passed since it was set, but for `BURST_SECONDS` of it.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from typing import Final, Self

HOST: Final = "127.0.0.1"
PIECE_BYTES: Final = 1 << 18
BURST_SECONDS: Final = 0.005


class Throttle:
    """A running proxy in front of a port of this machine; a context manager that ends it."""

    def __init__(self, upstream_port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(upstream_port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.endpoint = f"http://{HOST}:{self._answer()}"

    def set(self, bytes_per_second: float) -> None:
        """Be so fast from now on; returns once it is."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{bytes_per_second}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class _Bucket:
    """When the next bytes may pass."""

    def __init__(self) -> None:
        self.bytes_per_second = float("inf")
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int) -> None:
        """Return when this many bytes may go on."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_SECONDS)
            self._free_at += num_bytes / self.bytes_per_second
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


def _pump(source: socket.socket, sink: socket.socket, bucket: _Bucket | None) -> None:
    piece = memoryview(bytearray(PIECE_BYTES))
    with contextlib.suppress(OSError):
        while count := source.recv_into(piece):
            if bucket is not None:
                bucket.take(count)
            sink.sendall(piece[:count])
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, upstream_port: int, bucket: _Bucket) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.create_connection((HOST, upstream_port))
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for arguments in ((client, server, None), (server, client, bucket)):
            threading.Thread(target=_pump, args=arguments, daemon=True).start()


def main() -> None:
    listener = socket.create_server((HOST, 0), backlog=128)
    bucket = _Bucket()
    arguments = (listener, int(sys.argv[1]), bucket)
    threading.Thread(target=_serve, args=arguments, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    for line in sys.stdin:
        bucket.bytes_per_second = float(line)
        print("set", flush=True)


if __name__ == "__main__":
    main()
