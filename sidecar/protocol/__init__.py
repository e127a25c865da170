"""Wire messages between connectors and the sidecar: their fields, limits and codec.

Two channels per client, one session:

* Unix socket (`attach.sock`): one `Attach` from the client with its file descriptors, one
  `Attached` or `Refused` back, then `IndexMoved` (with a descriptor) whenever the shared index
  moves. It stays open: in both directions end of file means that the other side is gone.
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

Invariants: every message carries the sidecar's `epoch`, and one with another epoch is refused and
counted; every job of a `Submit` gets exactly one outcome in a `Done`, unless the session ends
first; nothing is pickled; a frame over `FRAME_BYTES_MAX` is refused before it is decoded.
"""

# ruff: noqa: I001 (isort would give each re-exported name a statement of its own)

from __future__ import annotations

from sidecar.protocol.codec import (
    ProtocolError as ProtocolError,
    decode_attach_reply as decode_attach_reply,
    decode_client as decode_client,
    decode_first as decode_first,
    decode_server as decode_server,
    encode as encode,
    frame_stream as frame_stream,
    stream_length as stream_length,
)
from sidecar.protocol.messages import (
    DECLINED_CHARS_MAX as DECLINED_CHARS_MAX,
    DECLINE_REASONS as DECLINE_REASONS,
    EVENT_NAME_BYTES as EVENT_NAME_BYTES,
    FDS_PER_ATTACH_MAX as FDS_PER_ATTACH_MAX,
    FRAME_BYTES_MAX as FRAME_BYTES_MAX,
    GROUPS_MAX as GROUPS_MAX,
    HITS_OWNER as HITS_OWNER,
    JOBS_PER_MESSAGE_MAX as JOBS_PER_MESSAGE_MAX,
    KEYS_PER_MESSAGE_MAX as KEYS_PER_MESSAGE_MAX,
    KEY_BYTES as KEY_BYTES,
    KIND_CUDA_IPC as KIND_CUDA_IPC,
    KIND_CUDA_VMM as KIND_CUDA_VMM,
    KIND_MEMFD as KIND_MEMFD,
    MEMORY_FDS as MEMORY_FDS,
    MODEL_CHARACTERS_MAX as MODEL_CHARACTERS_MAX,
    NAMESPACE_BYTES_MAX as NAMESPACE_BYTES_MAX,
    PIN_MS_MAX as PIN_MS_MAX,
    PROTOCOL_VERSION as PROTOCOL_VERSION,
    TENANT_BYTES as TENANT_BYTES,
    TIERS_OWNER as TIERS_OWNER,
    TOKEN_BYTES as TOKEN_BYTES,
    TTL_MS_MAX as TTL_MS_MAX,
    Attach as Attach,
    AttachReply as AttachReply,
    Attached as Attached,
    ClientMessage as ClientMessage,
    Declined as Declined,
    Done as Done,
    Error as Error,
    Events as Events,
    FirstMessage as FirstMessage,
    Group as Group,
    IndexMoved as IndexMoved,
    JobOutcome as JobOutcome,
    Lease as Lease,
    Limits as Limits,
    LoadChunk as LoadChunk,
    LoadJob as LoadJob,
    Lookup as Lookup,
    LookupDone as LookupDone,
    Memory as Memory,
    Outcome as Outcome,
    Pin as Pin,
    Refused as Refused,
    Release as Release,
    RemovedEvent as RemovedEvent,
    Role as Role,
    ServerMessage as ServerMessage,
    StoreChunk as StoreChunk,
    StoreJob as StoreJob,
    StoredEvent as StoredEvent,
    Submit as Submit,
    sockets_of as sockets_of,
    tenant_id as tenant_id,
    tiers_owner as tiers_owner,
)
