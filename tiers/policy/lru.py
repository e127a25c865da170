"""Least recently used, with the tail of a chain going before its head.

A chunk can be used only together with all chunks before it, so using one uses its cached ancestors
too: they are at least as recent, and of two that were used by the same touch the child goes first.
The head of a chain is evicted last, so what stays of a chain is a prefix that can be looked up.

Invariants:

* In the order, every key stands before its cached parent.
* The order ends with the path of the newest touch: the touched key, its parent, and so on up to
  the first ancestor that is not cached.

The path makes the usual calls O(1): a chain that is touched from its head down, or from its tail
up, finds the parent or itself on the path, and moves one entry. A touch of another chain moves the
entries that it does not share with the path, at most the length of the chain.

Rejected: ordering by each key's own touch, and searching for leaves when victims are needed. The
old end then fills with inner chunks of chains in use, which every call must skip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.policy.order import Entry, EvictionOrder

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


class _Link(Entry):
    """A key in its chain. `place` is its index on the path, or -1."""

    __slots__ = ("moving", "parent", "place")

    def __init__(self, key: Hashable, parent: Hashable | None) -> None:
        super().__init__(key)
        self.parent = parent
        self.place = -1
        self.moving = False


class LruPolicy:
    """Evicts the chain that was not used for the longest time, from its tail."""

    def __init__(self) -> None:
        self._order = EvictionOrder()
        self._links: dict[Hashable, _Link] = {}
        # From the oldest cached ancestor of the key that was touched last down to that key.
        self._path: list[_Link] = []

    def __len__(self) -> int:
        return len(self._links)

    def add(self, key: Hashable, parent: Hashable | None) -> None:
        """Add a key as used now. Raises `KeyError` if it is there already."""
        if key in self._links:
            raise KeyError(f"{key!r} was added twice")
        link = self._links[key] = _Link(key, parent)
        self._refresh(link)

    def touch(self, key: Hashable) -> None:
        """Make a key and its cached ancestors the last. Raises `KeyError` if it is not there."""
        self._refresh(self._links[key])

    def remove(self, key: Hashable) -> None:
        """Forget a key. Raises `KeyError` if it is not there."""
        link = self._links.pop(key)
        if link.place >= 0:
            self._cut_path(link.place)
        self._order.remove(link)

    def victims(self) -> Iterator[Hashable]:
        """Keys from the least to the most recently used, children before their parents."""
        return self._order.keys()

    def _refresh(self, link: _Link) -> None:
        moving: list[_Link] = []
        ancestor: _Link | None = link
        while ancestor is not None and ancestor.place < 0:
            if ancestor.moving:
                # Parents in a circle, which no chain of hashes has and no order can satisfy.
                ancestor = None
                break
            ancestor.moving = True
            moving.append(ancestor)
            ancestor = None if ancestor.parent is None else self._links.get(ancestor.parent)
        self._cut_path(0 if ancestor is None else ancestor.place + 1)
        before = self._order.end if ancestor is None else ancestor
        for entry in moving:
            self._order.remove(entry)
            self._order.insert(entry, before)
        for entry in reversed(moving):
            entry.moving = False
            entry.place = len(self._path)
            self._path.append(entry)

    def _cut_path(self, length: int) -> None:
        for link in self._path[length:]:
            link.place = -1
        del self._path[length:]
