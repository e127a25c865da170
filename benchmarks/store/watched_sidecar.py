"""`kvlake serve` with a task beside it that notes how late the event loop runs it.

`python -m benchmarks.store.watched_sidecar FILE serve …`: at the end, FILE holds three float64 for
each time: the moment of the monotonic clock, the lag in seconds, and the processor seconds that the
loop's thread used since the time before: how long it was busy with something else, whatever other
processes took. Owns nothing of the sidecar.
"""

from __future__ import annotations

import array
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import anyio

from sidecar import server
from sidecar.cli import main

if TYPE_CHECKING:
    from sidecar.config import Config
    from sidecar.exits import Exit

TICK_SECONDS: Final = 0.001


async def _watch(found: array.array[float]) -> None:
    while True:
        due, used = time.monotonic() + TICK_SECONDS, time.thread_time()
        await anyio.sleep(TICK_SECONDS)
        now = time.monotonic()
        found.extend((now, max(0.0, now - due), time.thread_time() - used))


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
        code = main(arguments)
    path.write_bytes(found.tobytes())
    return code


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), sys.argv[2:]))
