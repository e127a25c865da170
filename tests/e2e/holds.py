"""Which steps of a process are to be held half-way, and which are: a folder of files.

* `hold-STEP-PID`: hold this step for the process of this pid while the file exists.
* `held-STEP-PID`: written by who holds it, for as long.
* `hang-up-ROLE-PID`: end the connection that this process attached with in this role; removed
  when done.

`Holds` is both ends of it. Steps of a sidecar (`held_sidecar.py`) are `attach-ROLE` (an `Attach`
has arrived with its descriptors, and is not answered), `load` and `store` (a piece of a chunk has
been copied, others have not; the copy holds the fence page's lock). Those of a worker of vLLM's
(`held_copies.py`) are `copy-in` and `copy-out` (between blocks and vLLM's host tier, some layers
have been copied, others have not).

Invariant: a hold ends with its file, or after `HOLD_SECONDS_MAX`.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

LOAD: Final = "load"
STORE: Final = "store"
COPY_IN: Final = "copy-in"
COPY_OUT: Final = "copy-out"
HOLD_SECONDS_MAX: Final = 60.0
POLL_SECONDS: Final = 0.005


def attach_as(role: str) -> str:
    """The step of a client that attaches in this role."""
    return f"attach-{role}"


class Holds:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    # --- the test's end ------------------------------------------------------------------------

    @property
    def program(self) -> tuple[str, ...]:
        """What a `SidecarProcess` runs to be held."""
        return "-m", "tests.e2e.held_sidecar", str(self._folder)

    def hold(self, step: str, pid: int) -> None:
        """Hold this step of the process with this pid from now on."""
        self._path("hold", step, pid).touch()

    def held(self, step: str, pid: int) -> bool:
        """Whether it is held at this moment."""
        return self._path("held", step, pid).exists()

    def hang_up(self, role: str, pid: int) -> None:
        """End the connection of a client in this role."""
        self._path("hang-up", role, pid).touch()

    def let_go(self) -> None:
        """Hold nothing any more."""
        for path in self._folder.glob("hold-*"):
            path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove what a killed sidecar left."""
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)

    # --- the end of who is held ----------------------------------------------------------------

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

    def wait(self, step: str, pid: int) -> None:
        """Wait while the step is to be held, in a thread."""
        if not self.wanted(step, pid):
            return
        deadline = time.monotonic() + HOLD_SECONDS_MAX
        with self.told(step, pid):
            while self.wanted(step, pid) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)

    def take_hang_ups(self) -> list[tuple[str, int]]:
        """Clients to hang up on, once: role and pid."""
        clients: list[tuple[str, int]] = []
        for path in self._folder.glob("hang-up-*"):
            role, _, pid = path.name.removeprefix("hang-up-").rpartition("-")
            clients.append((role, int(pid)))
            path.unlink(missing_ok=True)
        return clients

    def _path(self, what: str, step: str, pid: int) -> Path:
        return self._folder / f"{what}-{step}-{pid}"
