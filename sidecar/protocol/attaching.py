"""Messages on the Unix socket: who a client is, what it shares, and what it is told of the sidecar.

Owns what they hold. Descriptors travel beside them; what must be true of their values beyond the
types is in `checks.py`.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from sidecar.protocol.limits import GROUPS_MAX
from tiers.kv.layout import KVLayout, Segment


class Role(enum.StrEnum):
    """Which half of the connector a session serves."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a worker's KV memory is shared. `kind` names what arrives beside the message.

    memfd: descriptor 0 is the KV memory, descriptor 1 the fence page.
    cuda_ipc: `handle` is what `cuIpcGetMemHandle` gave, descriptor 0 the fence page.
    cuda_vmm: descriptor 0 is what `cuMemExportToShareableHandle` gave, descriptor 1 the fence page.

    `size_bytes` is the whole allocation, from whose start the layout's offsets count.
    """

    kind: str
    size_bytes: int
    device_uuid: bytes = b""
    """Which GPU, as `cuDeviceGetUuid` names it: numbers differ between processes."""
    handle: bytes = b""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One more KV cache group of an engine: what it has of its own. See `Attach` for the fields.

    All groups of a worker lie in the memory that it shares once, and may lie over each other
    there: a block belongs to one group at a time.
    """

    namespace: bytes
    block_tokens: int
    blocks_per_chunk: int
    segment: Segment | None = None
    layout: KVLayout | None = None


class Attach(
    msgspec.Struct, tag="attach", frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """First and only message of a client on the Unix socket, unless that is a `Declined`.

    `namespace` is canonical JSON (UTF-8): what makes KV bytes compatible. `topology` names how
    the model is cut over the ranks; chunks are loadable when all their segments are. Of every
    `replicas` ranks in a row all hold the same segment (MLA).
    `layout`, `segment` and `memory` are given by workers only. These fields are of the engine's
    first KV cache group, and `groups` are its others: group 1, 2, ... in chunks and lookups.
    """

    version: int
    role: Role
    engine_id: str
    rank: int
    world_size: int
    topology: str
    namespace: bytes
    block_tokens: int
    blocks_per_chunk: int
    pid: int
    want_events: bool = False
    segment: Segment | None = None
    layout: KVLayout | None = None
    memory: Memory | None = None
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=GROUPS_MAX - 1)] = ()
    events_endpoint: str = ""
    """Where the engine publishes its own KV events, on this machine; empty where it does not."""
    events_replay: str = ""
    """Where it replays them."""
    replicas: int = 1
    model: str = ""
    """What the engine calls a model that is files, to be shown to people. Empty where the namespace
    has a name: sidecars of before this field do not take it."""

    @property
    def segment_number(self) -> int:
        """Which of a chunk's segments this rank holds."""
        return self.rank // self.replicas

    @property
    def num_segments(self) -> int:
        """Segments of a chunk."""
        return self.world_size // self.replicas

    @property
    def parts(self) -> tuple[Attach, ...]:
        """One message for each group, as an engine of that group alone would send it."""
        first = msgspec.structs.replace(self, groups=())
        return (
            first,
            *(
                msgspec.structs.replace(
                    first,
                    namespace=group.namespace,
                    block_tokens=group.block_tokens,
                    blocks_per_chunk=group.blocks_per_chunk,
                    segment=group.segment,
                    layout=group.layout,
                )
                for group in self.groups
            ),
        )


class Declined(msgspec.Struct, tag="declined", frozen=True, forbid_unknown_fields=True):
    """In place of `Attach`: a process of an engine says that it serves without the cache, and why.

    It is not answered, unless it is refused, and holds until the connection ends. `reason` is one
    of `DECLINE_REASONS`, or a word that a later release adds; `message` is for an operator: field,
    value and remedy, as in vLLM's log.
    """

    version: int
    role: Role
    engine_id: str
    reason: str
    message: str


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deadlines and bounds that the operator set in the sidecar and the connector must keep."""

    lookup_wait_ms_max: int
    load_deadline_ms_max: int
    store_deadline_ms_max: int
    jobs_inflight_max: int
    lease_ttl_ms_max: int


class Attached(msgspec.Struct, tag="attached", frozen=True, forbid_unknown_fields=True):
    """Answer to `Attach`; for a scheduler, descriptor 0 is the shared index, read-only."""

    version: int
    epoch: int
    token: bytes
    endpoint: str
    limits: Limits
    index_salt: bytes
    index_bytes: int = 0


class Refused(msgspec.Struct, tag="refused", frozen=True, forbid_unknown_fields=True):
    """The sidecar will not serve this client; `message` names the field, value and remedy."""

    code: str
    message: str


class IndexMoved(msgspec.Struct, tag="index_moved", frozen=True, forbid_unknown_fields=True):
    """The shared index was grown into a new mapping; descriptor 0 replaces the old one."""

    epoch: int
    index_bytes: int


FirstMessage = Attach | Declined
AttachReply = Attached | Refused | IndexMoved
