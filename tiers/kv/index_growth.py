"""Growing a shared index while it is in use: a larger copy in the making.

Owns going through the slots of the smaller table a few at a time, and what was changed in it
meanwhile. Does not own the tables (`index.py`), when one is to grow, or who is told.

Invariants: until `finish` only the smaller table is written by its owner, and it stays true; what
is changed while a slot is copied is taken over at the end, whatever the copy has of it.
"""

from __future__ import annotations

from tiers.kv.index import SLOTS_PER_PASS, IndexWriter


class IndexGrowth:
    """Copies `smaller` into `larger`, which must be empty and have at least twice the slots."""

    def __init__(self, smaller: IndexWriter, larger: IndexWriter) -> None:
        assert larger.slots >= 2 * smaller.slots, "the larger index is larger"
        assert not len(larger), "the larger index is empty"
        self._smaller = smaller
        self._larger = larger
        self._next = 0
        self._changes = smaller.follow()

    def step(self) -> bool:
        """Copy some slots, in about a millisecond. True when none is left."""
        self._larger.adopt(self._smaller, self._next)
        self._next += SLOTS_PER_PASS
        return self._next >= self._smaller.slots

    def finish(self) -> IndexWriter:
        """The larger table, with everything that was changed meanwhile. Write only it from now."""
        assert self._next >= self._smaller.slots, "every slot was copied"
        for tag, flags in (*self._smaller.waiting.items(), *self._changes):
            self._larger.replace(tag, flags)
        return self._larger
