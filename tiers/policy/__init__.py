"""Eviction policies, one file each, and what every policy offers.

A policy orders the chunks of the host tier and names victims. It owns only that order:
`sidecar/core/host_tier.py` knows which chunks are pinned or busy, and decides what is evicted.
Policies do no I/O and know no time: they see only the order of the calls.

Invariants: `victims` names exactly the keys that were added and not removed, each once; it changes
nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tiers.policy.density import DensityPolicy
from tiers.policy.fifo import FifoPolicy
from tiers.policy.key import CacheKey, Left
from tiers.policy.lru import LruPolicy


class Policy(Protocol):
    """An order of eviction over chunks.

    A key that is added twice, or removed without being there, raises `KeyError`.
    """

    by_last_use: bool
    """Whether the first victim is what requests used longest ago, whatever else is known."""

    def use(self, keys: Sequence[CacheKey], num_tokens: int) -> None:
        """Note the prompt of one request: its chunks, head first, cached or not, and its tokens.

        It comes once for each request, before what it computes is added.
        """

    def add(
        self, key: CacheKey, parent: CacheKey | None, uses: int = 0, *, first: bool = False
    ) -> None:
        """Add a key. `parent` precedes it in its chain, and need not be cached.

        `uses`: what an earlier run counted, for a key that it had. `first`: it was refused, and is
        to go before all others until it is used.
        """

    def remove(self, key: CacheKey, why: Left = Left.EVICTED) -> None:
        """Remove a key that left the cache, or was pinned."""

    def admits(self, key: CacheKey, parent: CacheKey | None) -> bool:
        """Whether a key is worth more than the first victim. One that is not may still be added.

        Asked when there is no room, of a key that is not there.
        """
        ...

    def victims(self) -> Iterator[CacheKey]:
        """The keys in the order in which to evict them; the first costs no search.

        The policy may be changed between two steps: removed keys are left out, added or used keys
        may be.
        """
        ...


POLICIES: dict[str, Callable[[], Policy]] = {
    "density": DensityPolicy,
    "lru": LruPolicy,
    "fifo": FifoPolicy,
}
"""Name in the configuration (`host.policy`) -> a policy."""
