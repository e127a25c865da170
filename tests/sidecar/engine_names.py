"""What the engine's tests call chunks, which are numbers to them, and how they are laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.core.commands import OpenedGroup, Received, SessionOpened
from sidecar.core.engine import Engine
from sidecar.core.tenants import Tenants
from sidecar.protocol import PROTOCOL_VERSION, Attach, Release, Role
from tiers.kv.layout import ChunkLayout, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.core.outbox import EngineLimits
    from sidecar.core.restored import SlotAllocator
    from tiers.policy import Policy


ALL_RANKS = frozenset({0, 1})
RANK_0 = frozenset({0})

EPOCH = 7
BLOCK_TOKENS = 4
BLOCKS_PER_CHUNK = 2
ROOT = bytes(32)
GROUP_NUMBERS = 1_000_000
"""Chunks from this number on are of the second KV cache group, and so on."""


def group_of(number: int) -> int:
    """The KV cache group of chunk `number`: a key is of one group."""
    return number // GROUP_NUMBERS


def key(number: int) -> bytes:
    """The key of chunk `number` of the only chain; its parent is `number - 1`."""
    return number.to_bytes(32, "little") if number > 0 else ROOT


def groups_of(numbers: Sequence[int]) -> list[int]:
    """As a client says which groups keys are of: not at all where all are of the first."""
    groups = [group_of(number) for number in numbers]
    return groups if any(groups) else []


def release(
    session_id: int,
    lease_ids: Sequence[int] = (),
    lookup_ids: Sequence[int] = (),
    *,
    pins: bool = False,
    heard: int = -1,
) -> Received:
    """A scheduler releases leases, lookups, and its pins, or acknowledges events."""
    message = Release(EPOCH, list(lease_ids), list(lookup_ids), pins, heard)
    return Received(session_id, message)


def namespace_of(realm_id: int) -> bytes:
    return bytes([realm_id]) * 32


def layout(rank: int, *, content_bytes: int = 8) -> ChunkLayout:
    return ChunkLayout(
        Segment(0, 2, rank, 1), BLOCKS_PER_CHUNK, BLOCK_TOKENS, content_bytes, "bfloat16", "plain"
    )


def slot_bytes_of(geometry: ChunkLayout) -> int:
    """The size of slots of this geometry in the pool of these tests."""
    return geometry.payload_bytes(geometry.blocks_per_chunk)


def opened_group(realm_id: int, geometry: ChunkLayout | None, namespace: bytes) -> OpenedGroup:
    """A group of a client; only workers have a geometry."""
    slot_bytes = 0 if geometry is None else slot_bytes_of(geometry)
    return OpenedGroup(realm_id, geometry, namespace, slot_bytes)


def opened_session(
    session_id: int,
    role: Role,
    groups: Sequence[OpenedGroup],
    *,
    engine_id: str = "a",
    rank: int = 0,
    world_size: int = 1,
    want_events: bool = False,
    replicas: int = 1,
) -> SessionOpened:
    """A client attached. The engine looks at these parts of its message only."""
    attach = Attach(
        version=PROTOCOL_VERSION,
        role=role,
        engine_id=engine_id,
        rank=rank,
        world_size=world_size,
        topology="any",
        namespace=b"{}",
        block_tokens=BLOCK_TOKENS,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        pid=1,
        want_events=want_events,
        replicas=replicas,
    )
    return SessionOpened(session_id, attach, tuple(groups))


def make_engine(
    slots: SlotAllocator,
    policy: Policy,
    limits: EngineLimits,
    tenants: Tenants | None = None,
    admit_write: Callable[[int, bytes, int, int], bool] = lambda *_: True,
    room_to_write: Callable[[int, int, int], bool] = lambda *_: True,
) -> Engine:
    """An engine that tells nobody what it stores."""
    return Engine(
        slots,
        policy,
        limits,
        epoch=EPOCH,
        tenants=Tenants() if tenants is None else tenants,
        admit_write=admit_write,
        room_to_write=room_to_write,
        notify=lambda _: None,
        notify_listed=lambda *_: None,
    )
