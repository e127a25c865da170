"""Messages to bytes and back: MessagePack, framing on the Unix socket, and checks of values.

Owns encoding, decoding, and what must be true of a message beyond its types. Does not own what only
a session can judge (`sessions/session.py`).

Invariants: a frame over `FRAME_BYTES_MAX` is refused before it is decoded; what a client sent is
checked before it is returned; nothing but `ProtocolError` is raised.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Final, TypeVar

import msgspec

from sidecar.protocol.attaching import Attach, AttachReply, FirstMessage, Memory, Role
from sidecar.protocol.limits import (
    FRAME_BYTES_MAX,
    IPC_HANDLE_BYTES,
    JOBS_PER_MESSAGE_MAX,
    KEYS_PER_MESSAGE_MAX,
    KIND_CUDA_IPC,
    KIND_CUDA_VMM,
    PROTOCOL_VERSION,
    TENANT_BYTES,
    UUID_BYTES,
)
from sidecar.protocol.messages import (
    ClientMessage,
    Lease,
    Lookup,
    Pin,
    Release,
    ServerMessage,
    Submit,
)

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)
_first_decoder: msgspec.msgpack.Decoder[FirstMessage] = msgspec.msgpack.Decoder(FirstMessage)
_reply_decoder: msgspec.msgpack.Decoder[AttachReply] = msgspec.msgpack.Decoder(AttachReply)

_LOCAL_ENDPOINT: Final = re.compile(
    r"^(ipc:///[^\0]+|tcp://(127\.0\.0\.1|localhost|\[::1\]):[0-9]{1,5})\Z", re.DOTALL
)
_ENDPOINT_BYTES_MAX: Final = len("ipc://") + 107
"""The kernel's limit of a Unix socket's path."""


class ProtocolError(ValueError):
    """A frame that is refused. `code` is stable, for counters and tests."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode(message: ClientMessage | ServerMessage | FirstMessage | AttachReply) -> bytes:
    """MessagePack bytes of one message."""
    return _encoder.encode(message)


def decode_client(frame: bytes | memoryview) -> ClientMessage:
    """Decode and validate what a connector sent over ZMQ. Raises `ProtocolError`."""
    message = _decode(_client_decoder, frame)
    _check_client(message)
    return message


def decode_server(frame: bytes | memoryview) -> ServerMessage:
    """Decode what the sidecar sent over ZMQ. Raises `ProtocolError`."""
    return _decode(_server_decoder, frame)


def decode_first(frame: bytes | memoryview) -> FirstMessage:
    """Decode and validate the first frame of a Unix connection. Raises `ProtocolError`."""
    # The version is read first: a peer of another version gets that error, not one about fields.
    version = _peek_version(frame)
    if version is not None and version != PROTOCOL_VERSION:
        raise ProtocolError(
            "version",
            f"version={version}: this side speaks protocol version {PROTOCOL_VERSION}; install the "
            "same kvlake release for connector and sidecar",
        )
    message = _decode(_first_decoder, frame)
    _check_first(message)
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
    """A payload as sent on the Unix socket: 4 bytes of length, then the bytes."""
    return _LENGTH.pack(len(payload)) + payload


def stream_length(header: bytes) -> int:
    """The length in a 4-byte stream header. Raises `ProtocolError` over the limit."""
    (length,) = _LENGTH.unpack(header)
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(
            "frame_too_large", f"frame of {length} bytes exceeds FRAME_BYTES_MAX={FRAME_BYTES_MAX}"
        )
    return int(length)


# --- checks ---------------------------------------------------------------------------------------


def _require(condition: bool, field: str, value: object, rule: str) -> None:
    if not condition:
        raise ProtocolError("field", f"{field}={value!r}: {rule}")


def _check_tenant(tenant: bytes) -> None:
    _require(len(tenant) in (0, TENANT_BYTES), "tenant", len(tenant), f"0 or {TENANT_BYTES} bytes")


