"""What the end-to-end tests start engines and sidecars with, and where they are the same.

A module has a folder (`conftest.py`); its sidecars take turns on the sockets in it, and an engine
attaches to whichever serves there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from sidecar.demo.sidecars import SidecarProcess
from tests.e2e.arms import PATIENT, SESSIONS, attach, empty, idle
from tiers.catalog.names import parse_name

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from sidecar.demo.engine import Engine

SMALL: Final[dict[str, Any]] = {"num_gpu_blocks_override": 256, "max_model_len": 4096}
"""Of an engine: memory for two of the longest prompts, so that a dozen requests fill it."""


def in_steps(num_tokens: int) -> dict[str, Any]:
    """Of an engine: it computes prompts in steps of at most so many tokens."""
    return {"max_num_batched_tokens": num_tokens, "enable_chunked_prefill": True}


def folder_store(bucket: Path) -> dict[str, Any]:
    """The section `store` of a sidecar, in a folder that is made where it is not there."""
    bucket.mkdir(exist_ok=True)
    # The model computes sooner than a store is read: wait for it all the same.
    return {"url": f"file://{bucket}", "refresh_seconds": "100ms", "recompute": "never"}


def sidecar_in(folder: Path, **sections: Any) -> SidecarProcess:
    """A sidecar of a module's folder, not started yet."""
    config = {"host": {"size": "256MiB"}, "limits": PATIENT, **sections}
    return SidecarProcess(folder / "s", config)


@contextlib.contextmanager
def attached(
    folder: Path, engine: Engine, *, sessions: int = SESSIONS, **sections: Any
) -> Generator[SidecarProcess]:
    """An empty sidecar that the engine is attached to; at its end everything has ended."""
    with sidecar_in(folder, **sections) as sidecar:
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
