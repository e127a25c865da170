"""The Unix socket: the messages on it, and where a connector looks for it.

Owns the fields of the messages. Descriptors travel beside them; `codec.py` checks what types cannot
say. Does not own where a sidecar puts its socket (`runtime.directory`).
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, Final

import msgspec

from sidecar.protocol.messages import GROUPS_MAX
from tiers.kv.layout import BLOCKS_PER_CHUNK_MAX, KVLayout, Segment

PROTOCOL_VERSION: Final = 5
"""Increased by every incompatible change. Both sides refuse other versions."""
NAMESPACE_BYTES_MAX: Final = 65_536
MODEL_CHARACTERS_MAX: Final = 256
TOKEN_BYTES: Final = 16
FDS_PER_ATTACH_MAX: Final = 4
UUID_BYTES: Final = 16
IPC_HANDLE_BYTES: Final = 64
KIND_MEMFD: Final = "memfd"
KIND_CUDA_IPC: Final = "cuda_ipc"
KIND_CUDA_VMM: Final = "cuda_vmm"
MEMORY_FDS: Final[dict[str, tuple[str, ...]]] = {
    KIND_MEMFD: ("KV memory", "fence page"),
    KIND_CUDA_IPC: ("fence page",),
    KIND_CUDA_VMM: ("KV memory", "fence page"),
}
"""Kinds of memory, and the descriptors that arrive with each; the fence page is the last."""
DECLINED_CHARS_MAX: Final = 1_000
DECLINE_REASONS: Final = ("chunk_tokens", "unsupported", "weights", "memory")
"""Why an engine serves without the cache, in a `Declined`:

chunk_tokens: the chunk size is not a multiple of the block size. unsupported: something of the
model, the engine or the machine is refused. weights: the files of the model cannot be read. memory:
the KV cache of a rank cannot be shared.
"""
SERVICE_DIRECTORY: Final = "/run/kvlake"
"""`runtime.directory` of deploy/systemd/kvlake.service."""

# Checked while decoding.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Namespace = Annotated[bytes, msgspec.Meta(min_length=1, max_length=NAMESPACE_BYTES_MAX)]
BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
BlocksPerChunk = Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_CHUNK_MAX)]


class Role(enum.StrEnum):
    """The half of the connector that a session serves."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a worker's KV memory is shared. `kind` determines the descriptors beside the message.

    memfd: descriptor 0 is the KV memory, descriptor 1 the fence page.
    cuda_ipc: `handle` is from `cuIpcGetMemHandle`, descriptor 0 is the fence page.
    cuda_vmm: descriptor 0 is from `cuMemExportToShareableHandle`, descriptor 1 is the fence page.

    `size_bytes` is the whole allocation, from whose start the layout's offsets count.
    """

    kind: str
    size_bytes: int
    device_uuid: bytes = b""
    """The GPU, from `cuDeviceGetUuid`: device numbers differ between processes."""
    handle: bytes = b""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A further KV cache group of an engine. See `Attach` for the fields.

    All groups of a worker are in the memory that it shares, and may overlap there: a block belongs
    to one group at a time.
    """

    namespace: Namespace
    block_tokens: BlockTokens
    blocks_per_chunk: BlocksPerChunk
    segment: Segment | None = None
    layout: KVLayout | None = None


class Attach(
    msgspec.Struct, tag="attach", frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The only message of a client on the Unix socket, unless that is a `Declined`.

    `namespace` is canonical JSON (UTF-8) of all that makes KV bytes compatible. `topology` says how
    the model is split over the ranks; a chunk is loadable when all its segments are. Each run of
    `replicas` ranks holds the same segment (MLA). Workers alone set `layout`, `segment` and
    `memory`. These fields describe the engine's first KV cache group, and `groups` its others:
    group 1, 2, ... in chunks and lookups.
    """

    version: int
    role: Role
    engine_id: Name
    rank: int
    world_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    topology: Name
    namespace: Namespace
    block_tokens: BlockTokens
    blocks_per_chunk: BlocksPerChunk
    pid: int
    want_events: bool = False
    segment: Segment | None = None
    layout: KVLayout | None = None
    memory: Memory | None = None
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=GROUPS_MAX - 1)] = ()
    events_endpoint: str = ""
    """Endpoint of the engine's own KV events, on this machine; empty without."""
    events_replay: str = ""
    """Endpoint where it replays them."""
    replicas: int = 1
    model: Annotated[str, msgspec.Meta(max_length=MODEL_CHARACTERS_MAX)] = ""
    """The engine's name of a model that is files, to show to people. Empty where the namespace has
    a name, because older sidecars refuse this field."""

    @property
    def segment_number(self) -> int:
        """The number of this rank's segment in a chunk."""
        return self.rank // self.replicas

    @property
    def num_segments(self) -> int:
        """Segments of a chunk."""
        return self.world_size // self.replicas

    @property
    def parts(self) -> tuple[Attach, ...]:
        """One message for each group, as an engine of that group alone would send it."""
        first = msgspec.structs.replace(self, groups=())
        others = (msgspec.structs.asdict(group) for group in self.groups)
        return (first, *(msgspec.structs.replace(first, **fields) for fields in others))


class Declined(msgspec.Struct, tag="declined", frozen=True, forbid_unknown_fields=True):
    """In place of `Attach`: a process of an engine serves without the cache.

    It is not answered, unless it is refused, and holds until the connection ends. `reason` is one
    of `DECLINE_REASONS`, or one that a later release adds; `message` is for an operator: field,
    value and remedy, as in vLLM's log.
    """

    version: int
    role: Role
    engine_id: Name
    reason: Annotated[str, msgspec.Meta(pattern=r"^[a-z_]{1,32}\Z")]
    message: Annotated[str, msgspec.Meta(min_length=1, max_length=DECLINED_CHARS_MAX)]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the sidecar's configuration that the connector must keep."""

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
    """The sidecar does not serve this client; `message` names the field, value and remedy."""

    code: str
    message: str


class IndexMoved(msgspec.Struct, tag="index_moved", frozen=True, forbid_unknown_fields=True):
    """The shared index has grown into a new mapping; descriptor 0 replaces the old one."""

    epoch: int
    index_bytes: int


FirstMessage = Attach | Declined
AttachReply = Attached | Refused | IndexMoved


def sockets_of(given: str | None) -> tuple[str, ...]:
    """Where to look for the sidecar: the one path that is given, or the default ones in order.

    A sidecar of this user comes first: that of a login shell is in `XDG_RUNTIME_DIR`, which a
    service or a container may lack. Then that of a service manager, which serves several users.
    """
    if given:
        return (given,)
    bases = [f"/tmp/kvlake-{os.getuid()}", SERVICE_DIRECTORY]  # noqa: S108 (its owner is checked)
    own = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    if Path(own).is_dir():
        bases.insert(0, f"{own}/kvlake")
    return tuple(f"{base}/default/attach.sock" for base in bases)