def _check_client(message: ClientMessage) -> None:
    """Check what a connector sent over ZMQ."""
    match message:
        case Submit():
            jobs = len(message.loads) + len(message.stores)
            _require(jobs <= JOBS_PER_MESSAGE_MAX, "jobs", jobs, f"at most {JOBS_PER_MESSAGE_MAX}")
            for store in message.stores:
                for chunk in store.chunks:
                    _require(
                        len(chunk.token_ids) % 4 == 0,
                        "token_ids",
                        len(chunk.token_ids),
                        "int32 bytes come in fours",
                    )
                    _check_tenant(chunk.tenant)
        case Lookup():
            _check_tenant(message.tenant)
            rate = message.prefill_tokens_per_second
            # Written so that NaN fails too.
            _require(0 <= rate < math.inf, "prefill_tokens_per_second", rate, "finite, >= 0")
            counted = (0, len(message.keys))
            _require(len(message.groups) in counted, "groups", len(message.groups), "one per key")
        case Lease():
            _check_tenant(message.tenant)
        case Pin():
            _check_tenant(message.tenant)
            counted = (0, len(message.keys))
            _require(len(message.groups) in counted, "groups", len(message.groups), "one per key")
        case Release():
            ids = len(message.lease_ids) + len(message.lookup_ids)
            _require(ids <= KEYS_PER_MESSAGE_MAX, "ids", ids, f"at most {KEYS_PER_MESSAGE_MAX}")


def _check_first(message: FirstMessage) -> None:
    """Check the first frame of a Unix connection."""
    if isinstance(message, Attach):
        _check_attach(message)
    else:
        text = message.message
        _require(text.isprintable(), "message", text[:64], "printable characters")


def _check_attach(message: Attach) -> None:
    _require(
        0 <= message.rank < message.world_size, "rank", message.rank, "between 0 and world_size - 1"
    )
    _require(
        message.replicas > 0 and message.world_size % message.replicas == 0,
        "replicas",
        message.replicas,
        f"must divide world_size={message.world_size}",
    )
    parts = message.parts
    for part in parts:
        _check_group(part)
    _check_apart(parts)
    _require(message.model.isprintable(), "model", message.model, "printable characters")
    for field, place in (
        ("events_endpoint", message.events_endpoint),
        ("events_replay", message.events_replay),
    ):
        _require(
            not place
            or (bool(_LOCAL_ENDPOINT.match(place)) and len(place.encode()) <= _ENDPOINT_BYTES_MAX),
            field,
            place,
            "ipc:///PATH of at most 107 bytes, or TCP on loopback",
        )
    if message.memory is not None:
        _check_memory(message.memory)


def _check_group(part: Attach) -> None:
    values = {"segment": part.segment, "layout": part.layout, "memory": part.memory}
    # Their names alone: a layout in words may be longer than a frame.
    given = ", ".join(name for name, value in values.items() if value is not None)
    if part.role is Role.WORKER:
        rule = f"a worker gave {given or 'none'}: it gives all three"
        _require(None not in values.values(), "segment/layout/memory", given, rule)
    else:
        rule = f"a scheduler gave {given}: a worker gives them"
        _require(not given, "segment/layout/memory", given, rule)


def _check_apart(parts: tuple[Attach, ...]) -> None:
    """Two groups of one identity would be one, with two places in the memory."""
    first: dict[tuple[bytes, int, int], int] = {}
    for number, part in enumerate(parts):
        identity = (part.namespace, part.block_tokens, part.blocks_per_chunk)
        other = first.setdefault(identity, number)
        rule = (
            f"groups {other} and {number} have one namespace, block_tokens and blocks_per_chunk; "
            "say in the namespace what tells them apart"
        )
        _require(other == number, "groups", len(parts), rule)


def _check_memory(memory: Memory) -> None:
    on_gpu = memory.kind in (KIND_CUDA_IPC, KIND_CUDA_VMM)
    for field, value, size in (
        ("memory.device_uuid", memory.device_uuid, UUID_BYTES if on_gpu else 0),
        ("memory.handle", memory.handle, IPC_HANDLE_BYTES if memory.kind == KIND_CUDA_IPC else 0),
    ):
        _require(len(value) == size, field, len(value), f"{size} bytes for {memory.kind!r}")
