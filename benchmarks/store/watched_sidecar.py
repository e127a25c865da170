"""`kvlake serve` with a task beside it that notes how late the event loop runs it.

`python -m benchmarks.store.watched_sidecar FILE serve …`: at the end, FILE holds four float64 for
each time: the moment of the monotonic clock, the lag in seconds, the processor seconds that the
loop's thread used since the time before (how long it was busy with something else, whatever other
processes took), and for how long it was ready to run and had no core. What is left of a lag is
waiting for Python's lock. Owns nothing of the sidecar.

`python -m benchmarks.store.watched_sidecar FILE` alone is a process with nothing but that task:
its lags are the machine's.
"""

from __future__ import annotations

import array
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import anyio

from sidecar import app as server
from sidecar.cli import main as kvlake

if TYPE_CHECKING:
    from sidecar.config.model import Config
    from sidecar.exits import Exit

TICK_SECONDS: Final = 0.001


class _Scheduled:
    """How long the calling thread was ready to run and did not."""

    def __init__(self) -> None:
        self._fd = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def waited_seconds(self) -> float:
        """Since the thread began."""
        return int(os.pread(self._fd, 100, 0).split()[1]) / 1e9


async def _watch(found: array.array[float]) -> None:
    scheduled = _Scheduled()
    while True:
        waited, used = scheduled.waited_seconds(), time.thread_time()
        due = time.monotonic() + TICK_SECONDS
        await anyio.sleep(TICK_SECONDS)
        now = time.monotonic()
        used, waited = time.thread_time() - used, scheduled.waited_seconds() - waited
        found.extend((now, max(0.0, now - due), used, waited))


def idle(path: Path) -> int:
    """Be nothing but a loop, until SIGTERM."""
    found = array.array("d")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, found)
            with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                async for _ in signals:
                    tasks.cancel_scope.cancel()

    anyio.run(main)
    path.write_bytes(found.tobytes())
    return 0


def serve(path: Path, arguments: list[str]) -> int:
    """Be `kvlake` with these arguments."""
    found = array.array("d")
    real = server.serve

    async def watched(config: Config, **options: Any) -> Exit:
        codes: list[Exit] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, found)
            codes.append(await real(config, **options))
            tasks.cancel_scope.cancel()
        return codes[0]

    with patch.object(server, "serve", watched):
        code = kvlake(arguments)
    path.write_bytes(found.tobytes())
    return code


if __name__ == "__main__":
    place, words = Path(sys.argv[1]), sys.argv[2:]
    sys.exit(serve(place, words) if words else idle(place))
