"""A sidecar with a store for an engine of two ranks, in the end-to-end tests."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from sidecar.demo.sidecars import SidecarProcess
from tests.e2e.arms import PATIENT, attach, empty, idle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sidecar.demo.engine import Engine

SESSIONS: Final = 3
"""The scheduler and two workers."""


@contextlib.contextmanager
def cluster(folder: Path, engine: Engine) -> Iterator[SidecarProcess]:
    """An empty sidecar with a folder that outlives it, attached to both ranks."""
    (folder / "store").mkdir(exist_ok=True)
    config: dict[str, Any] = {
        "host": {"size": "256MiB"},
        # The model computes sooner than a store is read: wait for it all the same.
        "store": {
            "url": f"file://{folder / 'store'}",
            "refresh_seconds": "100ms",
            "recompute": "never",
        },
        "limits": PATIENT,
    }
    with SidecarProcess(folder / "s", config) as sidecar:
        attach(engine, sidecar, sessions=SESSIONS)
        yield sidecar
        empty(engine)
        assert sidecar.process is not None
        if sidecar.process.poll() is None:
            sidecar.wait("everything ended", idle)
            assert sidecar.drain() == 0


def listed(sidecar: SidecarProcess, chunks: int) -> None:
    """Wait until the catalog was read whole: the number alone may be that of one of its files."""

    def whole(status: dict[str, Any]) -> bool:
        store = status["tiers"]["store"]
        return bool(store["listings"] and store["chunks"] >= chunks)

    sidecar.wait("the store is listed", whole)
