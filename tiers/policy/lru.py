"""Least recently used, with the tail of a chain going before its head.

A chunk can be used only together with all chunks before it, so using one uses its cached ancestors
too: they are at least as recent, and of two that were used by the same touch the child goes first.
The head of a chain is evicted last, so what stays of a chain is a prefix that can be looked up.

The order is a linked list. Invariants:

* In the order, every key stands before its cached parent, except one that was added as `first`.
* The order ends with the path of the newest touch: the touched key, its parent, and so on up to
  the first ancestor that is not cached.
* A suspended iterator never yields a removed key or a key twice, and ends, whatever is added,
  touched or removed meanwhile. An `OrderedDict` has no such iterators, nor insertion in the middle.

The path makes the usual calls O(1): a chain that is touched from its head down, or from its tail
up, finds the parent or itself on the path, and moves one entry. A touch of another chain moves the
entries that it does not share with the path, at most the length of the chain.

Rejected: ordering by each key's own touch, and searching for leaves when victims are needed. The
old end then fills with inner chunks of chains in use, which every call must skip.
"""

from collections.abc import Iterator, Sequence

from tiers.policy.key import CacheKey, Left


class _Link:
    """A key in its chain, and its place in the order of eviction."""

    __slots__ = ("following", "inserted", "key", "moving", "parent", "place", "preceding")

    def __init__(self, key: CacheKey, parent: CacheKey | None) -> None:
        self.key = key
        self.parent = parent
        self.preceding: _Link = self
        self.following: _Link = self
        self.inserted = 0
        """Number of the insertion that put it here."""
        self.place = -1
        """Index on the path, or -1."""
        self.moving = False

    def insert_before(self, following: "_Link") -> None:
        self.preceding, self.following = following.preceding, following
        self.preceding.following = following.preceding = self

    def unlink(self) -> None:
        self.preceding.following, self.following.preceding = self.following, self.preceding
        self.preceding = self.following = self


class _Cursor:
    """Where a suspended iterator goes on."""

    __slots__ = ("at",)

    def __init__(self, at: _Link) -> None:
        self.at = at


class LruPolicy:
    """Evicts the chain that was not used for the longest time, from its tail."""

    by_last_use: bool = True

    def __init__(self) -> None:
        self._links: dict[CacheKey, _Link] = {}
        # Behind the last link: inserting before it appends.
        self._end = _Link((0, b""), None)
        self._insertions = 0
        self._cursors: list[_Cursor] = []
        # From the oldest cached ancestor of the key that was touched last down to that key.
        self._path: list[_Link] = []

    def __len__(self) -> int:
        return len(self._links)

    def use(self, keys: Sequence[CacheKey], num_tokens: int = 0) -> None:  # noqa: ARG002
        """Make the keys that are there, and their cached ancestors, the last."""
        # The head is used last, also of a chain with gaps.
        for key in reversed(keys):
            if (link := self._links.get(key)) is not None:
                self._refresh(link)

    def add(
        self,
        key: CacheKey,
        parent: CacheKey | None,
        uses: int = 0,  # noqa: ARG002
        *,
        first: bool = False,
    ) -> None:
        """Add a key as used now, or before all others. Raises `KeyError` if it is there already."""
        if key in self._links:
            raise KeyError(f"{key!r} was added twice")
        link = self._links[key] = _Link(key, parent)
        if first:
            link.insert_before(self._end.following)
            self._insertions += 1
            link.inserted = self._insertions
        else:
            self._refresh(link)

    def remove(self, key: CacheKey, why: Left = Left.EVICTED) -> None:  # noqa: ARG002
        """Remove a key. Raises `KeyError` if it is not there."""
        link = self._links.pop(key)
        if link.place >= 0:
            self._cut_path(link.place)
        self._unlink(link)

    def admits(self, key: CacheKey, parent: CacheKey | None) -> bool:  # noqa: ARG002
        """Always: the newest is worth most."""
        return True

    def victims(self) -> Iterator[CacheKey]:
        """Keys from the least to the most recently used, children before their parents.

        Without keys that are added or used after the first step. A caller that uses what it skips
        would otherwise never reach the end.
        """
        cursor = _Cursor(self._end.following)
        newest = self._insertions
        self._cursors.append(cursor)
        try:
            while (link := cursor.at) is not self._end:
                cursor.at = link.following
                if link.inserted <= newest:
                    yield link.key
        finally:
            self._cursors.remove(cursor)

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
        before = self._end if ancestor is None else ancestor
        for entry in moving:
            self._unlink(entry)
            entry.insert_before(before)
            self._insertions += 1
            entry.inserted = self._insertions
        for entry in reversed(moving):
            entry.moving = False
            entry.place = len(self._path)
            self._path.append(entry)

    def _unlink(self, link: _Link) -> None:
        for cursor in self._cursors:
            if cursor.at is link:
                cursor.at = link.following
        link.unlink()

    def _cut_path(self, length: int) -> None:
        for link in self._path[length:]:
            link.place = -1
        del self._path[length:]
