"""CURVE for KV events over TCP: who may connect are the subscribers that the configuration names.

Owns the answers to libzmq's questions who may connect (ZAP, RFC 27), and counting the handshakes
that failed. Does not own keys: they are in the configuration (`sidecar/config/observability.py`).

Invariants: a connection is let in only with a key that is admitted. The sockets are drained on the
loop and nothing here waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

if TYPE_CHECKING:
    from collections.abc import Callable

HANDSHAKE_MILLISECONDS_MAX: Final = 5000
MESSAGES_PER_WAKE_MAX: Final = 256
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_ZAP_FRAMES: Final = 7
_FAILED: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "broken_off",
}


class ZapAuthenticator:
    """Answers for one context's CURVE server sockets. Make it before they are bound."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        server: zmq.Socket[bytes],
        secret_key: bytes,
        admitted: Callable[[str], bool],
        broke: Callable[[BaseException], None],
    ) -> None:
        self.refused: Counter[str] = Counter(dict.fromkeys(("key", *_FAILED.values()), 0))
        """Handshakes that failed: `key`, `protocol` (no CURVE, or garbage), `broken_off`."""
        self._admitted = admitted
        self._broke = broke
        self._loop = asyncio.get_running_loop()
        self._zap = context.socket(zmq.ROUTER)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ENDPOINT)
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        server.setsockopt(zmq.ZAP_DOMAIN, b"kvlake")
        server.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS_MAX)
        self._server = server
        events = 0
        for event in _FAILED:
            events |= event
        self._monitor = server.get_monitor_socket(events)
        self._fds: list[int] = []
        for sock, take in ((self._zap, self._answer), (self._monitor, self._note)):
            fd = int(sock.getsockopt(zmq.FD))
            self._fds.append(fd)
            self._loop.add_reader(fd, self._drain, sock, take)
            self._drain(sock, take)

    def close(self) -> None:
        """Answer nobody any more."""
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._server.disable_monitor()
        self._zap.close(linger=0)

    def _drain(self, sock: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        try:
            for _ in range(MESSAGES_PER_WAKE_MAX):
                try:
                    parts = sock.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                take(parts)
            # The descriptor rings once: what is left, or came meanwhile, must be asked for.
            if not sock.closed and int(sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._loop.call_soon(self._drain_if_open, sock, take)
        except BaseException as error:
            self._broke(error)

    def _drain_if_open(self, sock: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        if not sock.closed:
            self._drain(sock, take)

    def _answer(self, parts: list[bytes]) -> None:
        """One ZAP request: its address, an empty frame, then the request's own frames."""
        empty = parts.index(b"")
        address, request = parts[: empty + 1], parts[empty + 1 :]
        version, request_id = request[0], request[1]
        key = ""
        if version == _ZAP_VERSION and len(request) == _ZAP_FRAMES and request[5] == b"CURVE":
            key = z85.encode(request[6]).decode()
        welcome = bool(key) and self._admitted(key)
        if not welcome:
            self.refused["key"] += 1
        status = (b"200", b"OK", key.encode()) if welcome else (b"400", b"unknown key", b"")
        self._zap.send_multipart([*address, _ZAP_VERSION, request_id, *status, b""], zmq.NOBLOCK)

    def _note(self, parts: list[bytes]) -> None:
        event = int(parse_monitor_message(parts)["event"])
        if event in _FAILED:
            self.refused[_FAILED[event]] += 1
