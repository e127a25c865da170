"""What the tests of object stores on real engines share: an engine, and sidecars with a store.

One engine; sidecars with empty memory and other stores take turns on its sockets.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    PATIENT,
    Call,
    Measured,
    attach,
    blocks_of,
    empty,
    idle,
)
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

ENGINE_ARGS: Final[dict[str, Any]] = {"num_gpu_blocks_override": 512, "max_model_len": 4096}


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    socket = SidecarProcess(folder / "s", {}).socket
    with EngineProcess(EngineSpec(model, socket, ENGINE_ARGS), folder / "engine.log") as engine:
        yield engine.wait_ready()


@contextlib.contextmanager
def cluster(
    folder: Path, engine: EngineProcess, store: dict[str, Any], limits: dict[str, str] | None = None
) -> Generator[SidecarProcess]:
    """An empty sidecar with this store, attached; at its end everything is written."""
    config = {
        "host": {"size": "128MiB"},
        # The model computes sooner than a store is read: wait for it all the same.
        "store": {"refresh_seconds": "200ms", "recompute": "never", **store},
        "limits": PATIENT if limits is None else limits,
    }
    with SidecarProcess(folder / "s", config) as sidecar:
        attach(engine, sidecar)
        yield sidecar
        empty(engine)
        sidecar.wait("everything ended", idle)
        assert sidecar.drain() == 0


def listed(sidecar: SidecarProcess, chunks: int) -> None:
    """Wait until the catalog was read whole, and has this many chunks.

    The number alone would not do: the chunks of one of its files, or those that attaching left, may
    be as many, before the file with the chunks that are meant is read.
    """

    def whole(status: dict[str, Any]) -> bool:
        store = _store(status)
        return bool(store["listings"] and store["chunks"] >= chunks)

    sidecar.wait("the store is listed", whole)


def _store(status: dict[str, Any]) -> dict[str, Any]:
    store: dict[str, Any] = status["tiers"]["store"]
    return store


def again(engine: EngineProcess, call: Call, salt: str) -> Measured:
    """The request on poisoned memory, under the salt of an earlier arm."""
    empty(engine)
    generation = engine.generate(call.prompt, max_tokens=call.max_tokens, cache_salt=salt)
    return Measured(generation, blocks_of(engine), salt)


def chunks_of(tokens: int, chunk: int = CHUNK_TOKENS) -> int:
    """Objects of a prompt: its full chunks, and its last whole blocks."""
    full, rest = divmod(tokens, chunk)
    return full + (rest >= BLOCK_TOKENS)
