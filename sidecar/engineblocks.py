"""What one engine's own cache holds, as its event stream tells it, for the stream of this sidecar.

Owns the set of blocks, and turning the engine's events into ones that can stand beside those of
other engines: the owner is named, and "all blocks cleared" becomes their removal. Does not own how
the events get here (`enginefeed.py`). Pure.

Invariants: at most `blocks_max` blocks are remembered; one that is forgotten is told as removed,
so that what is remembered is what subscribers have been told.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from sidecar.kvevents import LOCAL, MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sidecar.kvevents import CacheEvent, Hash

BLOCKS_MAX: Final = 1 << 20
HASHES_PER_EVENT_MAX: Final = 4096
TIERS_OWNER: Final = "kvlake/"
"""Events of kvlake's tiers in an engine's stream come from the connector, and are told already."""


class _Place(NamedTuple):
    """A block's name: engines that have several groups of layers use one hash in each."""

    medium: str
    group_idx: int | None
    ownership: str
    name: Hash


class EngineBlocks:
    """One engine's blocks, by the events that told of them."""

    def __init__(self, engine_id: str, *, blocks_max: int = BLOCKS_MAX) -> None:
        self.owner = f"engine/{engine_id}"
        self.data_parallel_rank: int | None = None
        self._blocks_max = blocks_max
        self._held: dict[_Place, tuple[BlockStored, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Take events of the engine; what to tell subscribers."""
        told: list[CacheEvent] = []
        for event in events:
            match event:
                case AllBlocksCleared():
                    told += self.clear()
                case BlockStored() | BlockRemoved():
                    if not (event.ownership or "").startswith(TIERS_OWNER):
                        told.append(self._apply(event))
        while len(self._held) > self._blocks_max:
            oldest = list(itertools.islice(self._held, len(self._held) - self._blocks_max))
            told += self._forget(oldest)
        return told

    def _apply(self, event: BlockStored | BlockRemoved) -> CacheEvent:
        named = msgspec.structs.replace(
            event,
            medium=event.medium or MEDIUM_GPU,
            locality=event.locality or LOCAL,
            ownership=event.ownership or self.owner,
        )
        for position, name in enumerate(event.block_hashes):
            place = _Place(named.medium or "", named.group_idx, named.ownership or "", name)
            # Taken out first, so that the newest is last.
            self._held.pop(place, None)
            if isinstance(named, BlockStored):
                self._held[place] = (named, position)
        return named

    def clear(self) -> list[CacheEvent]:
        """Forget all blocks; what to tell subscribers."""
        return self._forget(list(self._held))

    def _forget(self, places: list[_Place]) -> list[CacheEvent]:
        events: list[CacheEvent] = []
        for (medium, group_idx, owner), run in itertools.groupby(places, key=lambda one: one[:3]):
            names = [place.name for place in run]
            events += [
                BlockRemoved(
                    block_hashes=names[start : start + HASHES_PER_EVENT_MAX],
                    medium=medium,
                    group_idx=group_idx,
                    locality=LOCAL,
                    ownership=owner,
                )
                for start in range(0, len(names), HASHES_PER_EVENT_MAX)
            ]
        for place in places:
            del self._held[place]
        return events

    def snapshot(self) -> Iterator[CacheEvent]:
        """An event for each block that is held, one after the other, oldest first."""
        for event, position in list(self._held.values()):
            yield _one_of(event, position)


def _one_of(event: BlockStored, position: int) -> BlockStored:
    """The event of one of its blocks."""
    size = event.block_size
    hashes, tokens, parent = event.block_hashes, event.token_ids, event.parent_block_hash
    if len(tokens) == len(hashes) * size:
        tokens = tokens[position * size : (position + 1) * size]
        parent = hashes[position - 1] if position else parent
    else:
        # Of windows and states vLLM keeps some blocks of a range, and tells the tokens of all: it
        # does not say which of them are this block's.
        tokens, parent = [], None
    extra, ahead = event.extra_keys, event.lookahead_token_ids
    return msgspec.structs.replace(
        event,
        block_hashes=[hashes[position]],
        parent_block_hash=parent,
        token_ids=tokens,
        extra_keys=None if extra is None else extra[position : position + 1],
        lookahead_token_ids=None if ahead is None else ahead[position : position + 1],
    )
