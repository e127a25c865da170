"""What must be true of a message beyond its types, before anything is done with it.

Owns these rules and `ProtocolError`. Does not own decoding (`codec.py`), nor what only a session
can judge (`sidecar/transport/attach_socket.py`, `sidecar/sessions/session.py`).
"""

from __future__ import annotations

import math
import re
from typing import Final

from sidecar.protocol.attaching import Attach, Declined, FirstMessage, Memory, Role
from sidecar.protocol.limits import (
    DECLINED_CHARS_MAX,
    IPC_HANDLE_BYTES,
    JOBS_PER_MESSAGE_MAX,
    KEYS_PER_MESSAGE_MAX,
    KIND_CUDA_IPC,
    KIND_CUDA_VMM,
    MODEL_CHARACTERS_MAX,
    NAMESPACE_BYTES_MAX,
    TENANT_BYTES,
    UUID_BYTES,
)
from sidecar.protocol.messages import ClientMessage, Lease, Lookup, Pin, Release, Submit

_HERE: Final = re.compile(
    r"^(ipc:///[^\0]+|tcp://(127\.0\.0\.1|localhost|\[::1\]):[0-9]{1,5})\Z", re.DOTALL
)
_REASON: Final = re.compile(r"^[a-z_]{1,32}\Z")
_ENDPOINT_BYTES_MAX: Final = len("ipc://") + 107
"""What a Unix socket's address has room for."""


class ProtocolError(ValueError):
    """A frame that this protocol cannot accept. `code` is stable, for counters and tests."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _require(condition: bool, field: str, value: object, rule: str) -> None:
    if not condition:
        raise ProtocolError("field", f"{field}={value!r}: {rule}")


def _check_tenant(tenant: bytes) -> None:
    _require(len(tenant) in (0, TENANT_BYTES), "tenant", len(tenant), f"0 or {TENANT_BYTES} bytes")


def check_client(message: ClientMessage) -> None:
    """What a connector sent over ZMQ. Raises `ProtocolError`."""
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
            _require(message.deadline_ms >= 0, "deadline_ms", message.deadline_ms, "must be >= 0")
            _require(message.num_tokens >= 0, "num_tokens", message.num_tokens, "must be >= 0")
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


def check_first(message: FirstMessage) -> None:
    """The first frame of a Unix connection. Raises `ProtocolError`."""
    _require(
        0 < len(message.engine_id) <= 256, "engine_id", message.engine_id, "1 to 256 characters"
    )
    if isinstance(message, Declined):
        _check_declined(message)
    else:
        _check_attach(message)


def _check_declined(message: Declined) -> None:
    # Both are shown to people, and one is the label of a metric.
    reason, told = message.reason, message.message
    _require(bool(_REASON.match(reason)), "reason", reason[:64], "1 to 32 of a-z and _")
    _require(
        0 < len(told) <= DECLINED_CHARS_MAX and told.isprintable(),
        "message",
        told[:64],
        f"1 to {DECLINED_CHARS_MAX} printable characters",
    )


def _check_attach(message: Attach) -> None:
    _require(0 < message.world_size <= 4096, "world_size", message.world_size, "between 1 and 4096")
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
    _require(0 < len(message.topology) <= 256, "topology", message.topology, "1 to 256 characters")
    _require(
        len(message.model) <= MODEL_CHARACTERS_MAX and (message.model or "-").isprintable(),
        "model",
        message.model[:MODEL_CHARACTERS_MAX],
        f"at most {MODEL_CHARACTERS_MAX} printable characters",
    )
    for field, place in (
        ("events_endpoint", message.events_endpoint),
        ("events_replay", message.events_replay),
    ):
        _require(
            not place or (bool(_HERE.match(place)) and len(place.encode()) <= _ENDPOINT_BYTES_MAX),
            field,
            place,
            "ipc:///PATH of at most 107 bytes, or TCP on loopback",
        )
    if message.memory is not None:
        _check_memory(message.memory)


def _check_group(part: Attach) -> None:
    _require(0 < part.block_tokens <= 65_536, "block_tokens", part.block_tokens, "1 to 65536")
    _require(
        0 < part.blocks_per_chunk <= 65_536, "blocks_per_chunk", part.blocks_per_chunk, "1 to 65536"
    )
    _require(
        0 < len(part.namespace) <= NAMESPACE_BYTES_MAX,
        "namespace",
        len(part.namespace),
        f"1 to {NAMESPACE_BYTES_MAX} bytes",
    )
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
    """Groups that are told apart by nothing would be one, with two places in the memory."""
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
