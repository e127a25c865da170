"""Messages to bytes and back: MessagePack, framing on the Unix socket, and checks of values.

Owns encoding, decoding, and what must be true of a message beyond its types. Does not own what only
a session can judge (`sessions/session.py`).

Invariants: a frame over `FRAME_BYTES_MAX` is refused before it is decoded; what a client sent is
checked before it is returned; nothing but `ProtocolError` is raised.
"""

import math
import re
from typing import Final, TypeVar

import msgspec

from sidecar.protocol import (
    FRAME_BYTES_MAX,
    IPC_HANDLE_BYTES,
    JOBS_PER_MESSAGE_MAX,
    KEYS_PER_MESSAGE_MAX,
    KIND_CUDA_IPC,
    KIND_CUDA_VMM,
    PROTOCOL_VERSION,
    TENANT_BYTES,
    UUID_BYTES,
    Attach,
    AttachReply,
    ClientMessage,
    FirstMessage,
    Lease,
    Lookup,
    Memory,
    Release,
    Role,
    ServerMessage,
    Submit,
    Use,
)
from sidecar.protocol.prompts import Prompts

_T = TypeVar("_T")


class _Versioned(msgspec.Struct):
    version: int


_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)
_first_decoder: msgspec.msgpack.Decoder[FirstMessage] = msgspec.msgpack.Decoder(FirstMessage)
_reply_decoder: msgspec.msgpack.Decoder[AttachReply] = msgspec.msgpack.Decoder(AttachReply)
_version_decoder = msgspec.msgpack.Decoder(_Versioned)

# The kernel's limit of a Unix socket's path is 107 bytes.
_LOCAL_ENDPOINT: Final = re.compile(
    rb"(ipc:///[^\0]{1,106}|tcp://(127\.0\.0\.1|localhost|\[::1\]):[0-9]{1,5})?"
)


def is_local_endpoint(place: str) -> bool:
    """Whether the sidecar would follow events there: empty, a Unix socket, or TCP on loopback."""
    return bool(_LOCAL_ENDPOINT.fullmatch(place.encode()))


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
    try:
        version = _decode(_version_decoder, frame).version
    except ProtocolError:
        version = PROTOCOL_VERSION
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            "version",
            f"version={version}: this side speaks protocol version {PROTOCOL_VERSION}; install the "
            "same kvlake release for connector and sidecar",
        )
    message = _decode(_first_decoder, frame)
    name = message.engine_id
    _require(name.isprintable(), "engine_id", name, "printable characters")
    if isinstance(message, Attach):
        _check_attach(message)
    else:
        text = message.message
        _require(text.isprintable(), "message", text[:64], "printable characters")
    return message


def decode_attach_reply(frame: bytes | memoryview) -> AttachReply:
    """Decode what the sidecar sent over the Unix socket. Raises `ProtocolError`."""
    return _decode(_reply_decoder, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes | memoryview) -> _T:
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


def frame_stream(payload: bytes) -> bytes:
    """A payload as sent on the Unix socket: 4 bytes of length, then the bytes."""
    return len(payload).to_bytes(4, "little") + payload


def stream_length(header: bytes, bytes_max: int = FRAME_BYTES_MAX) -> int:
    """The length in a 4-byte stream header. Raises `ProtocolError` over the limit."""
    length = int.from_bytes(header, "little")
    if length > bytes_max:
        raise ProtocolError("frame_too_large", f"frame of {length} bytes: at most {bytes_max}")
    return length


def _require(condition: bool, field: str, value: object, rule: str) -> None:
    if not condition:
        raise ProtocolError("field", f"{field}={value!r}: {rule}")


def _check_tenant(tenant: bytes) -> None:
    _require(len(tenant) in (0, TENANT_BYTES), "tenant", len(tenant), f"0 or {TENANT_BYTES} bytes")


def _check_client(message: ClientMessage) -> None:
    """Check what a connector sent over ZMQ."""
    if isinstance(message, Submit):
        jobs = len(message.loads) + len(message.stores)
        _require(jobs <= JOBS_PER_MESSAGE_MAX, "jobs", jobs, f"at most {JOBS_PER_MESSAGE_MAX}")
        for store in message.stores:
            for chunk in store.chunks:
                size = len(chunk.token_ids)
                _require(size % 4 == 0, "token_ids", size, "int32 bytes come in fours")
                _check_tenant(chunk.tenant)
    elif isinstance(message, Release):
        ids = len(message.lease_ids) + len(message.lookup_ids)
        _require(ids <= KEYS_PER_MESSAGE_MAX, "ids", ids, f"at most {KEYS_PER_MESSAGE_MAX}")
    elif isinstance(message, Prompts):
        for prompt in message.prompts:
            name = prompt.request_id
            _require(name.isprintable(), "request_id", name[:64], "printable characters")
    else:
        if not isinstance(message, Use):
            _check_tenant(message.tenant)
        if not isinstance(message, Lease):
            count = len(message.groups)
            _require(count in (0, len(message.keys)), "groups", count, "one per key")
        if isinstance(message, Lookup):
            held = message.num_held
            _require(held <= len(message.keys), "num_held", held, "at most one for each key")
            rate = message.prefill_tokens_per_second
            # Written so that NaN fails too.
            _require(0 <= rate < math.inf, "prefill_tokens_per_second", rate, "finite, >= 0")


def _check_attach(message: Attach) -> None:
    world_size, replicas = message.world_size, message.replicas
    _require(0 <= message.rank < world_size, "rank", message.rank, "between 0 and world_size - 1")
    divides = replicas > 0 and world_size % replicas == 0
    _require(divides, "replicas", replicas, f"must divide world_size={world_size}")
    first: dict[tuple[bytes, int, int], int] = {}
    for number, part in enumerate(message.parts):
        _check_part(part)
        # Two groups of one identity would be one, with two places in the memory.
        identity = (part.namespace, part.block_tokens, part.blocks_per_chunk)
        other = first.setdefault(identity, number)
        rule = (
            f"groups {other} and {number} have one namespace, block_tokens and blocks_per_chunk; "
            "say in the namespace what tells them apart"
        )
        _require(other == number, "groups", len(message.groups) + 1, rule)
    _require(message.model.isprintable(), "model", message.model, "printable characters")
    for field in ("events_endpoint", "events_replay"):
        place: str = getattr(message, field)
        rule = "ipc:///PATH of at most 107 bytes, or TCP on loopback"
        _require(is_local_endpoint(place), field, place, rule)
    if message.memory is not None:
        _check_memory(message.memory)


def _check_part(part: Attach) -> None:
    values = {"segment": part.segment, "layout": part.layout, "memory": part.memory}
    # Their names alone: a layout in words may be longer than a frame.
    given = ", ".join(name for name, value in values.items() if value is not None)
    if part.role is Role.WORKER:
        rule = f"a worker gave {given or 'none'}: it gives all three"
        _require(None not in values.values(), "segment/layout/memory", given, rule)
    else:
        rule = f"a scheduler gave {given}: a worker gives them"
        _require(not given, "segment/layout/memory", given, rule)


def _check_memory(memory: Memory) -> None:
    on_gpu = memory.kind in (KIND_CUDA_IPC, KIND_CUDA_VMM)
    for field, value, size in (
        ("memory.device_uuid", memory.device_uuid, UUID_BYTES if on_gpu else 0),
        ("memory.handle", memory.handle, IPC_HANDLE_BYTES if memory.kind == KIND_CUDA_IPC else 0),
    ):
        _require(len(value) == size, field, len(value), f"{size} bytes for {memory.kind!r}")
