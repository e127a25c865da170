"""Messages to bytes and back: MessagePack, and its framing on the Unix socket.

Owns encoding and decoding. Invariants: a frame over `FRAME_BYTES_MAX` is refused before it is
decoded; what a client sent is checked before it is returned; nothing but `ProtocolError` is raised.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from sidecar.protocol.attaching import AttachReply, FirstMessage
from sidecar.protocol.checks import ProtocolError, check_client, check_first
from sidecar.protocol.limits import FRAME_BYTES_MAX, PROTOCOL_VERSION
from sidecar.protocol.messages import ClientMessage, ServerMessage

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)
_first_decoder: msgspec.msgpack.Decoder[FirstMessage] = msgspec.msgpack.Decoder(FirstMessage)
_reply_decoder: msgspec.msgpack.Decoder[AttachReply] = msgspec.msgpack.Decoder(AttachReply)


def encode(message: ClientMessage | ServerMessage | FirstMessage | AttachReply) -> bytes:
    """MessagePack bytes of one message."""
    return _encoder.encode(message)


def decode_client(frame: bytes | memoryview) -> ClientMessage:
    """Decode and validate what a connector sent over ZMQ. Raises `ProtocolError`."""
    message = _decode(_client_decoder, frame)
    check_client(message)
    return message


def decode_server(frame: bytes | memoryview) -> ServerMessage:
    """Decode what the sidecar sent over ZMQ. Raises `ProtocolError`."""
    return _decode(_server_decoder, frame)


def decode_first(frame: bytes | memoryview) -> FirstMessage:
    """Decode and validate the first frame of a Unix connection. Raises `ProtocolError`."""
    # The version is read on its own first, so that a peer of another version is told so rather
    # than handed a list of fields that it cannot know.
    version = _peek_version(frame)
    if version is not None and version != PROTOCOL_VERSION:
        raise ProtocolError(
            "version",
            f"protocol version {version} is not spoken here (this side speaks "
            f"{PROTOCOL_VERSION}); install the same kvlake release for connector and sidecar",
        )
    message = _decode(_first_decoder, frame)
    check_first(message)
    return message


def decode_attach_reply(frame: bytes | memoryview) -> AttachReply:
    """Decode what the sidecar sent over the Unix socket. Raises `ProtocolError`."""
    return _decode(_reply_decoder, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview) -> T:
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(
            "frame_too_large",
            f"frame of {len(frame)} bytes exceeds FRAME_BYTES_MAX={FRAME_BYTES_MAX}; "
            "send fewer jobs per message",
        )
    try:
        return decoder.decode(frame)
    except msgspec.ValidationError as error:
        code = (
            "unknown_tag" if "Invalid value" in str(error) and "$.type" in str(error) else "field"
        )
        raise ProtocolError(code, f"message refused: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", f"frame is not MessagePack: {error}") from error


class _Versioned(msgspec.Struct):
    version: int


_version_decoder = msgspec.msgpack.Decoder(_Versioned)


def _peek_version(frame: bytes | memoryview) -> int | None:
    if len(frame) > FRAME_BYTES_MAX:
        return None
    try:
        return _version_decoder.decode(frame).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_LENGTH = struct.Struct("<I")


def frame_stream(payload: bytes) -> bytes:
    """A payload as it travels on the Unix socket: 4 bytes of length, then the bytes."""
    return _LENGTH.pack(len(payload)) + payload


def stream_length(header: bytes) -> int:
    """Length that a 4-byte stream header announces. Raises `ProtocolError` over the limit."""
    (length,) = _LENGTH.unpack(header)
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(
            "frame_too_large", f"frame of {length} bytes exceeds FRAME_BYTES_MAX={FRAME_BYTES_MAX}"
        )
    return int(length)
