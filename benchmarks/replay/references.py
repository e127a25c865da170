"""Eviction policies from publications, to compare kvlake's with.

Each is a cache of blocks as its authors describe it, and knows nothing of chains. What is fitted to
prompts is in `BlockCache`: a block is of use only with all blocks before it, and the blocks of a
request are accessed after it, tail before head, so that in an order by time the tail goes first.

Invariant: a cache never has more blocks than its capacity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container
from typing import TYPE_CHECKING, Final

from benchmarks.replay.replay import leading

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.replay.traces import PromptRequest
    from tiers.policy.key import CacheKey

SMALL_PART: Final = 0.1
"""Part of an S3-FIFO that new blocks have."""
WINDOW_PART: Final = 0.01
"""Part of a W-TinyLFU that new blocks have."""
PROTECTED_PART: Final = 0.8
"""Part of the rest for blocks that were accessed again."""
FREQUENCY_MAX: Final = 15
AGED_AFTER: Final = 10
"""Frequencies are halved after this many accesses for each block of the capacity."""

_Blocks = OrderedDict["CacheKey", None]


class BlockCache(ABC, Container["CacheKey"]):
    """A cache of `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    @abstractmethod
    def access(self, key: CacheKey) -> None:
        """Use a block; insert it if it is not cached."""

    def serve(self, request: PromptRequest) -> int:
        """Access the blocks of a request. Returns how many of the first ones were cached."""
        hits = leading(request.keys, self)
        for key in reversed(request.keys):
            self.access(key)
        return hits


class LruReference(BlockCache):
    """Least recently used."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._blocks = _Blocks()

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def access(self, key: CacheKey) -> None:
        self._blocks[key] = None
        self._blocks.move_to_end(key)
        if len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class ArcReference(BlockCache):
    """Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once, self._again = _Blocks(), _Blocks()
        self._gone_once, self._gone_again = _Blocks(), _Blocks()
        self._target = 0.0
        """Wanted size of `_once`."""

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again

    def access(self, key: CacheKey) -> None:
        gone_once, gone_again = self._gone_once, self._gone_again
        if key in self:
            self._once.pop(key, None)
            self._again.pop(key, None)
        elif key in gone_once:
            step = max(1.0, len(gone_again) / len(gone_once))
            self._target = min(self._target + step, self._capacity)
            self._replace(was_again=False)
            del gone_once[key]
        elif key in gone_again:
            step = max(1.0, len(gone_once) / len(gone_again))
            self._target = max(self._target - step, 0.0)
            self._replace(was_again=True)
            del gone_again[key]
        else:
            self._make_room()
            self._once[key] = None
            return
        self._again[key] = None

    def _make_room(self) -> None:
        once = len(self._once) + len(self._gone_once)
        total = once + len(self._again) + len(self._gone_again)
        if once == self._capacity:
            if not self._gone_once:
                self._once.popitem(last=False)
                return
            self._gone_once.popitem(last=False)
            self._replace(was_again=False)
        elif total >= self._capacity:
            if total == 2 * self._capacity:
                self._gone_again.popitem(last=False)
            self._replace(was_again=False)

    def _replace(self, *, was_again: bool) -> None:
        size = len(self._once)
        if size and (size > self._target or (was_again and size == self._target)):
            self._gone_once[self._once.popitem(last=False)[0]] = None
        elif self._again:
            self._gone_again[self._again.popitem(last=False)[0]] = None


class S3FifoReference(BlockCache):
    """Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_max = max(1, int(capacity * SMALL_PART))
        self._small, self._main, self._ghosts = _Blocks(), _Blocks(), _Blocks()
        self._uses: dict[CacheKey, int] = {}
        """Accesses since a block entered its queue, 3 at most."""

    def __contains__(self, key: object) -> bool:
        return key in self._uses

    def access(self, key: CacheKey) -> None:
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, 3)
            return
        while len(self._uses) >= self._capacity:
            if len(self._small) >= self._small_max or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        queue = self._small
        if key in self._ghosts:
            del self._ghosts[key]
            queue = self._main
        queue[key] = None
        self._uses[key] = 0

    def _evict_small(self) -> None:
        key, _ = self._small.popitem(last=False)
        if self._uses[key] > 1:
            self._main[key] = None
            self._uses[key] = 0
            return
        del self._uses[key]
        self._ghosts[key] = None
        if len(self._ghosts) > self._capacity - self._small_max:
            self._ghosts.popitem(last=False)

    def _evict_main(self) -> None:
        key, _ = self._main.popitem(last=False)
        if self._uses[key]:
            self._uses[key] -= 1
            self._main[key] = None
        else:
            del self._uses[key]


class _SieveNode:
    """A block, and the next newer and older ones."""

    __slots__ = ("key", "newer", "older", "visited")

    def __init__(self, key: CacheKey, older: _SieveNode | None) -> None:
        self.key = key
        self.newer: _SieveNode | None = None
        self.older = older
        self.visited = False


class SieveReference(BlockCache):
    """Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._nodes: dict[CacheKey, _SieveNode] = {}
        self._newest: _SieveNode | None = None
        self._oldest: _SieveNode | None = None
        self._hand: _SieveNode | None = None

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def access(self, key: CacheKey) -> None:
        if key in self._nodes:
            self._nodes[key].visited = True
            return
        if len(self._nodes) >= self._capacity:
            self._evict()
        node = self._nodes[key] = _SieveNode(key, self._newest)
        if self._newest is not None:
            self._newest.newer = node
        self._newest = node
        self._oldest = self._oldest or node

    def _evict(self) -> None:
        node = self._hand or self._oldest
        while node is not None and node.visited:
            node.visited = False
            node = node.newer or self._oldest
        if node is None:
            return
        self._hand = node.newer
        if node.newer is None:
            self._newest = node.older
        else:
            node.newer.older = node.older
        if node.older is None:
            self._oldest = node.newer
        else:
            node.older.newer = node.newer
        del self._nodes[node.key]


class TinyLfuReference(BlockCache):
    """Einziger et al., "TinyLFU: A Highly Efficient Cache Admission Policy", ACM ToS 2017.

    W-TinyLFU, with exact frequencies in place of a sketch: an upper line for it.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._window_max = max(1, int(capacity * WINDOW_PART))
        self._protected_max = int((capacity - self._window_max) * PROTECTED_PART)
        self._window, self._probation, self._protected = _Blocks(), _Blocks(), _Blocks()
        self._frequencies: dict[CacheKey, int] = {}
        self._accesses = 0

    def __contains__(self, key: object) -> bool:
        return key in self._window or key in self._probation or key in self._protected

    def access(self, key: CacheKey) -> None:
        self._count(key)
        if key in self._window:
            self._window.move_to_end(key)
        elif key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._probation:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > self._protected_max:
                self._probation[self._protected.popitem(last=False)[0]] = None
        else:
            self._window[key] = None
            if len(self._window) > self._window_max:
                self._leave_window(self._window.popitem(last=False)[0])

    def _count(self, key: CacheKey) -> None:
        self._frequencies[key] = min(self._frequencies.get(key, 0) + 1, FREQUENCY_MAX)
        self._accesses += 1
        if self._accesses >= AGED_AFTER * self._capacity:
            self._accesses //= 2
            halved = ((key, uses // 2) for key, uses in self._frequencies.items())
            self._frequencies = {key: uses for key, uses in halved if uses}

    def _leave_window(self, candidate: CacheKey) -> None:
        main = len(self._probation) + len(self._protected)
        if main >= self._capacity - self._window_max:
            queue = self._probation or self._protected
            victim = next(iter(queue), None)
            uses = self._frequencies
            if victim is None or uses.get(candidate, 0) <= uses.get(victim, 0):
                return
            del queue[victim]
        self._probation[candidate] = None


REFERENCES: Final[dict[str, Callable[[int], BlockCache]]] = {
    "LRU": LruReference,
    "ARC": ArcReference,
    "S3-FIFO": S3FifoReference,
    "SIEVE": SieveReference,
    "W-TinyLFU": TinyLfuReference,
}
"""Name -> a cache of this many blocks."""
