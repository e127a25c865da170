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

# ruff: noqa: F403 (the public names of these modules are the protocol)

from __future__ import annotations

from sidecar.protocol.attaching import *
from sidecar.protocol.codec import *
from sidecar.protocol.messages import *
