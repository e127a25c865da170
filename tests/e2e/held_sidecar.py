"""A real sidecar of which one step for one client can be held half-way, from outside.

`python held_sidecar.py FOLDER serve ...` is `kvlake serve ...`, except that between two steps of
its own it looks at files in FOLDER (`Holds` writes and reads them in the test):

* `hold-STEP-PID`: hold this step for the client of this pid while the file exists.
* `held-STEP-PID`: written here, while it is held.
* `hang-up-PID`: end this client's connections, so that it attaches again; removed when done.

Steps are `attach` (its `Attach` has arrived with its descriptors, and is not answered), `load` and
`store` (a piece of a chunk has been copied, others have not; the copy holds the fence page's lock).

Owns nothing of what the sidecar does: it waits inside, and all else is the code that is tested.
Invariants: a hold ends with its file, or after `HOLD_SECONDS_MAX`; a cancelled step loses nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import anyio

from sidecar import copies
from sidecar.attach import Connection, close_fds
from sidecar.cli import main
from sidecar.copyqueue import Group
from tiers.copy import CopyPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sidecar.commands import Copied

ATTACH: Final = "attach"
LOAD: Final = "load"
STORE: Final = "store"
HOLD_SECONDS_MAX: Final = 60.0
POLL_SECONDS: Final = 0.005


class Holds:
    """Both ends of the folder: what is to be held, and what is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    # --- the test's end ------------------------------------------------------------------------

    @property
    def program(self) -> tuple[str, str]:
        """What a `SidecarProcess` runs to be held."""
        return str(Path(__file__)), str(self._folder)

    def hold(self, step: str, pid: int) -> None:
        """Hold this step of the client with this pid from now on."""
        self._path("hold", step, pid).touch()

    def held(self, step: str, pid: int) -> bool:
        """Whether it is held at this moment."""
        return self._path("held", step, pid).exists()

    def hang_up(self, pid: int) -> None:
        """End the client's connections."""
        (self._folder / f"hang-up-{pid}").touch()

    def let_go(self) -> None:
        """Hold nothing any more."""
        for path in self._folder.glob("hold-*"):
            path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove what a killed sidecar left."""
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)

    # --- the sidecar's end ---------------------------------------------------------------------

    def wanted(self, step: str, pid: int) -> bool:
        """Whether to hold this step."""
        return self._path("hold", step, pid).exists()

    @contextlib.contextmanager
    def told(self, step: str, pid: int) -> Generator[None]:
        """Say that it is held, for the length of the block."""
        path = self._path("held", step, pid)
        path.touch()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def take_hang_ups(self) -> list[int]:
        """Clients to hang up on, once."""
        pids: list[int] = []
        for path in self._folder.glob("hang-up-*"):
            pids.append(int(path.name.removeprefix("hang-up-")))
            path.unlink(missing_ok=True)
        return pids

    def _path(self, what: str, step: str, pid: int) -> Path:
        return self._folder / f"{what}-{step}-{pid}"


def hold_attaches(holds: Holds, stack: contextlib.ExitStack) -> None:
    """Wait between an `Attach` and its answer."""
    connections: dict[int, weakref.ref[Connection]] = {}
    receive = Connection.receive_attach

    async def receive_attach(self: Connection) -> tuple[bytes, list[int]]:
        pid = self.peer.pid
        connections[pid] = weakref.ref(self)
        frame, fds = await receive(self)
        if holds.wanted(ATTACH, pid):
            try:
                with holds.told(ATTACH, pid):
                    while holds.wanted(ATTACH, pid):  # noqa: ASYNC110 (another process's file)
                        await anyio.sleep(POLL_SECONDS)
            except BaseException:
                close_fds(fds)
                raise
        return frame, fds

    def hang_up() -> None:
        while True:
            for pid in holds.take_hang_ups():
                connection = connections[pid]()
                if connection is not None:
                    connection.hang_up()
            time.sleep(POLL_SECONDS)

    stack.enter_context(patch.object(Connection, "receive_attach", receive_attach))
    threading.Thread(target=hang_up, daemon=True).start()


def hold_copies(holds: Holds, stack: contextlib.ExitStack) -> None:
    """Wait between two pieces of a chunk, in the copy thread."""
    here = threading.local()

    def of_a_job(
        step: str, copy: Callable[[Group, copies.Memory], list[Copied]]
    ) -> Callable[[Group, copies.Memory], list[Copied]]:
        def copied(group: Group, pool: copies.Memory) -> list[Copied]:
            here.step, here.pid = step, group.session.connection.peer.pid
            return copy(group, pool)

        return copied

    def in_pieces(copy: Callable[..., None]) -> Callable[..., None]:
        def copied(
            self: CopyPlan, *arguments: Any, visit: Callable[[memoryview], None], **options: Any
        ) -> None:
            def visited(piece: memoryview) -> None:
                visit(piece)
                wait(here.step, here.pid)

            copy(self, *arguments, visit=visited, **options)

        return copied

    def wait(step: str, pid: int) -> None:
        if not holds.wanted(step, pid):
            return
        deadline = time.monotonic() + HOLD_SECONDS_MAX
        with holds.told(step, pid):
            while holds.wanted(step, pid) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)

    for name, step in (("_gather", STORE), ("_scatter", LOAD)):
        wrapped = of_a_job(step, getattr(copies, name))
        stack.enter_context(patch.object(copies, name, wrapped))
    for name in ("gather", "scatter"):
        stack.enter_context(patch.object(CopyPlan, name, in_pieces(getattr(CopyPlan, name))))


def serve(folder: Path, arguments: list[str]) -> int:
    """Be `kvlake` with these arguments, and hold what the folder says."""
    holds = Holds(folder)
    with contextlib.ExitStack() as stack:
        hold_attaches(holds, stack)
        hold_copies(holds, stack)
        return main(arguments)


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), sys.argv[2:]))
