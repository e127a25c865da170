"""Where kvlake meets vLLM, as a kill matrix must know it: `KVLakeConnector`, or vLLM's offloading.

What is different for the matrix, beside what `native.py` says:

* Who attaches. The connector's two halves are in vLLM's engine core and in its worker. Below vLLM's
  host tier both are in the engine core; vLLM's worker has no session, and what it holds up for
  the engine's clients is the engine core that waits for it.
* What the sidecar copies to and from. The connector's worker shares the engine's blocks. The tier
  has a few rows of memory of its own, from which what was loaded is copied to vLLM's host tier, and
  from there by vLLM's worker into blocks: so a load can be given up while the sidecar is at it, and
  there are two stages that the connector does not have (`Stage.COPY_IN`, `Stage.COPY_OUT`).
* Chunks. The connector loads all of a prompt in one job, its unfilled last chunk too. vLLM's
  offloading knows whole chunks only, each loaded by itself: of a prompt whose load was disturbed
  the head may be a hit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidecar.protocol import Role
from tests.e2e.arms import BLOCK_TOKENS, CHUNK_TOKENS
from tests.e2e.kill_table import Backend
from tests.e2e.native import NativeEngine
from tests.harness.engine import EngineProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.harness.engine import EngineSpec

PROMPT_TOKENS: Final = 700


class HeldEngine(NativeEngine):
    """With chunks that the sidecar copies in two pieces, and a worker that can be held."""

    spec_name = "HeldSpec"
    spec_module = "tests.e2e.held_copies"
    blocks_per_chunk = 2
    chunk_tokens = 2 * BLOCK_TOKENS


@dataclass(frozen=True)
class Seam:
    """One of the two."""

    backend: Backend
    make_engine: Callable[[EngineSpec, Path], EngineProcess]
    chunk_tokens: int
    chunks: int
    """What a prompt is stored as."""
    whole_tokens: int
    """What a hit has of it."""
    core_has: tuple[Role, ...]
    """Which of the two sessions are the engine core's; the others are the worker's."""
    memory: str
    """What the sidecar maps of the engine."""
    shares_blocks: bool
    """Whether that is the engine's blocks."""
    copy_threads: int
    """In the sidecar: some are held in the middle of the victim's copies, others are left."""

    def clients(self, core: int, worker: int) -> dict[Role, int]:
        """Which process of an engine attaches in which role."""
        return {role: core if role in self.core_has else worker for role in Role}


CONNECTOR: Final = Seam(
    Backend.CONNECTOR,
    EngineProcess,
    CHUNK_TOKENS,
    chunks=3,
    whole_tokens=672,
    core_has=(Role.SCHEDULER,),
    memory="kvlake-kv",
    shares_blocks=True,
    # A prompt is one job.
    copy_threads=4,
)
OFFLOADING: Final = Seam(
    Backend.OFFLOADING,
    HeldEngine,
    HeldEngine.chunk_tokens,
    chunks=PROMPT_TOKENS // HeldEngine.chunk_tokens,
    whole_tokens=640,
    core_has=(Role.SCHEDULER, Role.WORKER),
    memory="kvlake-staging",
    shares_blocks=False,
    # Each chunk is one.
    copy_threads=16,
)
