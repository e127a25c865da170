"""CURVE for KV events over TCP: only subscribers named in the configuration may connect.

Owns the answers to libzmq's authentication requests (ZAP, RFC 27), and counting failed handshakes.
Does not own keys: they are in the configuration (`config/observability.py`).

Invariant: a connection is accepted only with an admitted key. Nothing here waits.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from sidecar.transport.zmq_reader import ZmqReader

if TYPE_CHECKING:
    from collections.abc import Callable

HANDSHAKE_MILLISECONDS_MAX: Final = 5000
_FAILED: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "broken_off",
}


class ZapAuthenticator:
    """Authenticates peers of one context's CURVE server sockets. Make it before they are bound."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        server: zmq.Socket[bytes],
        secret_key: bytes,
        admitted: Callable[[str], bool],
        broke: Callable[[BaseException], None],
    ) -> None:
        self.refused: Counter[str] = Counter(dict.fromkeys(("key", *_FAILED.values()), 0))
        """Failed handshakes: `key`, `protocol` (no CURVE, or garbage), `broken_off`."""
        self._admitted = admitted
        self._zap = context.socket(zmq.ROUTER)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        server.setsockopt(zmq.ZAP_DOMAIN, b"kvlake")
        server.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS_MAX)
        self._server = server
        monitor = server.get_monitor_socket(sum(_FAILED))
        self._readers = (
            ZmqReader(self._zap, self._answer, broke),
            ZmqReader(monitor, self._count, broke),
        )

    def close(self) -> None:
        """Stop answering: no further connection is accepted."""
        for reader in self._readers:
            reader.close()
        self._server.disable_monitor()
        self._zap.close(linger=0)

    def _answer(self, parts: list[bytes]) -> None:
        """Answer one request: address, "", version, id, domain, peer, routing id, "CURVE", key."""
        address, empty, version, request_id, *_, key = parts
        name = z85.encode(key).decode()
        status = (b"200", b"OK", name.encode())
        if not self._admitted(name):
            self.refused["key"] += 1
            status = (b"400", b"unknown key", b"")
        self._zap.send_multipart((address, empty, version, request_id, *status, b""), zmq.NOBLOCK)

    def _count(self, parts: list[bytes]) -> None:
        event = int(parse_monitor_message(parts)["event"])
        if event in _FAILED:
            self.refused[_FAILED[event]] += 1
