"""First in, first out: the order in which chunks came, whatever is used.

The baseline for other policies, and the choice where prompts are not repeated in any pattern. The
head of a chain comes first and goes first, and leaves the rest unreachable: `lru` avoids that.

Invariant: a key keeps its place from `add` to `remove`. Every call is O(1).
"""

from collections.abc import Hashable

from tiers.policy.lru import LruPolicy


class FifoPolicy(LruPolicy):
    """Evicts what came first: an LRU without chains, where a use is none."""

    def add(self, key: Hashable, parent: Hashable | None) -> None:  # noqa: ARG002
        """Put a key last. Raises `KeyError` if it is there already."""
        super().add(key, None)

    def touch(self, key: Hashable) -> None:
        """Change nothing. Raises `KeyError` if the key is not there."""
        if key not in self._links:
            raise KeyError(f"{key!r} was touched, but never added")
