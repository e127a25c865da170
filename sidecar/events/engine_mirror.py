"""A mirror of one engine's own cache, built from its event stream. Pure.

Owns the set of blocks, and turning the engine's events into ones that can stand beside those of
other engines: they name the owner, and "all blocks cleared" becomes the removal of each.

Invariants: at most `BLOCKS_MAX` blocks are kept, and dropping one yields its removal, so the mirror
always equals what subscribers were sent. vLLM may compute a block more than once, keeps each copy,
and publishes an event for each: a removal is yielded for the last copy only. If vLLM publishes hits
with the same events, copies cannot be counted: then the first removal counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec

from sidecar.events.records import (
    LOCAL,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    Hash,
)
from sidecar.protocol import HITS_OWNER, TIERS_OWNER

T = TypeVar("T")
BLOCKS_MAX: Final = 1 << 20
HASHES_PER_EVENT_MAX: Final = 4096


class _Place(NamedTuple):
    """Identifies a block: engines with several KV cache groups use one hash in each."""

    medium: str
    group_idx: int | None
    ownership: str
    name: Hash


class _Held(NamedTuple):
    """A block, by its last event and its position there."""

    event: BlockStored
    position: int
    copies: int


class EngineBlocks:
    """One engine's blocks, by their events."""

    def __init__(self, engine_id: str) -> None:
        self.owner = f"engine/{engine_id}"
        self.data_parallel_rank: int | None = None
        self._held: dict[_Place, _Held] = {}
        self._counts = True

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Apply events of the engine; returns the events for subscribers."""
        changes: list[CacheEvent] = []
        batch = list(events)
        if self._counts and any(_announces_hits(event) for event in batch):
            self._counts = False
            self._held = {place: held._replace(copies=1) for place, held in self._held.items()}
        for event in batch:
            match event:
                case AllBlocksCleared():
                    changes += self.clear()
                case BlockStored() | BlockRemoved():
                    if not (event.ownership or "").startswith(TIERS_OWNER):
                        changes += self._apply(event)
        while len(self._held) > BLOCKS_MAX:
            oldest = list(itertools.islice(self._held, len(self._held) - BLOCKS_MAX))
            changes += self._drop(oldest)
        return changes

    def _apply(self, event: BlockStored | BlockRemoved) -> list[CacheEvent]:
        named = msgspec.structs.replace(
            event,
            medium=event.medium or MEDIUM_GPU,
            locality=event.locality or LOCAL,
            ownership=event.ownership or self.owner,
        )
        gone: list[Hash] = []
        for position, name in enumerate(event.block_hashes):
            place = _Place(named.medium or "", named.group_idx, named.ownership or "", name)
            held = self._held.get(place)
            copies = held.copies if held is not None and self._counts else 0
            if isinstance(named, BlockStored):
                # Removed first, so that the newest is last.
                self._held.pop(place, None)
                self._held[place] = _Held(named, position, copies + 1)
            elif held is not None and copies > 1:
                self._held[place] = held._replace(copies=copies - 1)
            else:
                self._held.pop(place, None)
                gone.append(name)
        if isinstance(named, BlockStored):
            return [named]
        return [msgspec.structs.replace(named, block_hashes=gone)] if gone else []

    def clear(self) -> list[CacheEvent]:
        """Drop all blocks; returns the events for subscribers."""
        return self._drop(list(self._held))

    def _drop(self, places: list[_Place]) -> list[CacheEvent]:
        events: list[CacheEvent] = []
        for (medium, group_idx, owner), run in itertools.groupby(places, key=lambda one: one[:3]):
            events += [
                BlockRemoved(names, medium, group_idx, LOCAL, owner)
                for names in parts((place.name for place in run), HASHES_PER_EVENT_MAX)
            ]
        for place in places:
            del self._held[place]
        return events

    def snapshot(self) -> Iterator[CacheEvent]:
        """An event for each block, oldest first."""
        for held in list(self._held.values()):
            yield event_of_block(held.event, held.position)


def parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Consecutive lists of at most `size` items."""
    iterator = iter(items)
    while part := list(itertools.islice(iterator, size)):
        yield part


def _announces_hits(event: CacheEvent) -> bool:
    return isinstance(event, BlockRemoved) and event.ownership == HITS_OWNER


def event_of_block(event: BlockStored, position: int) -> BlockStored:
    """The event of one of its blocks."""
    size = event.block_size
    hashes, tokens, parent = event.block_hashes, event.token_ids, event.parent_block_hash
    if len(tokens) == len(hashes) * size:
        tokens = tokens[position * size : (position + 1) * size]
        parent = hashes[position - 1] if position else parent
    else:
        # For sliding windows and states vLLM stores some blocks of a range, but sends the tokens of
        # all: which of them are this block's is unknown.
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
