"""ZMTP 3.0 with the NULL mechanism: the part that the sidecar needs on Unix sockets.

Owns greeting, READY and framing (https://rfc.zeromq.org/spec/23). Does not own sockets
(`zmtp_server.py`), nor the content of a frame. libzmq's own sockets are not used because they
buffer every part of a message until the last one, without a limit (ADR 0034).
"""

from __future__ import annotations

import struct
from typing import Final

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame."""
GREETING_BYTES: Final = 64
_MECHANISM: Final = slice(12, 32)
_NULL: Final = b"NULL".ljust(20, b"\0")
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + _NULL + bytes(32)
_READY: Final = b"\x05READY"
_PING: Final = b"\x04PING"


class ZmtpError(Exception):
    """The received bytes violate the protocol; the connection ends."""


def framed(payload: bytes, flags: int = 0) -> bytes:
    """One frame."""
    if len(payload) > 255:
        return struct.pack(">BQ", flags | LONG, len(payload)) + payload
    return bytes([flags, len(payload)]) + payload


def hello(socket_type: bytes) -> bytes:
    """Greeting and READY of this side."""
    properties = (
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", socket_type), (b"Identity", b""))
    )
    return _GREETING + framed(_READY + b"".join(properties), COMMAND)


def pong_to(command: bytes) -> bytes | None:
    """The answer to a heartbeat; None to any other command."""
    if not command.startswith(_PING):
        return None
    # Behind its name a PING has 2 bytes of a time to live, then a context of at most 16.
    context = command[len(_PING) + 2 :][:16]
    return framed(b"\x04PONG" + context, COMMAND)


def check_greeting(greeting: bytes) -> None:
    """Raise `ZmtpError` unless these 64 bytes greet in this protocol."""
    if greeting[0] != 0xFF or greeting[10] < 3 or greeting[_MECHANISM] != _NULL:
        raise ZmtpError


def frame_at(inbox: bytearray, at: int, bytes_max: int) -> tuple[int, int, int] | None:
    """Flags, begin and end of the frame at `at`; None while it is not all there.

    Raises `ZmtpError` for one of more than `bytes_max`.
    """
    if len(inbox) < at + 2:
        return None
    flags = inbox[at]
    first = at + (9 if flags & LONG else 2)
    if len(inbox) < first:
        return None
    size = int.from_bytes(inbox[at + 1 : first], "big")
    if size > bytes_max:
        raise ZmtpError
    return (flags, first, first + size) if len(inbox) >= first + size else None


def identity_in(ready: bytes) -> bytes:
    """The routing id in a READY command. Raises `ZmtpError` where it is none."""
    if not ready.startswith(_READY):
        raise ZmtpError
    at = len(_READY)
    while at < len(ready):
        name = ready[at + 1 : at + 1 + ready[at]]
        at += 1 + len(name)
        if len(ready) < at + 4:
            raise ZmtpError
        size = int.from_bytes(ready[at : at + 4], "big")
        at += 4
        if len(ready) < at + size:
            raise ZmtpError
        if name.lower() == b"identity":
            return ready[at : at + size]
        at += size
    return b""
