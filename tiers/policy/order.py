"""A linked list of keys in the order in which they are to be evicted.

Owns the links and the iterators that stand on them. A policy decides where an entry goes.

Invariants: every step is O(1); an iterator never yields a removed entry or an entry twice, and
ends, whatever is inserted, moved or removed while it is suspended. An `OrderedDict` has neither
insertion before an entry nor iterators that survive a change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


class Entry:
    """One key's place in an order."""

    __slots__ = ("following", "inserted", "key", "preceding")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.preceding: Entry = self
        self.following: Entry = self
        self.inserted = 0
        """Number of the insertion that put the entry here."""


class _Cursor:
    """Where a suspended iterator goes on."""

    __slots__ = ("at",)

    def __init__(self, at: Entry) -> None:
        self.at = at


class EvictionOrder:
    """Entries from the first to be evicted to the last."""

    def __init__(self) -> None:
        self.end = Entry(None)
        """Behind the last entry. Inserting before it appends."""
        self._insertions = 0
        self._cursors: list[_Cursor] = []

    def insert(self, entry: Entry, before: Entry) -> None:
        """Insert an entry that is in no order right before `before`."""
        self._insertions += 1
        entry.inserted = self._insertions
        preceding = before.preceding
        entry.preceding = preceding
        entry.following = before
        preceding.following = entry
        before.preceding = entry

    def remove(self, entry: Entry) -> None:
        """Remove an entry, if it is there."""
        for cursor in self._cursors:
            if cursor.at is entry:
                cursor.at = entry.following
        entry.preceding.following = entry.following
        entry.following.preceding = entry.preceding
        entry.preceding = entry.following = entry

    def keys(self) -> Iterator[Hashable]:
        """Keys in order, without entries that are inserted after the first step."""
        cursor = _Cursor(self.end.following)
        newest = self._insertions
        self._cursors.append(cursor)
        try:
            while cursor.at is not self.end:
                entry = cursor.at
                cursor.at = entry.following
                # An entry that moved here meanwhile was just used and is no victim. A caller that
                # touches what it skips would otherwise never reach the end.
                if entry.inserted <= newest:
                    yield entry.key
        finally:
            self._cursors.remove(cursor)
