"""What the end-to-end tests start engines and sidecars with, and where they are the same.

A module has a folder (`conftest.py`); its sidecars take turns on the sockets in it, and an engine
attaches to whichever serves there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
import numpy as np

from tests.e2e.arms import PATIENT, SESSIONS, attach, empty, idle
from tests.harness.sidecars import SidecarProcess
from tiers.catalog.names import parse_name
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tests.e2e.holds import Holds
    from tests.harness.engine import EngineProcess
    from tests.harness.servers import S3Server

SMALL: Final[dict[str, Any]] = {"num_gpu_blocks_override": 256, "max_model_len": 4096}
"""Engine option: memory for two of the longest prompts, so that a dozen requests fill it."""


READ_AT_ONCE: Final[dict[str, Any]] = {
    "refresh_seconds": "100ms",
    # The model computes sooner than a store is read: wait for it all the same.
    "recompute": "never",
}
"""Store settings: what others wrote is known soon, and always read."""


def in_steps(num_tokens: int) -> dict[str, Any]:
    """Engine options: prompts are computed in steps of at most this many tokens."""
    return {"max_num_batched_tokens": num_tokens, "enable_chunked_prefill": True}


def folder_store(bucket: Path) -> dict[str, Any]:
    """The section `store` of a sidecar, in a folder that is made where it is not there."""
    bucket.mkdir(exist_ok=True)
    return {"url": f"file://{bucket}", **READ_AT_ONCE}


class Bucket(NamedTuple):
    """A folder in a bucket of an S3 server, which nobody else uses."""

    server: S3Server
    prefix: str

    @property
    def store(self) -> dict[str, Any]:
        """The section `store` of a sidecar."""
        place = {"url": self.server.url, "prefix": self.prefix, **self.server.settings}
        return {**READ_AT_ONCE, **place}

    def fetched(self, folder: Path) -> Path:
        """A copy of all that is there, in a folder."""

        async def fetch() -> None:
            tier = UrlObjects(f"{self.server.url}/{self.prefix}", self.server.access_at())
            try:
                for found in await tier.list(""):
                    into = np.zeros(found.size_bytes, dtype=np.uint8)
                    await tier.read(found.name, into)
                    path = folder / found.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(into.tobytes())
            finally:
                await tier.close()

        anyio.run(fetch)
        return folder


def sidecar_in(
    folder: Path, *, name: str = "s", holds: Holds | None = None, **sections: Any
) -> SidecarProcess:
    """A sidecar of a module's folder, not started yet; beside another one it has another name.

    With `holds`, one that can be held.
    """
    config = {"host": {"size": "256MiB"}, "limits": PATIENT, **sections}
    options = {} if holds is None else {"program": holds.program}
    return SidecarProcess(folder / name, config, **options)


@contextlib.contextmanager
def attached(
    folder: Path, engine: EngineProcess, *, sessions: int = SESSIONS, **options: Any
) -> Generator[SidecarProcess]:
    """An empty sidecar that the engine is attached to; at its end everything has ended.

    `options` are those of `sidecar_in`.
    """
    with sidecar_in(folder, **options) as sidecar:
        attach(engine, sidecar, sessions=sessions)
        yield sidecar
        empty(engine)
        sidecar.wait("everything ended", idle)


def held(bucket: Path) -> int:
    """Chunks of which an object is in a folder."""
    names = [parse_name(str(path.relative_to(bucket))) for path in bucket.rglob("*.arrow")]
    return len({name.key for name in names if name is not None})


def listed(sidecar: SidecarProcess, bucket: Path) -> None:
    """Wait until the sidecar knows of all that is in its folder.

    A number would not do: what an engine stores to show that it is there counts, too.
    """

    def whole(status: dict[str, Any]) -> bool:
        store = status["tiers"]["store"]
        # After it was asked: what is written meanwhile can not stand in for what it lacks.
        return bool(store["listings"] and store["chunks"] >= held(bucket))

    sidecar.wait("the catalog is read", whole)
