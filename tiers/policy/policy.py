"""What every eviction policy offers.

A policy orders the chunks that the host tier holds, and names victims. It owns only that order:
the engine owns the chunks, knows which are pinned or busy, and decides what is evicted. Policies
do no I/O and know no time: the order of the calls is all that they see.

Invariants: `victims` names exactly the keys that were added and not removed since, each once; it
changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


class Policy(Protocol):
    """An order of eviction over keys, any hashable values (the engine's are realm id and key).

    A key that is added twice, or touched or removed without being there, is the caller's mistake
    and raises `KeyError`: the two sides disagree about what is in the cache.
    """

    def add(self, key: Hashable, parent: Hashable | None) -> None:
        """Take a key that entered the cache. `parent` precedes it, and need not be cached."""
        ...

    def touch(self, key: Hashable) -> None:
        """Note that a key was used."""
        ...

    def remove(self, key: Hashable) -> None:
        """Forget a key that left the cache."""
        ...

    def victims(self) -> Iterator[Hashable]:
        """Name the keys in the order in which to evict them; the first costs no search.

        The policy may be changed between two steps: keys that are removed are not named any more,
        and keys that are added or touched meanwhile may be left out.
        """
        ...
