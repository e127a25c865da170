"""First in, first out: the order in which chunks came, whatever is used.

The baseline for other policies, and the choice where prompts are not repeated in any pattern. The
head of a chain comes first and goes first, and leaves the rest unreachable: `lru` avoids that.

Invariant: a key keeps its place from `add` to `remove`. Every call is O(1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.policy.order import Entry, EvictionOrder

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


class FifoPolicy:
    """Evicts what came first."""

    def __init__(self) -> None:
        self._order = EvictionOrder()
        self._entries: dict[Hashable, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Hashable, parent: Hashable | None) -> None:  # noqa: ARG002
        """Put a key last. Raises `KeyError` if it is there already."""
        if key in self._entries:
            raise KeyError(f"{key!r} was added twice")
        entry = self._entries[key] = Entry(key)
        self._order.insert(entry, self._order.end)

    def touch(self, key: Hashable) -> None:
        """Change nothing. Raises `KeyError` if the key is not there."""
        if key not in self._entries:
            raise KeyError(f"{key!r} was touched, but never added")

    def remove(self, key: Hashable) -> None:
        """Forget a key. Raises `KeyError` if it is not there."""
        self._order.remove(self._entries.pop(key))

    def victims(self) -> Iterator[Hashable]:
        """Keys in the order in which they were added."""
        return self._order.keys()
