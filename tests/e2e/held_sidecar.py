"""A real sidecar of which one step for one client can be held half-way, from outside.

`python held_sidecar.py FOLDER serve ...` is `kvlake serve ...`, except that between two steps of
its own it looks at files in FOLDER (`holds.py`; `Holds` writes and reads them in the test too).

Owns nothing of what the sidecar does: it waits inside, and all else is the code that is tested.
Invariant: a cancelled step loses nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import anyio

from sidecar import cli
from sidecar.data.copies import Memory
from sidecar.data.copy_queue import CopyGroup
from sidecar.protocol.codec import decode_first
from sidecar.transport.unix_socket import Connection, close_fds
from tests import places
from tests.e2e.holds import LOAD, POLL_SECONDS, STORE, Holds, attach_as
from tiers.kv.copy import CopyPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.core.commands import Copied


def hold_attaches(holds: Holds, stack: contextlib.ExitStack) -> None:
    """Wait between an `Attach` and its answer."""
    connections: dict[tuple[str, int], weakref.ref[Connection]] = {}
    receive = Connection.receive_attach

    async def receive_attach(self: Connection) -> tuple[bytes, list[int]]:
        frame, fds = await receive(self)
        role, pid = str(decode_first(frame).role), self.peer.pid
        connections[role, pid] = weakref.ref(self)
        step = attach_as(role)
        if holds.wanted(step, pid):
            try:
                with holds.told(step, pid):
                    while holds.wanted(step, pid):  # noqa: ASYNC110 (another process's file)
                        await anyio.sleep(POLL_SECONDS)
            except BaseException:
                close_fds(fds)
                raise
        return frame, fds

    def hang_up() -> None:
        while True:
            for client in holds.take_hang_ups():
                connection = connections[client]()
                if connection is not None:
                    connection.hang_up()
            time.sleep(POLL_SECONDS)

    stack.enter_context(patch.object(Connection, "receive_attach", receive_attach))
    threading.Thread(target=hang_up, daemon=True).start()


def hold_copies(holds: Holds, stack: contextlib.ExitStack) -> None:
    """Wait between two pieces of a chunk, in the copy thread."""
    here = threading.local()

    def of_a_job(
        step: str, copy: Callable[[CopyGroup, Memory], list[Copied]]
    ) -> Callable[[CopyGroup, Memory], list[Copied]]:
        def copied(group: CopyGroup, pool: Memory) -> list[Copied]:
            here.step, here.pid = step, group.session.connection.peer.pid
            return copy(group, pool)

        return copied

    def in_pieces(copy: Callable[..., None]) -> Callable[..., None]:
        def copied(
            self: CopyPlan, *arguments: Any, visit: Callable[[memoryview], None], **options: Any
        ) -> None:
            def visited(piece: memoryview) -> None:
                visit(piece)
                holds.wait(here.step, here.pid)

            copy(self, *arguments, visit=visited, **options)

        return copied

    for name, step in (("gather_group", STORE), ("scatter_group", LOAD)):
        wrapped = of_a_job(step, places.find(name).value)
        stack.enter_context(places.patched(name, wrapped))
    for name in ("gather", "scatter"):
        stack.enter_context(patch.object(CopyPlan, name, in_pieces(getattr(CopyPlan, name))))


def main() -> int:
    """Be `kvlake` with the arguments behind the first, and hold what that folder says."""
    holds = Holds(Path(sys.argv[1]))
    with contextlib.ExitStack() as stack:
        hold_attaches(holds, stack)
        hold_copies(holds, stack)
        return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
