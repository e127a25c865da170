"""First in, first out: the order in which chunks came, whatever is used.

The baseline for other policies, and the choice where prompts are not repeated in any pattern. The
head of a chain comes first and goes first, and leaves the rest unreachable: `lru` avoids that.

Invariant: a key keeps its place from `add` to `remove`. Every call is O(1).
"""

from collections.abc import Sequence

from tiers.policy.key import CacheKey
from tiers.policy.lru import LruPolicy


class FifoPolicy(LruPolicy):
    """Evicts what came first: an LRU without chains, where a use is none."""

    by_last_use: bool = False

    def use(self, keys: Sequence[CacheKey], num_tokens: int = 0) -> None:
        """Change nothing."""

    def add(
        self,
        key: CacheKey,
        parent: CacheKey | None,  # noqa: ARG002
        uses: int = 0,
        *,
        first: bool = False,
    ) -> None:
        """Put a key last, or `first`. Raises `KeyError` if it is there already."""
        super().add(key, None, uses, first=first)
