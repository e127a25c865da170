"""KV cache events as vLLM publishes them: the records, and batches as frames.

Owns the wire format (MessagePack of vLLM's `vllm/distributed/kv_events.py`, which is not imported
here) and the names of blocks. A batch is `[time, [event, ...], data_parallel_rank]`, an event a map
with its class under `type`. Unknown fields of an event are dropped when it is decoded. Fields that
vLLM omits where they have their default are omitted here too.

A chunk of kvlake's tiers is one block here. Its name is the first half of its key, 16 bytes, as in
the shared index and in the catalog's table. `block_size` is its number of tokens.
"""

from typing import Any, Final, TypeAlias

import msgspec

from sidecar.protocol import EVENT_NAME_BYTES

MEDIUM_GPU: Final = "GPU"
MEDIUM_CPU: Final = "CPU"
MEDIUM_STORAGE: Final = "STORAGE"
LOCAL: Final = "LOCAL"
REMOTE: Final = "REMOTE"
SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
SNAPSHOT: Final = b"snapshot"
"""In place of a number, requests a snapshot from the replay socket."""

Hash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockStored", gc=False):
    """Blocks were stored in `medium`, as a chain after `parent_block_hash`."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    lookahead_token_ids: list[list[int]] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockRemoved", gc=False):
    """Blocks were removed from `medium`."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared", gc=False):
    """All blocks of earlier events were removed."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Events published together, at `ts` seconds since 1970."""

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int | None = None


encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(EventBatch).decode
"""A frame's batch. Raises `msgspec.DecodeError`, `msgspec.ValidationError` among them."""


def name_of(key: bytes) -> bytes:
    """The name of a chunk in events."""
    return key[:EVENT_NAME_BYTES]


def number_frame(number: int) -> bytes:
    """A sequence number as its frame."""
    return number.to_bytes(SEQUENCE_BYTES, "big")


def number_of(frame: bytes) -> int:
    """A frame's sequence number; -1 for the end of a replay."""
    return int.from_bytes(frame, "big", signed=True)
