"""Eviction policies, one file each, and what every policy offers.

A policy orders the chunks of the host tier and names victims. It owns only that order:
`sidecar/core/host_tier.py` knows which chunks are pinned or busy, and decides what is evicted.
Policies do no I/O and know no time: they see only the order of the calls.

Invariants: `victims` names exactly the keys that were added and not removed, each once; it changes
nothing.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from tiers.policy.fifo import FifoPolicy
from tiers.policy.lru import LruPolicy


class Policy(Protocol):
    """An order of eviction over keys, any hashable values (the engine's are realm id and key).

    A key that is added twice, or touched or removed without being there, raises `KeyError`.
    """

    def add(self, key: Hashable, parent: Hashable | None) -> None:
        """Add a key. `parent` precedes it in its chain, and need not be cached."""

    def touch(self, key: Hashable) -> None:
        """Note that a key was used."""

    def remove(self, key: Hashable) -> None:
        """Forget a key that left the cache."""

    def victims(self) -> Iterator[Hashable]:
        """The keys in the order in which to evict them; the first costs no search.

        The policy may be changed between two steps: removed keys are left out, added or touched
        keys may be.
        """
        ...


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LruPolicy, "fifo": FifoPolicy}
"""Name in the configuration (`host.policy`) -> a policy."""
