"""The best that any policy could do, with knowledge of all requests to come.

Belady's rule (IBM Systems Journal 5(2), 1966) with refusal. After each request, the cache evicts
the chunks whose next use is farthest, among those that it had and those that the request computed.
A use of a chunk is a use of all chunks before it, so these are used again no later. If two chunks
have the same next use, the one farther from the head of its prompt goes first. So what stays of a
chain is a prefix, and each use of a cached chunk is a hit.

No policy has more hits over all requests: this is an upper line, not a policy that can be built. In
the second half alone a policy could have more, if it had given up hits in the first.

Invariants: no chunk stays that is never used again; the chunks before a cached one are cached.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from benchmarks.replay.replay import leading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.replay.traces import PromptRequest
    from tiers.policy.key import CacheKey

NEVER: Final = -1


class ClairvoyantCache:
    """A cache of `capacity` chunks for exactly these requests, to be served in this order."""

    def __init__(self, requests: Sequence[PromptRequest], capacity: int) -> None:
        self._capacity = capacity
        self._next_uses = _next_uses(requests)
        self._served = 0
        self._cached: dict[CacheKey, int] = {}
        """To the request that uses it next."""
        self._farthest: list[tuple[int, int, CacheKey]] = []
        """Heap of next use and depth, both negated; some changed since."""

    def serve(self, request: PromptRequest) -> int:
        """Cache what is used again soonest. Returns how many of the first chunks were cached."""
        cached, next_uses = self._cached, self._next_uses[self._served]
        self._served += 1
        hits = leading(request.keys, cached)
        for depth, (key, next_use) in enumerate(zip(request.keys, next_uses, strict=True)):
            cached.pop(key, None)
            if next_use != NEVER:
                cached[key] = next_use
                heapq.heappush(self._farthest, (-next_use, -depth, key))
        while len(cached) > self._capacity:
            next_use, _, key = heapq.heappop(self._farthest)
            if cached.get(key) == -next_use:
                del cached[key]
        return hits


def _next_uses(requests: Sequence[PromptRequest]) -> list[list[int]]:
    """For each key of each request, the number of the next request with it."""
    coming: dict[CacheKey, int] = {}
    found: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number].keys
        found.append([coming.get(key, NEVER) for key in keys])
        coming.update(dict.fromkeys(keys, number))
    found.reverse()
    return found
