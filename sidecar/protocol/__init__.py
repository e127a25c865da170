"""Wire messages between connectors and the sidecar: what they are, their limits, their codec.

Two channels per client, one session:

* Unix socket (`attach.sock`): one `Attach` from the client with its file descriptors, one
  `Attached` or `Refused` back, then `IndexMoved` (with a descriptor) whenever the shared index
  moved. It stays open: end of file means that the other side died, in both directions.
  Frames are 4 bytes of little-endian length, then MessagePack. An engine that serves without the
  cache sends a `Declined` in place of `Attach`, and leaves the connection open while it lives.
* ZMQ DEALER to ROUTER (`Attached.endpoint`): jobs and answers. The DEALER's routing id is
  `Attached.token`, so no message repeats who sent it. One frame, one message.

The whole conversation::

    worker                              sidecar                             scheduler
      | Attach(layout, fds) ------------> |                                     |
      | <----------- Attached(token, ...) |                                     |
      |                                   | <---------------------- Attach()    |
      |                                   | Attached(token, fd of index) -----> |
      |                                   | <---- Lookup(keys in the store only)|
      |                                   | LookupDone(ready) ----------------> |
      |                                   | <------ Lease(keys) with the load   |
      |                                   | <------ Release(lookup)             |
      | Submit(fence, loads, stores) ---> |                                     |
      | <---------------- Done(outcomes)  |                                     |
      |                                   | <------ Release(lease) on abort     |
      |                                   | <------ Pin(keys) at a request's end|   if it asked
      |                                   | <------ Release(heard=n)            |   if asked for,
      |                                   | Events(stored, removed) ----------> |   64 more at most
      | (EOF) --------------------------> |  leases and jobs of the session end |
      | any refused frame: <------- Error |                                     |
      | instead of Attach: Declined ----> |  listed in the status until EOF     |

Invariants: every message carries the sidecar's `epoch`, and one from another life is dropped and
counted; every `Submit` job gets exactly one outcome in a `Done`, unless the session ends
first; nothing is pickled; a frame over `FRAME_BYTES_MAX` is refused before it is decoded.
"""

from __future__ import annotations

from sidecar.protocol.attaching import (
    Attach,
    Attached,
    AttachReply,
    Declined,
    FirstMessage,
    Group,
    IndexMoved,
    Limits,
    Memory,
    Refused,
    Role,
)
from sidecar.protocol.checks import ProtocolError
from sidecar.protocol.codec import (
    decode_attach_reply,
    decode_client,
    decode_first,
    decode_server,
    encode,
    frame_stream,
    stream_length,
)
from sidecar.protocol.limits import (
    BLOCKS_PER_CHUNK_MAX,
    DECLINE_REASONS,
    DECLINED_CHARS_MAX,
    EVENT_NAME_BYTES,
    FDS_PER_ATTACH_MAX,
    FRAME_BYTES_MAX,
    GROUPS_MAX,
    IPC_HANDLE_BYTES,
    JOBS_PER_MESSAGE_MAX,
    KEY_BYTES,
    KEYS_PER_MESSAGE_MAX,
    KIND_CUDA_IPC,
    KIND_CUDA_VMM,
    KIND_MEMFD,
    MEMORY_FDS,
    MODEL_CHARACTERS_MAX,
    NAMESPACE_BYTES_MAX,
    PIN_MS_MAX,
    PROTOCOL_VERSION,
    TENANT_BYTES,
    TOKEN_BYTES,
    TTL_MS_MAX,
    UUID_BYTES,
)
from sidecar.protocol.messages import (
    BlockIds,
    ClientMessage,
    Done,
    Error,
    Events,
    GroupId,
    GroupIds,
    Ids,
    JobOutcome,
    Key,
    Keys,
    Lease,
    LoadChunk,
    LoadJob,
    Lookup,
    LookupDone,
    Outcome,
    Pin,
    Release,
    RemovedEvent,
    ServerMessage,
    StoreChunk,
    StoredEvent,
    StoreJob,
    Submit,
    tenant_id,
)
from sidecar.protocol.owners import HITS_OWNER, TIERS_OWNER, tiers_owner
from sidecar.protocol.places import SERVICE_DIRECTORY, sockets_of

__all__ = [
    "BLOCKS_PER_CHUNK_MAX",
    "DECLINED_CHARS_MAX",
    "DECLINE_REASONS",
    "EVENT_NAME_BYTES",
    "FDS_PER_ATTACH_MAX",
    "FRAME_BYTES_MAX",
    "GROUPS_MAX",
    "HITS_OWNER",
    "IPC_HANDLE_BYTES",
    "JOBS_PER_MESSAGE_MAX",
    "KEYS_PER_MESSAGE_MAX",
    "KEY_BYTES",
    "KIND_CUDA_IPC",
    "KIND_CUDA_VMM",
    "KIND_MEMFD",
    "MEMORY_FDS",
    "MODEL_CHARACTERS_MAX",
    "NAMESPACE_BYTES_MAX",
    "PIN_MS_MAX",
    "PROTOCOL_VERSION",
    "SERVICE_DIRECTORY",
    "TENANT_BYTES",
    "TIERS_OWNER",
    "TOKEN_BYTES",
    "TTL_MS_MAX",
    "UUID_BYTES",
    "Attach",
    "AttachReply",
    "Attached",
    "BlockIds",
    "ClientMessage",
    "Declined",
    "Done",
    "Error",
    "Events",
    "FirstMessage",
    "Group",
    "GroupId",
    "GroupIds",
    "Ids",
    "IndexMoved",
    "JobOutcome",
    "Key",
    "Keys",
    "Lease",
    "Limits",
    "LoadChunk",
    "LoadJob",
    "Lookup",
    "LookupDone",
    "Memory",
    "Outcome",
    "Pin",
    "ProtocolError",
    "Refused",
    "Release",
    "RemovedEvent",
    "Role",
    "ServerMessage",
    "StoreChunk",
    "StoreJob",
    "StoredEvent",
    "Submit",
    "decode_attach_reply",
    "decode_client",
    "decode_first",
    "decode_server",
    "encode",
    "frame_stream",
    "sockets_of",
    "stream_length",
    "tenant_id",
    "tiers_owner",
]
