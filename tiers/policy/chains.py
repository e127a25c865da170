"""Cached keys in their chains, queues of them, and suspended iterations over victims.

Parts of `density.py`, which owns them.
"""

import heapq
from typing import Final, TypeAlias

import msgspec

from tiers.policy.key import CacheKey

REMOVED: Final = -1
"""The kind of an entry that was removed."""


class Entry(msgspec.Struct, eq=False, gc=False):
    """A cached key in its chain. Entries are in no cycle, so nothing collects them."""

    key: CacheKey
    parent_key: CacheKey | None
    parent: "Entry | None"
    """Until that is removed."""
    kind: int
    last: int
    """When it was used last, or added."""
    children: int = 0
    """Cached keys that it precedes."""
    in_prompt: bool = True
    """A request had it in its prompt."""


Place: TypeAlias = tuple[int, int, Entry]
"""Last use of an entry, a number, and the entry."""
Queue: TypeAlias = list[Place]


class Naming:
    """A suspended iteration over victims: what it named, and what it must not name."""

    def __init__(self, queues: list[Queue]) -> None:
        self.queues = [queue.copy() for queue in queues]
        self.over = set[Entry]()
        """Named, or used or added since it began."""
        self._unnamed: dict[Entry, int] = {}
        """Children of an entry that are to be named before it, once one was."""

    def waits(self, entry: Entry) -> bool:
        """Whether children of an entry are to be named before it."""
        return self._unnamed.get(entry, entry.children) > 0

    def removed(self, entry: Entry, above: Entry | None, number: int) -> None:
        """An entry was removed, and the one `above` counts as used when it was."""
        if entry not in self.over:
            self.leaves(entry, above, number)
        elif above is not None and not self.waits(above):
            heapq.heappush(self.queues[above.kind], (above.last, number, above))

    def leaves(self, entry: Entry, above: Entry | None, number: int) -> None:
        """An entry was named or removed, so that the next may be the one `above`."""
        if entry in self.over:
            return
        self.over.add(entry)
        if above is not None:
            left = self._unnamed[above] = self._unnamed.get(above, above.children) - 1
            if left <= 0:
                heapq.heappush(self.queues[above.kind], (above.last, number, above))


def stands(place: Place, kind: int, naming: Naming | None = None) -> bool:
    """Whether an entry in the queue of this kind is to be named, after all of its children."""
    last, _, entry = place
    if entry.kind != kind or entry.last != last:
        return False
    waits = bool(entry.children) if naming is None else naming.waits(entry)
    return not waits and (naming is None or entry not in naming.over)
