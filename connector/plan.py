"""What the scheduler role tells the workers each step, and what they tell it back.

Plain records without vLLM in them; `vllm.py` wraps them in vLLM's own classes. They travel by
pickle between vLLM's own processes, never to the sidecar.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeVar

PIECE_BYTES: Final = 128
"""What a piece takes of a message, at most, beside its tokens and blocks."""
BLOCK_ID_BYTES: Final = 5


@dataclass(slots=True)
class LoadPiece:
    """Blocks `first_block …` of one chunk go to `block_ids`."""

    key: bytes
    first_block: int
    block_ids: list[int]
    group: int = 0


@dataclass(slots=True)
class StorePiece:
    """`block_ids` hold the chunk `key` after `parent`; `token_ids` are int32 bytes."""

    key: bytes
    parent: bytes
    token_ids: bytes
    block_ids: list[int]
    group: int = 0


@dataclass(slots=True)
class Load:
    """Everything that one request loads."""

    job_id: int
    request_id: str
    pieces: list[LoadPiece]

    @property
    def bytes_max(self) -> int:
        """No less than it takes of a message."""
        blocks = sum(len(piece.block_ids) for piece in self.pieces)
        return PIECE_BYTES * (1 + len(self.pieces)) + BLOCK_ID_BYTES * blocks


@dataclass(slots=True)
class Store:
    """Chunks of one request that became complete in one step."""

    job_id: int
    pieces: list[StorePiece]
    tenant: bytes = b""
    ttl_ms: int = 0
    stays: bool = False
    adapter: int = 0
    """The number of the request's LoRA adapter, and the files that it must be of."""
    adapter_files: str = ""

    @property
    def bytes_max(self) -> int:
        """No less than it takes of a message."""
        return PIECE_BYTES + sum(
            PIECE_BYTES + len(piece.token_ids) + BLOCK_ID_BYTES * len(piece.block_ids)
            for piece in self.pieces
        )


@dataclass(slots=True)
class StepPlan:
    """Jobs of one step, the same for every rank."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    idle: bool = False
    """The step computes nothing."""
    waiting: bool = False
    """Something that the sidecar does for any rank, a lookup included, has not ended."""
    retired: bool = False
    """A rank can never share its memory: the others leave the sidecar. Told from then on."""
    weight_changes: int = 0
    """How often the engine's weights were replaced, as far as the scheduler knows."""


@dataclass(slots=True)
class StepReport:
    """Stores that ended on a rank: job id to the number of ranks, and how many of them failed.

    Those that failed because their deadline passed are counted again on their own, as are loads.
    """

    ended: dict[int, int] = field(default_factory=dict)
    failed: int = 0
    stores_expired: int = 0
    loads_expired: int = 0
    refusal: str = ""
    """Why a rank can never share its memory, told once."""
    adapters: dict[tuple[int, str, bool], int] = field(default_factory=dict)
    """LoRA adapters that were loaded: number, files, whether in place, to the number of ranks."""
    weights_changed: bool = False
    """Weights were replaced, and the scheduler did not know of it."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (
            self.ended
            or self.loads_expired
            or self.refusal
            or self.adapters
            or self.weights_changed
        )

    def add(self, other: StepReport) -> StepReport:
        """Sum of two ranks' reports."""
        return StepReport(
            _sum(self.ended, other.ended),
            self.failed + other.failed,
            self.stores_expired + other.stores_expired,
            self.loads_expired + other.loads_expired,
            self.refusal or other.refusal,
            _sum(self.adapters, other.adapters),
            self.weights_changed or other.weights_changed,
        )


_Key = TypeVar("_Key")


def _sum(one: dict[_Key, int], other: dict[_Key, int]) -> dict[_Key, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}
